"""Places in vLLM that our hooks and our code need: checked at the start of a server that asks for our backend."""

from __future__ import annotations

from weightcast.errors import ConfigError
from weightcast.plugins.engine_needs import EngineNeeds
from weightcast.wire.vllm_versions import INSTALL_NEWER, too_old

VLLM = EngineNeeds(
    name="vLLM",
    package="vllm",
    run_versions=("0.25.1 to 0.33.0",),
    without="name another backend in --weight-transfer-config",
)

_CLIENT = "vllm.v1.engine.async_llm:AsyncLLM"
_CORE = "vllm.v1.engine.core:EngineCore"
_BACKENDS = "vllm.distributed.weight_transfer."

# Functions and classes, with the parameters that our calls and hooks rely on.
IN_SERVER: dict[str, tuple[str, ...]] = {
    f"{_BACKENDS}factory:WeightTransferEngineFactory.create_engine": ("config", "vllm_config"),
    f"{_CORE}._initialize_kv_caches": ("self",),
    f"{_CLIENT}.pause_generation": ("self", "mode", "clear_cache"),
    f"{_CLIENT}.resume_generation": ("self",),
    f"{_CLIENT}.is_paused": ("self",),
    f"{_CLIENT}.collective_rpc": ("self", "method", "timeout", "kwargs"),
    f"{_CLIENT}.reset_encoder_cache": ("self",),
    f"{_CLIENT}.sleep": ("self", "level"),
    f"{_CLIENT}.wake_up": ("self", "tags"),
    f"{_CLIENT}.generate": ("self", "prompt", "sampling_params", "request_id", "lora_request"),
    "vllm.v1.engine.core_client:AsyncMPClient.call_utility_async": ("self", "method"),
    "vllm.v1.engine.core_client:AsyncMPClient.pause_scheduler_async": ("self", "mode", "clear_cache"),
}
IN_RANKS: dict[str, tuple[str, ...]] = {
    f"{_BACKENDS}base:WeightTransferEngine.__init__": ("self", "config", "vllm_config", "device", "model"),
    "vllm.model_executor.model_loader:get_model_loader": ("load_config",),
    "vllm.utils.import_utils:resolve_obj_by_qualname": ("qualname",),
}
# Methods of a worker's class, whichever it is.
WORKER = ("determine_available_memory", "compile_or_warm_up_model", "sleep", "wake_up", "execute_model")


def check_server() -> None:
    """Looks at the version, and for what our hooks in the API server need; ``ConfigError`` if this vLLM lacks it."""
    _check_version()
    VLLM.check(IN_SERVER)


def check_worker(worker_class: type) -> None:
    """Looks at the version, and for the methods of a worker's class that our hooks wrap; ``ConfigError`` without."""
    _check_version()
    place = f"{worker_class.__module__}:{worker_class.__qualname__}."
    VLLM.check({place + name: ("self",) for name in WORKER} | IN_RANKS)


def _check_version() -> None:
    if old := too_old(VLLM.version()):
        raise ConfigError(old, hint=f"{INSTALL_NEWER}, or {VLLM.without}")
