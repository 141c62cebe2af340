"""The receiver's engine hooks in SGLang's API server: hold requests back, wait for those that run, set the version.

Threads of the server call these methods; SGLang's tokenizer manager lives on the server's event loop.  The pause modes
``in_place`` and ``retract`` are part of the switch itself, in the ranks (``requests_at_switch``).
"""

# SGLang is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

from weightcast.config import PauseMode
from weightcast.errors import EngineFailure, Refused
from weightcast.plugins.api_server import result_of
from weightcast.plugins.sglang.hook_points import MANAGER_ATTRIBUTES, SGLANG

_SHORT_S = 30.0
_LOOK_S = 0.02


class SglangHooks:
    """``EngineHooks`` over SGLang's tokenizer manager."""

    def __init__(self, manager: Any) -> None:
        """``manager`` is SGLang's ``TokenizerManager``; ``ConfigError`` if it is not as we know it."""
        SGLANG.check_attributes(manager, MANAGER_ATTRIBUTES)
        self._manager = manager
        self._loop: asyncio.AbstractEventLoop | None = None
        self._held = False
        self._asleep: frozenset[str] = frozenset()
        self._draining: Future[Any] | None = None

    def set_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Notes the server's event loop, which exists once the server runs."""
        self._loop = loop

    @property
    def paused(self) -> bool:
        """True while SGLang is paused, by its operator, an update or the quarantine."""
        return bool(self._manager.is_pause)

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Returns when no request runs, for ``abort`` and ``wait``; at once for the modes that keep requests.

        A server that its operator has paused is left as it is: nothing of it generates.  Nor does one that sleeps.
        """
        if mode in ("in_place", "retract") or self._asleep or (self.paused and not self._held):
            return
        self._held = True
        work = asyncio.run_coroutine_threadsafe(self._drain(abort=mode == "abort"), self._running_loop())
        self._draining = work if mode == "wait" else None
        try:
            self._result(work, timeout_s, "running requests to stop")
        finally:
            self._draining = None

    def stop_waiting(self) -> None:
        """Cancels a pause that waits for running requests; ``resume`` must follow."""
        draining = self._draining
        if draining is not None:
            draining.cancel()

    def resume(self) -> None:
        """Lets requests go on, unless an operator has paused SGLang or some of its memory sleeps."""
        if self._held and not self._asleep:
            self._held = False
            self._run(self._release(), "SGLang to resume")

    @property
    def asleep(self) -> frozenset[str]:
        """Tags of the memory that sleeps."""
        return self._asleep

    def hold_for_sleep(self) -> None:
        """Holds new requests back; raises ``Refused`` if some run, and then nothing is held."""
        if self.paused:
            return
        self._held = True
        if not self._run(self._hold_if_idle(), "requests to be held back"):
            self._held = False
            raise Refused(
                "requests are running, and SGLang would end itself if it fell asleep now",
                hint="wait for them, or POST /pause_generation with mode abort first",
            )

    def fell_asleep(self, tags: frozenset[str]) -> None:
        """Notes memory that sleeps."""
        self._asleep |= tags

    def woke(self, tags: frozenset[str]) -> None:
        """Notes memory that is back."""
        self._asleep -= tags

    def drop_caches(self) -> None:
        """Does nothing: the switch has dropped them, in every rank."""

    def set_version(self, version: int) -> None:
        """Sets the version that SGLang reports of itself and in its answers."""
        self._run(self._stamp(str(version)), "the new version to be noted")

    async def _drain(self, *, abort: bool) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        manager = self._manager
        async with manager.is_pause_cond:
            manager.is_pause = True
        while True:
            if abort:
                # Again in each round: a request that was being tokenized reaches the scheduler after the first.  The
                # manager's own abort_request would, in 0.5.17, also end requests that wait for the pause to end.
                manager._dispatch_to_scheduler(AbortReq(rid="", abort_all=True))
            if not await manager.model_update_lock.is_locked():
                return
            await asyncio.sleep(_LOOK_S)

    async def _hold_if_idle(self) -> bool:
        manager = self._manager
        async with manager.is_pause_cond:
            manager.is_pause = True
        idle = not await manager.model_update_lock.is_locked()
        if not idle:
            await self._release()
        return idle

    async def _release(self) -> None:
        async with self._manager.is_pause_cond:
            self._manager.is_pause = False
            self._manager.is_pause_cond.notify_all()

    async def _stamp(self, version: str) -> None:
        self._manager._update_weight_version_if_provided(version)

    def _run(self, work: Any, what: str) -> Any:
        return self._result(asyncio.run_coroutine_threadsafe(work, self._running_loop()), _SHORT_S, what)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise EngineFailure("SGLang's server does not run yet")
        return self._loop

    def _result(self, future: Future[Any], timeout_s: float, what: str) -> Any:
        return result_of(future, timeout_s, engine="SGLang", what=what)
