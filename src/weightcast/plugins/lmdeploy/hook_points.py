"""Where our code is called inside LMDeploy, what it needs there, and settings that are refused: checked at start."""

from __future__ import annotations

import os
from typing import Any

from weightcast.errors import ConfigError
from weightcast.plugins.drafts import draft_setting
from weightcast.plugins.engine_needs import EngineNeeds, RefusedSetting, is_on

LMDEPLOY = EngineNeeds(name="LMDeploy", package="lmdeploy", run_versions=("0.18.0",), without="start `lmdeploy` itself")

_SERVER = "lmdeploy.serve.openai.api_server:"
_LOOP = "lmdeploy.pytorch.engine.engine_loop:EngineLoop"
_MAKER = "lmdeploy.pytorch.engine.inputs_maker:InputsMakerAsync"
_SCHEDULER = "lmdeploy.pytorch.paging.scheduler:Scheduler"
_AGENT = "lmdeploy.pytorch.engine.model_agent.agent:"
_REQUESTS = "lmdeploy.pytorch.engine.request:"
_WEIGHTS = "lmdeploy.pytorch.weight_loader.model_weight_loader:"
_DRAFTS = "lmdeploy.pytorch.spec_decode."
_MP = "lmdeploy.pytorch.engine.executor.mp_executor:"
_ZMQ = "lmdeploy.pytorch.engine.mp_engine.zmq_engine:ZMQMPEngine"

# Methods of the agent that write weights for LMDeploy's own routes.
OWN_UPDATES = ("update_params", "update_weights_from_distributed", "update_weights_from_ipc")

# Functions and classes, with the parameters that our calls and hooks rely on.
IN_SERVER: dict[str, tuple[str, ...]] = {
    "lmdeploy.cli.entrypoint:run": (),
    f"{_SERVER}serve": (
        "model_path",
        "model_name",
        "backend",
        "backend_config",
        "server_name",
        "server_port",
        "api_keys",
        "speculative_config",
    ),
    f"{_SERVER}create_openai_router": ("server_context",),
    "lmdeploy.serve.core.async_engine:AsyncEngine.sleep": ("self", "level"),
    "lmdeploy.serve.core.async_engine:AsyncEngine.wakeup": ("self", "tags"),
    f"{_ZMQ}._mp_proc": ("shared_dict", "condition", "model_path", "engine_config", "log_level", "speculative_config"),
    f"{_ZMQ}._collective_rpc_async": ("self", "func"),
}
IN_ENGINE: dict[str, tuple[str, ...]] = {
    f"{_ZMQ}._mp_proc": ("shared_dict", "condition", "model_path"),
    "lmdeploy.pytorch.config:ModelConfig.from_pretrained": ("is_draft_model",),
    "lmdeploy.pytorch.engine.mp_engine.base_worker:EngineWorkerBase": ("engine",),
    f"{_LOOP}.__init__": ("self", "req_manager", "scheduler", "executor", "inputs_maker"),
    f"{_MAKER}.send_next_inputs": ("self",),
    f"{_MAKER}.prefetch_next_inputs": ("self",),
    f"{_MAKER}.has_pending_long_context_chunk": ("self",),
    f"{_MAKER}.reset_runtime_state": ("self",),
    "lmdeploy.pytorch.engine.engine:build_executor": ("model_path",),
    "lmdeploy.pytorch.engine.executor.base:ExecutorBase.forward_async": ("self", "inputs"),
    "lmdeploy.pytorch.engine.executor.base:ExecutorBase.get_output_async": ("self",),
    f"{_MP}Notifier.wait_async": ("self",),
    f"{_MP}Notifier._update_event_id": ("self",),
    f"{_MP}MPExecutor.collective_rpc": ("self", "method", "args", "kwargs", "receiver_mask", "return_mask"),
    f"{_MP}MPExecutor.__init__": ("self", "model_path"),
    f"{_MP}MPExecutor.release": ("self",),
    f"{_MP}ExecutorProc.__init__": ("self", "proc_id", "mp_ctx"),
    f"{_SCHEDULER}.preempt_seqs": ("self", "seqs"),
    f"{_SCHEDULER}.end_session": ("self", "session_id"),
    f"{_SCHEDULER}.has_unfinished": ("self",),
    f"{_SCHEDULER}.num_running": ("self",),
    "lmdeploy.pytorch.paging.seq_states.states:StateBase.release_paging_resources": ("self",),
    "lmdeploy.pytorch.paging.block_trie:BlockTrie.evict": ("self", "max_num_blocks"),
    f"{_REQUESTS}RequestManager.reject_request": ("self", "resp", "reason"),
    f"{_REQUESTS}RequestManager.bind_func": ("self", "req_type", "callback"),
    f"{_REQUESTS}RequestType": (),
    "lmdeploy.pytorch.messages:MessageStatus": (),
}
IN_RANKS: dict[str, tuple[str, ...]] = {
    f"{_AGENT}load_model_weights": ("model", "checkpoint_path", "device"),
    f"{_DRAFTS}base:BaseSpecModelAgent.build_model": ("self", "empty_init", "target_model"),
    f"{_DRAFTS}base:BaseSpecModelAgent.is_enabled": ("self",),
    f"{_DRAFTS}spec_agent:SpecModelAgent.build_model": ("self", "empty_init", "target_model"),
    f"{_DRAFTS}proposers.eagle3:Eagle3._init_bitmask_translate_constants": ("self",),
    f"{_AGENT}BaseModelAgent._async_step": ("self", "inputs"),
    f"{_AGENT}BaseModelAgent.reset_runtime_state": ("self",),
    f"{_AGENT}BaseModelAgent.sleep": ("self", "level"),
    f"{_AGENT}BaseModelAgent.wakeup": ("self", "tags"),
    **{f"{_AGENT}BaseModelAgent.{name}": ("self", "request") for name in OWN_UPDATES},
    "lmdeploy.pytorch.nn.attention:Attention.forward": ("self", "k_scales_zeros", "v_scales_zeros"),
    f"{_WEIGHTS}ModelWeightLoader": ("model_path",),
    f"{_WEIGHTS}ModelWeightLoader._get_weights_iterator": ("self", "path"),
    f"{_WEIGHTS}ModelWeightLoader._rename_weights_iterator": ("iterator", "model"),
    "lmdeploy.pytorch.distributed:get_dist_manager": (),
}
# Attributes that only an instance has.
LOOP_ATTRIBUTES = ("req_manager", "scheduler", "executor", "inputs_maker", "has_runable_event", "reset_runtime_state")
SCHEDULER_ATTRIBUTES = ("sessions", "seq_manager", "block_trie")


def check(needed: dict[str, tuple[str, ...]]) -> None:
    """Raises ``ConfigError`` for versions that were not run, and if something that our code needs is missing."""
    found = LMDEPLOY.version()
    if found not in LMDEPLOY.run_versions:
        raise ConfigError(
            f"this is LMDeploy {found or 'of an unknown version'}, where this plug-in was not run",
            hint=f"install LMDeploy {' or '.join(LMDEPLOY.run_versions)}, or {LMDEPLOY.without}",
        )
    LMDEPLOY.check(needed)


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
