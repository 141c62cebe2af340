"""The settings of LMDeploy under which our receiver was not shown to be right; the server does not start with them."""

from __future__ import annotations

import os
from typing import Any

from weightcast.errors import ConfigError
from weightcast.plugins.drafts import draft_setting
from weightcast.plugins.engine_needs import RefusedSetting, is_on
from weightcast.plugins.hook_points import LMDEPLOY


def _other_role(config: Any) -> bool:
    return getattr(getattr(config, "role", None), "name", "Hybrid") != "Hybrid"


def mp_executor(config: Any) -> bool:
    """True if the ranks are processes of LMDeploy's executor mp, by its ``PytorchEngineConfig``."""
    chosen = getattr(config, "distributed_executor_backend", None) or os.environ.get("LMDEPLOY_EXECUTOR_BACKEND")
    return chosen == "mp"


_REFUSED: tuple[RefusedSetting, ...] = (
    (is_on("dp", 1), "several data-parallel engines (--dp)", "start one server for each"),
    (is_on("ep", 1), "expert parallelism (--ep)", "start LMDeploy without it"),
    (is_on("adapters"), "LoRA adapters (--adapters)", "merge the adapter in the trainer"),
    (is_on("quant_policy"), "a quantised KV cache (--quant-policy)", "start LMDeploy without it"),
    (is_on("model_format", "hf"), "quantised weights (--model-format)", "serve the model unquantised"),
    (is_on("empty_init"), "a start without weights (--empty-init)", "start from a checkpoint"),
    (is_on("enable_microbatch"), "two batches side by side (--enable-microbatch)", "start LMDeploy without it"),
    (is_on("enable_eplb"), "experts that move between ranks (--enable-eplb)", "start LMDeploy without it"),
    (is_on("enable_return_routed_experts"), "returned experts (--enable-return-routed-experts)", "start without it"),
    (is_on("dllm_block_length"), "diffusion language models (--dllm-block-length)", "serve another model"),
    (is_on("kv_transfer_config"), "an external KV cache (--kv-transfer-config)", "start LMDeploy without it"),
    (is_on("memory_model_path"), "a memory model", "start LMDeploy without it"),
    (_other_role, "prefill and decode on servers of their own (--role)", "start LMDeploy without it"),
    (is_on("custom_module_map"), "a module map of your own", "start LMDeploy without it"),
    (lambda config: config.device_type != "cuda", "another device than CUDA (--device)", LMDEPLOY.without),
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
    other = speculative is not None and not has_draft(speculative)
    what = "a draft model (--speculative-algorithm) other than eagle or eagle3 with a checkpoint of its own"
    LMDEPLOY.check_settings(config, _REFUSED, more=((what, "start LMDeploy without it"),) if other else ())
    if draft_setting() and speculative is None:
        raise ConfigError("WEIGHTCAST_DRAFT=update, and LMDeploy was started without a draft model", hint="unset it")
