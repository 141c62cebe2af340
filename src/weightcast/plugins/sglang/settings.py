"""The settings of SGLang under which our receiver was not shown to be right; the server does not start with them."""

# SGLang is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from weightcast.errors import ConfigError
from weightcast.plugins.drafts import draft_setting
from weightcast.plugins.engine_needs import RefusedSetting, is_on
from weightcast.plugins.hook_points import SGLANG
from weightcast.plugins.pause_state import WEIGHTS

TAGS = ("kv_cache", WEIGHTS, "cuda_graph")  # SGLang's own, all of which an empty list means
WAKE_FIRST = (
    "POST /resume_memory_occupation with tags [weights], then update; tags [kv_cache, cuda_graph] can come last"
)

_REFUSED: tuple[RefusedSetting, ...] = (
    (is_on("enable_dp_attention"), "data-parallel attention (--enable-dp-attention)", "start SGLang without it"),
    (is_on("ep_size", 1), "expert parallelism (--ep-size)", "start SGLang without it, with --tp-size alone"),
    (is_on("nnodes", 1), "ranks on several hosts (--nnodes)", "keep the ranks of a server on one host"),
    (is_on("tokenizer_worker_num", 1), "several tokenizer workers (--tokenizer-worker-num)", "use one"),
    (is_on("use_ray"), "SGLang's Ray executor (--use-ray)", "start SGLang without it"),
    (is_on("grpc_mode"), "SGLang's gRPC server (--grpc-mode)", "use its HTTP server"),
    (is_on("smg_grpc_mode"), "SGLang's gRPC server (--smg-grpc-mode)", "use its HTTP server"),
    # It changes weights without SGLang's HTTP routes, which our plug-in closes.
    (is_on("grpc_port"), "a gRPC server beside HTTP (--grpc-port)", "use the HTTP server alone"),
    (is_on("enable_pdmux"), "prefill and decode side by side (--enable-pdmux)", "start SGLang without it"),
    (
        is_on("disaggregation_mode", "null"),
        "prefill and decode on servers of their own (--disaggregation-mode)",
        "start SGLang without it",
    ),
    (is_on("quantization"), "quantised weights (--quantization)", "serve the model unquantised"),
    (is_on("torchao_config"), "quantised weights (--torchao-config)", "serve the model unquantised"),
    (is_on("modelopt_quant"), "quantised weights (--modelopt-quant)", "serve the model unquantised"),
    (is_on("quantize_and_serve"), "quantised weights (--quantize-and-serve)", "serve the model unquantised"),
    (
        lambda args: bool(getattr(args, "speculative_algorithm", None)) and not has_draft(args),
        "a draft model (--speculative-algorithm) other than EAGLE or EAGLE3 with a checkpoint of its own",
        "start SGLang without it",
    ),
    (is_on("speculative_token_map"), "a table of a draft's words (--speculative-token-map)", "start SGLang without it"),
    (is_on("enable_lora"), "LoRA adapters (--enable-lora)", "merge the adapter in the trainer"),
    # SGLang turns LoRA on for them, in some versions after this is looked at.
    (is_on("lora_paths"), "LoRA adapters (--lora-paths)", "merge the adapter in the trainer"),
    (is_on("enable_eplb"), "experts that move between ranks (--enable-eplb)", "start SGLang without it"),
    (is_on("ep_num_redundant_experts"), "redundant experts (--ep-num-redundant-experts)", "start SGLang without them"),
    (is_on("elastic_ep_backend"), "elastic expert parallelism (--elastic-ep-backend)", "start SGLang without it"),
    (is_on("enable_elastic_expert_backup"), "a backup of experts (--enable-elastic-expert-backup)", "start without it"),
    (is_on("enable_paged_experts"), "experts that are paged in (--enable-paged-experts)", "start SGLang without it"),
    (is_on("kt_weight_path"), "experts of KTransformers (--kt-weight-path)", "start SGLang without it"),
    (is_on("enable_nvidia_megakernel"), "NVIDIA's megakernel (--enable-nvidia-megakernel)", "start SGLang without it"),
    (is_on("enable_hierarchical_cache"), "a KV cache on the host (--enable-hierarchical-cache)", "start without it"),
    (is_on("enable_lmcache"), "an external KV cache (--enable-lmcache)", "start SGLang without it"),
    (is_on("enable_flexkv"), "an external KV cache (--enable-flexkv)", "start SGLang without it"),
    (
        is_on("enable_unified_cache_external_linker"),
        "an external KV cache (--enable-unified-cache-external-linker)",
        "start SGLang without it",
    ),
    (is_on("radix_cache_backend"), "a prefix cache of another make (--radix-cache-backend)", "start SGLang without it"),
    (is_on("enable_hisparse"), "a sparse KV cache on the host (--enable-hisparse)", "start SGLang without it"),
    # Such a session's next request goes on with the KV cache that its last one left, whatever its extra key.
    (
        is_on("enable_streaming_session"),
        "sessions that keep their KV cache (--enable-streaming-session)",
        "leave it out",
    ),
    # Only SGLang's own update routes, which our plug-in closes, would end the wait.
    (
        is_on("checkpoint_engine_wait_weights_before_ready"),
        "a start that waits for checkpoint-engine (--checkpoint-engine-wait-weights-before-ready)",
        "start SGLang without it",
    ),
    (
        is_on("startup_weight_load_mode", "serial"),
        "weights that load while graphs are captured (--startup-weight-load-mode)",
        "start SGLang without it",
    ),
    (is_on("attn_cp_size", 1), "context parallelism (--attn-cp-size)", "start SGLang without it"),
    (is_on("dcp_size", 1), "context parallelism (--dcp-size)", "start SGLang without it"),
    (is_on("moe_dp_size", 1), "data parallelism of experts (--moe-dp-size)", "start SGLang without it"),
    (is_on("dwdp_size", 1), "experts whose weights are fetched (--dwdp-size)", "start SGLang without it"),
    (is_on("enable_http2"), "an HTTP/2 server (--enable-http2)", "start SGLang without it"),
    (is_on("weight_cache_mode", "off"), "a weight cache that processes share (--weight-cache-mode)", "turn it off"),
    (is_on("cpu_offload_gb", 0), "weights on the host (--cpu-offload-gb)", "start SGLang without it"),
    (is_on("offload_group_size", -1), "weights on the host (--offload-group-size)", "start SGLang without it"),
    (is_on("ple_offload_embedding"), "embeddings on the host (--ple-offload-embedding)", "start SGLang without it"),
    (is_on("dllm_algorithm"), "diffusion language models (--dllm-algorithm)", "serve another model"),
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
    refused = [(_is_on_in_either(is_set, settings), what, hint) for is_set, what, hint in _REFUSED]
    SGLANG.check_settings(server_args, refused, more=found)


def _is_on_in_either(is_set: Callable[[Any], bool], settings: Any) -> Callable[[Any], bool]:
    return lambda given: is_set(given) or is_set(settings)


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
