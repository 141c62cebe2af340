"""Calls our receiver where a vLLM worker measures memory, warms up, sleeps and wakes, and adds a call that switches.

vLLM's plug-in points for weight transfer have no hook there, so this module wraps methods of the worker's class, once
in each worker process.  A worker with another weight-transfer backend is not affected.
"""

from __future__ import annotations

import functools
from typing import Any

# Names of the worker's methods for ``collective_rpc``.
SWITCH = "weightcast_switch"
ADAPTER = "weightcast_adapter"
RESTORE = "weightcast_restore"
_DONE = "_weightcast_around"


def wrap_worker(worker_class: type[Any], kind: type[Any]) -> None:
    """Wraps some methods of a worker's class; safe to call twice.  ``kind`` is ``worker.WeightcastEngine``."""
    if _DONE in vars(worker_class):
        return
    measure, compile_model, sleep, wake_up = (
        getattr(worker_class, name)
        for name in ("determine_available_memory", "compile_or_warm_up_model", "sleep", "wake_up")
    )

    def ours(worker: Any) -> Any:
        backend = getattr(worker, "weight_transfer_engine", None)
        return backend if isinstance(backend, kind) else None

    @functools.wraps(measure)
    def determine_available_memory(self: Any) -> int:
        cache_bytes = measure(self)
        backend = ours(self)
        return cache_bytes if backend is None else backend.take_room(self, cache_bytes)

    @functools.wraps(compile_model)
    def compile_or_warm_up_model(self: Any) -> Any:
        backend = ours(self)
        if backend is not None:  # before vLLM captures graphs: memory that grows later would move under them
            backend.warm_up(self)
        return compile_model(self)

    @functools.wraps(sleep)
    def fall_asleep(self: Any, level: int = 1) -> Any:
        backend = ours(self)
        if backend is None:
            return sleep(self, level)
        backend.sets.fall_asleep(level)
        answer = sleep(self, level)
        backend.sets.let_go()  # vLLM has read buffers until now
        return answer

    @functools.wraps(wake_up)
    def wake(self: Any, tags: list[str] | None = None) -> Any:
        backend = ours(self)
        if backend is None:
            return wake_up(self, tags)
        failure = backend.sets.restore(tags)  # vLLM writes buffers
        if failure:
            raise RuntimeError(failure)
        answer = wake_up(self, tags)
        backend.sets.wake(tags)
        return answer

    reload = getattr(worker_class, "reload_weights", None)

    def reload_weights(self: Any, *arguments: Any, **named: Any) -> Any:
        if ours(self) is not None:  # the version and its proof would stay, with other weights under them
            raise RuntimeError(
                "with the backend weightcast, reload_weights would put other weights under the version that this "
                "engine reports: send an update"
            )
        assert reload is not None
        return reload(self, *arguments, **named)

    def switch(self: Any, why_not: str = "") -> str:
        """Carries out what waits for this thread, or refuses it for the reason ``why_not``; returns a failure."""
        backend = ours(self)
        assert backend is not None
        adapter = backend.adapters.step(why_not)
        switched, failure = backend.rank_server.step_unless(why_not)
        reset = getattr(self.model_runner, "reset_lora_state", None)
        if switched and reset is not None:  # as vLLM does after a weight transfer of its own
            reset()
            backend.adapters.keep()
        return adapter or failure

    def adapter(self: Any, order: str) -> str:
        backend = ours(self)
        assert backend is not None
        return backend.adapters.carry_out(self.model_runner, order)

    def restore(self: Any, tags: list[str] | None) -> str:
        backend = ours(self)
        assert backend is not None
        return backend.sets.restore(tags)

    # vLLM's decorator ``inference_mode`` stays on vLLM's own methods only.
    worker_class.determine_available_memory = determine_available_memory
    worker_class.compile_or_warm_up_model = compile_or_warm_up_model
    worker_class.sleep = fall_asleep
    worker_class.wake_up = wake
    if reload is not None:
        worker_class.reload_weights = functools.wraps(reload)(reload_weights)
    setattr(worker_class, SWITCH, switch)
    setattr(worker_class, ADAPTER, adapter)
    setattr(worker_class, RESTORE, restore)
    setattr(worker_class, _DONE, True)
