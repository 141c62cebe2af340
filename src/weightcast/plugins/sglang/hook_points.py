"""Places in SGLang that our hooks and our code need: checked before anything is built."""

from __future__ import annotations

from weightcast.plugins.engine_needs import EngineNeeds

SGLANG = EngineNeeds(
    name="SGLang",
    package="sglang",
    run_versions=("0.5.17", "0.5.23"),
    without="leave weightcast out of SGLANG_PLUGINS",
)
# Folder of the ranks' sockets.  Scheduler processes inherit it.
FOLDER = "WEIGHTCAST_SGLANG_FOLDER"

SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver:SchedulerRequestReceiver"
RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
HTTP = "sglang.srt.entrypoints.http_server:"
ENGINE = "sglang.srt.entrypoints.engine:Engine"
_MANAGER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"
_MESSAGES = "sglang.srt.managers.io_struct:"

# Functions and classes, with the parameters that our calls and hooks rely on.
_IN_RANKS: dict[str, tuple[str, ...]] = {
    f"{RUNNER}.load_model": ("self",),
    f"{SCHEDULER}.__init__": ("self",),
    f"{SCHEDULER}.pause_generation": ("self", "recv_req"),
    f"{SCHEDULER}.continue_generation": ("self", "recv_req"),
    f"{SCHEDULER}.abort_request": ("self", "recv_req"),
    f"{SCHEDULER}.flush_cache": ("self", "empty_cache"),
    f"{SCHEDULER}._maybe_namespace_elastic_radix_cache": ("self", "req"),
    f"{RECEIVER}._pull_raw_reqs": ("self",),
    f"{UPDATER}.release_memory_occupation": ("self", "recv_req"),
    f"{UPDATER}.resume_memory_occupation": ("self", "recv_req"),
    "sglang.srt.model_loader.loader:DefaultModelLoader._get_all_weights": ("self", "model_config", "model"),
    "sglang.srt.runtime_context:get_parallel": (),
    "sglang.utils:TypeBasedDispatcher": ("mapping",),
    f"{_MESSAGES}PauseGenerationReqInput": ("mode",),
    f"{_MESSAGES}ContinueGenerationReqInput": ("torch_empty_cache",),
    f"{_MESSAGES}AbortReq": ("rid", "abort_all"),
}
_IN_MAIN: dict[str, tuple[str, ...]] = {
    f"{HTTP}_setup_and_run_http_server": ("server_args", "tokenizer_manager"),
    f"{ENGINE}._launch_subprocesses": ("server_args",),
    f"{_MANAGER}._dispatch_to_scheduler": ("self", "obj"),
    f"{_MANAGER}.release_memory_occupation": ("self", "obj"),
    f"{_MANAGER}.resume_memory_occupation": ("self", "obj"),
    f"{_MANAGER}._update_weight_version_if_provided": ("self", "weight_version"),
    "sglang.srt.utils.auth:AuthLevel": (),
    "sglang.srt.utils.auth:_get_auth_level_from_app_and_scope": ("app", "scope"),
}
# Attributes that only an instance has.
SCHEDULER_ATTRIBUTES = (
    "_engine_paused",
    "_request_dispatcher",
    "grammar_manager",
    "idle_sleeper",
    "is_fully_idle",
    "request_receiver",
    "running_batch",
    "tree_cache",
    "waiting_queue",
)
REQUEST_RECEIVER_ATTRIBUTES = ("recv_from_rpc", "recv_from_tokenizer")
MANAGER_ATTRIBUTES = ("is_pause", "is_pause_cond", "model_update_lock")


def check(*, main: bool) -> None:
    """Looks for everything that our code needs, here or in the main process; ``ConfigError`` names what is missing."""
    SGLANG.check(_IN_RANKS | _IN_MAIN if main else _IN_RANKS)
