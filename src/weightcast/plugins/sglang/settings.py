"""The settings of SGLang under which our receiver was not shown to be right; the server does not start with them."""

from __future__ import annotations

import importlib.metadata
import math
import os
from collections.abc import Callable
from typing import Any

from weightcast.errors import ConfigError

_WITH_DRAFT = ("0.5.17", "0.5.23")  # versions of SGLang in which drafts were tried


def _set(name: str, *off: object) -> Callable[[Any], bool]:
    """True if an option has a value other than these; options that a version does not know are off."""
    return lambda args: bool(getattr(args, name, None)) and getattr(args, name) not in off


_REFUSED: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (_set("enable_dp_attention"), "data-parallel attention (--enable-dp-attention)", "start SGLang without it"),
    (_set("ep_size", 1), "expert parallelism (--ep-size)", "start SGLang without it, with --tp-size alone"),
    (_set("nnodes", 1), "ranks on several hosts (--nnodes)", "keep the ranks of a server on one host"),
    (_set("tokenizer_worker_num", 1), "several tokenizer workers (--tokenizer-worker-num)", "use one"),
    (_set("use_ray"), "SGLang's Ray executor (--use-ray)", "start SGLang without it"),
    (_set("grpc_mode"), "SGLang's gRPC server (--grpc-mode)", "use its HTTP server"),
    (_set("smg_grpc_mode"), "SGLang's gRPC server (--smg-grpc-mode)", "use its HTTP server"),
    # It changes weights without SGLang's HTTP routes, which our plug-in closes.
    (_set("grpc_port"), "a gRPC server beside HTTP (--grpc-port)", "use the HTTP server alone"),
    (_set("enable_pdmux"), "prefill and decode side by side (--enable-pdmux)", "start SGLang without it"),
    (_set("disaggregation_mode", "null"), "prefill and decode on servers of their own", "start SGLang without it"),
    (_set("quantization"), "quantised weights (--quantization)", "serve the model unquantised"),
    (_set("torchao_config"), "quantised weights (--torchao-config)", "serve the model unquantised"),
    (_set("modelopt_quant"), "quantised weights (--modelopt-quant)", "serve the model unquantised"),
    (_set("quantize_and_serve"), "quantised weights (--quantize-and-serve)", "serve the model unquantised"),
    (
        lambda args: bool(getattr(args, "speculative_algorithm", None)) and not has_draft(args),
        "a draft model (--speculative-algorithm) other than EAGLE or EAGLE3 with a checkpoint of its own",
        "start SGLang without it",
    ),
    (_set("speculative_token_map"), "a table of a draft's words (--speculative-token-map)", "start SGLang without it"),
    (_set("enable_lora"), "LoRA adapters (--enable-lora)", "merge the adapter in the trainer"),
    (_set("enable_eplb"), "experts that move between ranks (--enable-eplb)", "start SGLang without it"),
    (_set("ep_num_redundant_experts"), "redundant experts (--ep-num-redundant-experts)", "start SGLang without them"),
    (_set("elastic_ep_backend"), "elastic expert parallelism (--elastic-ep-backend)", "start SGLang without it"),
    (_set("enable_elastic_expert_backup"), "a backup of experts (--enable-elastic-expert-backup)", "start without it"),
    (_set("enable_paged_experts"), "experts that are paged in (--enable-paged-experts)", "start SGLang without it"),
    (_set("kt_weight_path"), "experts of KTransformers (--kt-weight-path)", "start SGLang without it"),
    (_set("enable_nvidia_megakernel"), "NVIDIA's megakernel (--enable-nvidia-megakernel)", "start SGLang without it"),
    (_set("enable_hierarchical_cache"), "a KV cache on the host (--enable-hierarchical-cache)", "start without it"),
    (_set("enable_lmcache"), "an external KV cache (--enable-lmcache)", "start SGLang without it"),
    (_set("weight_cache_mode", "off"), "a weight cache that processes share (--weight-cache-mode)", "turn it off"),
    (_set("cpu_offload_gb", 0), "weights on the host (--cpu-offload-gb)", "start SGLang without it"),
    (_set("offload_group_size", -1), "weights on the host (--offload-group-size)", "start SGLang without it"),
    (_set("ple_offload_embedding"), "embeddings on the host (--ple-offload-embedding)", "start SGLang without it"),
    (_set("dllm_algorithm"), "diffusion language models (--dllm-algorithm)", "serve another model"),
)


def has_draft(server_args: Any) -> bool:
    """True if there is a draft model of a kind that was tried with our receiver, and a version in which it was.

    Args:
        server_args: SGLang's ``ServerArgs``.
    """
    path = getattr(server_args, "speculative_draft_model_path", None)
    return (
        str(getattr(server_args, "speculative_algorithm", None)).upper() in ("EAGLE", "EAGLE3")
        and path not in (None, getattr(server_args, "model_path", None))
        and not getattr(server_args, "enable_multi_layer_eagle", False)
        and (getattr(server_args, "pp_size", None) or 1) == 1
        and _version() in _WITH_DRAFT
    )


def updates_draft(server_args: Any) -> bool:
    """True if an update is to write the draft model too, by the variable ``WEIGHTCAST_DRAFT``.

    Raises:
        ConfigError: The variable is neither ``keep`` nor ``update``, or there is no draft to update.
    """
    value = os.environ.get("WEIGHTCAST_DRAFT") or "keep"
    if value not in ("keep", "update"):
        raise ConfigError(f"WEIGHTCAST_DRAFT is {value!r}", hint="use keep or update")
    if value == "update" and not has_draft(server_args):
        raise ConfigError("WEIGHTCAST_DRAFT=update, and SGLang has no draft that an update can reach", hint="unset it")
    return value == "update"


def _version() -> str:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:  # an SGLang that is not installed, but on the path
        return ""


def check_settings(server_args: Any) -> None:
    """Refuses settings that were not shown to work.

    Args:
        server_args: SGLang's ``ServerArgs``.

    Raises:
        ConfigError: A setting is one of them; all are named.
    """
    found = [(what, hint) for is_set, what, hint in _REFUSED if is_set(server_args)]
    if os.environ.get("SGLANG_RUST_SERVER", "0").lower() in ("1", "true"):
        found.append(("SGLang's Rust front end (SGLANG_RUST_SERVER)", "unset the variable"))
    if os.environ.get("SGLANG_GRPC_PORT"):
        found.append(("a gRPC server beside HTTP (SGLANG_GRPC_PORT)", "unset the variable"))
    if found:
        raise ConfigError(
            f"not shown to be right with weightcast's receiver: {', '.join(what for what, _ in found)}",
            hint="; ".join(dict.fromkeys(hint for _, hint in found)) + "; or leave weightcast out of SGLANG_PLUGINS",
        )


def ranks_of(server_args: Any) -> int:
    """Number of scheduler processes, those of all data-parallel engines together."""
    sizes = (getattr(server_args, name, None) or 1 for name in ("dp_size", "tp_size", "pp_size"))
    return math.prod(int(size) for size in sizes)
