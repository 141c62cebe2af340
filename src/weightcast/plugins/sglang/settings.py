"""The settings of SGLang under which our receiver was not shown to be right; the server does not start with them."""

# SGLang is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import math
import os
from typing import Any

from weightcast.errors import ConfigError
from weightcast.plugins.drafts import draft_setting
from weightcast.plugins.engine_needs import RefusedSetting
from weightcast.plugins.hook_points import SGLANG
from weightcast.plugins.pause_state import WEIGHTS

TAGS = ("kv_cache", WEIGHTS, "cuda_graph")  # SGLang's own, all of which an empty list means
WAKE_FIRST = (
    "POST /resume_memory_occupation with tags [weights], then update; tags [kv_cache, cuda_graph] can come last"
)

_REFUSED = (
    RefusedSetting("enable_dp_attention", "data-parallel attention"),
    RefusedSetting("ep_size", "expert parallelism", "start SGLang without it, with --tp-size alone", off=1),
    RefusedSetting("nnodes", "ranks on several hosts", "keep the ranks of a server on one host", off=1),
    RefusedSetting("tokenizer_worker_num", "several tokenizer workers", "use one", off=1),
    RefusedSetting("use_ray", "SGLang's Ray executor"),
    RefusedSetting("grpc_mode", "SGLang's gRPC server", "use its HTTP server"),
    RefusedSetting("smg_grpc_mode", "SGLang's gRPC server", "use its HTTP server"),
    # It changes weights without SGLang's HTTP routes, which our plug-in closes.
    RefusedSetting("grpc_port", "a gRPC server beside HTTP", "use the HTTP server alone"),
    RefusedSetting("enable_pdmux", "prefill and decode side by side"),
    RefusedSetting("disaggregation_mode", "prefill and decode on servers of their own", off="null"),
    RefusedSetting("quantization", "quantised weights", "serve the model unquantised"),
    RefusedSetting("torchao_config", "quantised weights", "serve the model unquantised"),
    RefusedSetting("modelopt_quant", "quantised weights", "serve the model unquantised"),
    RefusedSetting("quantize_and_serve", "quantised weights", "serve the model unquantised"),
    RefusedSetting("speculative_token_map", "a table of a draft's words"),
    RefusedSetting("enable_lora", "LoRA adapters", "merge the adapter in the trainer"),
    # SGLang turns LoRA on for them, in some versions after this is looked at.
    RefusedSetting("lora_paths", "LoRA adapters", "merge the adapter in the trainer"),
    RefusedSetting("enable_eplb", "experts that move between ranks"),
    RefusedSetting("ep_num_redundant_experts", "redundant experts"),
    RefusedSetting("elastic_ep_backend", "elastic expert parallelism"),
    RefusedSetting("enable_elastic_expert_backup", "a backup of experts"),
    RefusedSetting("enable_paged_experts", "experts that are paged in"),
    RefusedSetting("kt_weight_path", "experts of KTransformers"),
    RefusedSetting("enable_nvidia_megakernel", "NVIDIA's megakernel"),
    RefusedSetting("enable_hierarchical_cache", "a KV cache on the host"),
    RefusedSetting("enable_lmcache", "an external KV cache"),
    RefusedSetting("enable_flexkv", "an external KV cache"),
    RefusedSetting("enable_unified_cache_external_linker", "an external KV cache"),
    RefusedSetting("radix_cache_backend", "a prefix cache of another make"),
    RefusedSetting("enable_hisparse", "a sparse KV cache on the host"),
    # Such a session's next request goes on with the KV cache that its last one left, whatever its extra key.
    RefusedSetting("enable_streaming_session", "sessions that keep their KV cache"),
    # Only SGLang's own update routes, which our plug-in closes, would end the wait.
    RefusedSetting("checkpoint_engine_wait_weights_before_ready", "a start that waits for checkpoint-engine"),
    RefusedSetting("startup_weight_load_mode", "weights that load while graphs are captured", off="serial"),
    RefusedSetting("attn_cp_size", "context parallelism", off=1),
    RefusedSetting("dcp_size", "context parallelism", off=1),
    RefusedSetting("moe_dp_size", "data parallelism of experts", off=1),
    RefusedSetting("dwdp_size", "experts whose weights are fetched", off=1),
    RefusedSetting("enable_http2", "an HTTP/2 server"),
    RefusedSetting("weight_cache_mode", "a weight cache that processes share", "turn it off", off="off"),
    RefusedSetting("cpu_offload_gb", "weights on the host", off=0),
    RefusedSetting("offload_group_size", "weights on the host", off=-1),
    RefusedSetting("ple_offload_embedding", "embeddings on the host"),
    RefusedSetting("dllm_algorithm", "diffusion language models", "serve another model"),
)


def resolved(server_args: Any) -> Any:
    """The settings with which SGLang runs, which may differ from those that it was given.

    SGLang 0.5.17 writes them into ``ServerArgs``.  0.5.23 keeps what it was given there, and its decisions beside them:
    ``--lora-paths`` alone turns LoRA on, for example.

    Raises:
        ConfigError: This SGLang keeps its decisions elsewhere.
    """
    if not hasattr(server_args, "resolve_once"):
        return server_args
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
    except ImportError as error:
        raise SGLANG.other_version([f"its decisions about settings cannot be read ({error})"]) from error
    return resolving_view(server_args)


def has_draft(server_args: Any) -> bool:
    """True if there is a draft model of a kind that was tried with our receiver, and a version in which it was."""
    return SGLANG.version() in SGLANG.run_versions and _has_draft(server_args) and _has_draft(resolved(server_args))


def _has_draft(settings: Any) -> bool:
    path = getattr(settings, "speculative_draft_model_path", None)
    return (
        str(getattr(settings, "speculative_algorithm", None)).upper() in ("EAGLE", "EAGLE3")
        and path not in (None, getattr(settings, "model_path", None))
        and not getattr(settings, "enable_multi_layer_eagle", False)
        and (getattr(settings, "pp_size", None) or 1) == 1
    )


def updates_draft(server_args: Any) -> bool:
    """True if an update is to write the draft model too, by the variable ``WEIGHTCAST_DRAFT``.

    Raises:
        ConfigError: The variable is neither ``keep`` nor ``update``, or there is no draft to update.
    """
    updates = draft_setting()
    if updates and not has_draft(server_args):
        raise ConfigError("WEIGHTCAST_DRAFT=update, and SGLang has no draft that an update can reach", hint="unset it")
    return updates


def check_settings(server_args: Any) -> None:
    """Raises ``ConfigError`` for all settings that were not shown to work, whether given or decided on by SGLang."""
    found: list[tuple[str, str]] = []
    if os.environ.get("SGLANG_RUST_SERVER", "0").lower() in ("1", "true"):
        found.append(("SGLang's Rust front end (SGLANG_RUST_SERVER)", "unset the variable"))
    if os.environ.get("SGLANG_GRPC_PORT"):
        found.append(("a gRPC server beside HTTP (SGLANG_GRPC_PORT)", "unset the variable"))
    settings = resolved(server_args)
    for options in (server_args, settings):
        if getattr(options, "speculative_algorithm", None) and not has_draft(options):
            what = "a draft model (--speculative-algorithm) other than EAGLE or EAGLE3 with a checkpoint of its own"
            found.append((what, ""))
            break
    SGLANG.check_settings((server_args, settings), _REFUSED, more=found)


def ranks_of(server_args: Any) -> int:
    """Number of scheduler processes, those of all data-parallel engines together."""
    settings = resolved(server_args)
    sizes = (getattr(settings, name, None) or 1 for name in ("dp_size", "tp_size", "pp_size"))
    return math.prod(int(size) for size in sizes)


def tags_of(request: Any) -> frozenset[str]:
    """The memory that a request to sleep or to wake up names; all of it if it names none."""
    return frozenset(request.tags or TAGS)


def loses_weights(server_args: Any) -> bool:
    """Returns whether weights that sleep come back with other contents."""
    saves, keeps = "enable_memory_saver", "enable_weights_cpu_backup"
    return bool(getattr(server_args, saves, False)) and not getattr(server_args, keeps, False)
