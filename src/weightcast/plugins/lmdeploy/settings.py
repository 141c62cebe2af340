"""The settings of LMDeploy under which our receiver was not shown to be right; the server does not start with them."""

from __future__ import annotations

import os
from typing import Any

from weightcast.errors import ConfigError
from weightcast.plugins.drafts import draft_setting
from weightcast.plugins.engine_needs import RefusedSetting
from weightcast.plugins.hook_points import LMDEPLOY


def mp_executor(config: Any) -> bool:
    """True if the ranks are processes of LMDeploy's executor mp, by its ``PytorchEngineConfig``."""
    chosen = getattr(config, "distributed_executor_backend", None) or os.environ.get("LMDEPLOY_EXECUTOR_BACKEND")
    return chosen == "mp"


_REFUSED = (
    RefusedSetting("dp", "several data-parallel engines", "start one server for each", off=1),
    RefusedSetting("ep", "expert parallelism", off=1),
    RefusedSetting("adapters", "LoRA adapters", "merge the adapter in the trainer"),
    RefusedSetting("quant_policy", "a quantised KV cache"),
    RefusedSetting("model_format", "quantised weights", "serve the model unquantised", off="hf"),
    RefusedSetting("empty_init", "a start without weights", "start from a checkpoint"),
    RefusedSetting("enable_microbatch", "two batches side by side"),
    RefusedSetting("enable_eplb", "experts that move between ranks"),
    RefusedSetting("enable_return_routed_experts", "returned experts"),
    RefusedSetting("dllm_block_length", "diffusion language models", "serve another model"),
    RefusedSetting("kv_transfer_config", "an external KV cache"),
    RefusedSetting("memory_model_path", "a memory model (memory_model_path)"),
    RefusedSetting("custom_module_map", "a module map of your own (custom_module_map)"),
    RefusedSetting("device_type", "another device than CUDA (--device)", LMDEPLOY.without, off="cuda"),
)


def has_draft(speculative: Any) -> bool:
    """True if LMDeploy's ``SpeculativeConfig`` has a draft model of a kind that was tried with our receiver."""
    return getattr(speculative, "method", None) in ("eagle", "eagle3") and bool(getattr(speculative, "model", None))


def check_settings(backend: str, config: Any, speculative: Any) -> None:
    """Refuses settings that were not shown to work, with a ``ConfigError`` that names all.

    Args:
        config: LMDeploy's ``PytorchEngineConfig``.
        speculative: LMDeploy's ``SpeculativeConfig``; None without a draft model.
    """
    if backend != "pytorch":
        words = f"the receiver lives in LMDeploy's PyTorch engine, not in {backend or 'another one'}"
        raise ConfigError(words, hint="use --backend pytorch")
    found: list[tuple[str, str]] = []
    if getattr(getattr(config, "role", None), "name", "Hybrid") != "Hybrid":
        found.append(("prefill and decode on servers of their own (--role)", ""))
    if speculative is not None and not has_draft(speculative):
        what = "a draft model (--speculative-algorithm) other than eagle or eagle3 with a checkpoint of its own"
        found.append((what, ""))
    LMDEPLOY.check_settings([config], _REFUSED, more=found)
    if draft_setting() and speculative is None:
        raise ConfigError("WEIGHTCAST_DRAFT=update, and LMDeploy was started without a draft model", hint="unset it")
