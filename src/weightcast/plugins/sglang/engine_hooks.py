"""The receiver's engine hooks in SGLang's API server: hold requests back, wait for those that run, set the version.

Threads of the server call these methods; SGLang's tokenizer manager lives on the server's event loop.  The pause modes
``in_place`` and ``retract`` are part of the switch itself, in the ranks (``requests_at_switch``).
"""

# SGLang is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
from typing import Any

from weightcast.config import PauseMode
from weightcast.errors import Refused
from weightcast.plugins.hook_points import SGLANG
from weightcast.plugins.pause_state import SHORT_S, PauseState, ServerHooks

_LOOK_S = 0.02


class SglangHooks(ServerHooks):
    """``EngineHooks`` over SGLang's tokenizer manager."""

    engine = "SGLang"

    def __init__(self, manager: Any) -> None:
        """``manager`` is SGLang's ``TokenizerManager``; ``ConfigError`` if it is not as we know it."""
        SGLANG.check_attributes(manager, "tokenizer manager")
        super().__init__()
        self._manager = manager

    @property
    def paused(self) -> bool:
        """True while SGLang is paused, by its operator, an update or the quarantine."""
        return bool(self._manager.is_pause)

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Returns when no request runs, for ``abort`` and ``wait``; at once for the modes that keep requests.

        A server that its operator has paused is left as it is: nothing of it generates.  Nor does one that sleeps.
        """
        if mode in ("in_place", "retract") or self.state is PauseState.ASLEEP or self._is_operators():
            return
        self.become(PauseState.OURS)
        draining = self._drain(abort=mode == "abort")
        self.wait(draining, timeout_s, "running requests to stop", stoppable=mode == "wait")

    def hold_for_sleep(self) -> None:
        """Holds new requests back; raises ``Refused`` if some run, and then nothing is held."""
        if self._is_operators() or self.paused:
            return
        self.become(PauseState.OURS)
        if not self.wait(self._hold_if_idle(), SHORT_S, "requests to be held back"):
            self.become(PauseState.RUNNING)
            raise Refused(
                "requests are running, and SGLang would end itself if it fell asleep now",
                hint="wait for them, or POST /pause_generation with mode abort first",
            )

    def set_version(self, version: int) -> None:
        """Sets the version that SGLang reports of itself and in its answers."""
        self.wait(self._stamp(str(version)), SHORT_S, "the new version to be noted")

    def _is_operators(self) -> bool:
        """Notes and tells whether SGLang is paused, and not by us."""
        operators = self.paused and self._awake_state is not PauseState.OURS
        if operators:
            self.become(PauseState.OPERATORS)
        return operators

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
            await self._go_on()
        return idle

    async def _go_on(self) -> None:
        async with self._manager.is_pause_cond:
            self._manager.is_pause = False
            self._manager.is_pause_cond.notify_all()

    async def _stamp(self, version: str) -> None:
        self._manager._update_weight_version_if_provided(version)
