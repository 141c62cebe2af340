"""The settings of LMDeploy under which our receiver was not shown to be right; the server does not start with them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from weightcast.errors import ConfigError

WITHOUT = "start `lmdeploy` itself"


def _set(name: str, *off: object) -> Callable[[Any], bool]:
    """True if an option has a value other than these."""
    return lambda config: bool(getattr(config, name, None)) and getattr(config, name) not in off


def _other_role(config: Any) -> bool:
    return getattr(getattr(config, "role", None), "name", "Hybrid") != "Hybrid"


def mp_executor(config: Any) -> bool:
    """True if the ranks are processes of LMDeploy's executor mp.

    Args:
        config: LMDeploy's ``PytorchEngineConfig``.
    """
    chosen = getattr(config, "distributed_executor_backend", None) or os.environ.get("LMDEPLOY_EXECUTOR_BACKEND")
    return chosen == "mp"


_REFUSED: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (_set("dp", 1), "several data-parallel engines (--dp)", "start one server for each"),
    (_set("ep", 1), "expert parallelism (--ep)", "start LMDeploy without it"),
    (_set("adapters"), "LoRA adapters (--adapters)", "merge the adapter in the trainer"),
    (_set("quant_policy"), "a quantised KV cache (--quant-policy)", "start LMDeploy without it"),
    (_set("model_format", "hf"), "quantised weights (--model-format)", "serve the model unquantised"),
    (_set("empty_init"), "a start without weights (--empty-init)", "start from a checkpoint"),
    (_set("enable_microbatch"), "two batches side by side (--enable-microbatch)", "start LMDeploy without it"),
    (_set("enable_eplb"), "experts that move between ranks (--enable-eplb)", "start LMDeploy without it"),
    (_set("enable_return_routed_experts"), "returned experts (--enable-return-routed-experts)", "start without it"),
    (_set("dllm_block_length"), "diffusion language models (--dllm-block-length)", "serve another model"),
    (_set("kv_transfer_config"), "an external KV cache (--kv-transfer-config)", "start LMDeploy without it"),
    (_set("memory_model_path"), "a memory model", "start LMDeploy without it"),
    (_other_role, "prefill and decode on servers of their own (--role)", "start LMDeploy without it"),
    (_set("custom_module_map"), "a module map of your own", "start LMDeploy without it"),
    (lambda config: config.device_type != "cuda", "another device than CUDA (--device)", WITHOUT),
)


def check_settings(backend: str, config: Any, speculative: Any) -> None:
    """Refuses settings that were not shown to work.

    Args:
        backend: ``pytorch`` or ``turbomind``.
        config: LMDeploy's ``PytorchEngineConfig``.
        speculative: LMDeploy's ``SpeculativeConfig``; None without a draft model.

    Raises:
        ConfigError: A setting is one of them; all are named.
    """
    if backend != "pytorch":
        words = f"the receiver lives in LMDeploy's PyTorch engine, not in {backend or 'another one'}"
        raise ConfigError(words, hint="use --backend pytorch")
    found = [(what, hint) for is_set, what, hint in _REFUSED if is_set(config)]
    if speculative is not None:
        found.append(("a draft model (--speculative-algorithm)", "start LMDeploy without it"))
    if found:
        raise ConfigError(
            f"not shown to be right with weightcast's receiver: {', '.join(what for what, _ in found)}",
            hint="; ".join(dict.fromkeys(hint for _, hint in found)) + f"; or {WITHOUT}",
        )
