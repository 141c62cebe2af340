"""The receiver's engine hooks and executor in LMDeploy's API server, and their calls of the engine process.

The engine process holds requests back (``requests_at_switch``).  The pause modes ``in_place`` and ``retract`` are part
of the switch itself: all ranks agree, the engine comes to rest if it must, and the mark is sent.
"""

from __future__ import annotations

import logging
from typing import Any

from weightcast.config import PauseMode
from weightcast.errors import EngineFailure, Refused, WeightcastError
from weightcast.plugins.lmdeploy.folder import failure_words
from weightcast.plugins.pause_state import SHORT_S, PauseState, ServerHooks
from weightcast.plugins.rank_sockets import SwitchExecutor
from weightcast.wire.messages import Message

log = logging.getLogger("weightcast.plugins.lmdeploy")

_GRACE_S = 10.0
_MARK_S = 60.0
_CALL = "weightcast_call"


class LmdeployHooks(ServerHooks):
    """``EngineHooks`` over LMDeploy's engine process, whose methods are called over LMDeploy's own connection."""

    engine = "LMDeploy"

    def __init__(self, async_engine: Any) -> None:
        """``async_engine`` is LMDeploy's ``AsyncEngine``."""
        super().__init__()
        self._async_engine = async_engine

    @property
    def asleep(self) -> frozenset[str]:
        """Tags of the memory that sleeps, as LMDeploy tells them."""
        return frozenset(self._async_engine.sleeping_tags) if self._async_engine.is_sleeping else frozenset()

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Returns when no request runs, for ``abort`` and ``wait``; at once for the modes that keep requests.

        An engine that sleeps runs none, and holds new ones back already.
        """
        if mode in ("in_place", "retract") or self.state is PauseState.ASLEEP:
            return
        self.become(PauseState.OURS)
        self.call("pause", mode, timeout_s, timeout_s=timeout_s, stoppable=mode == "wait")

    def hold_for_sleep(self) -> None:
        """Drops the requests that run, as LMDeploy's sleep does, and holds new ones back.

        LMDeploy itself would move weights while a forward that it sent ahead may still run.

        Raises:
            Refused: The forward that runs did not end; nothing is held.
        """
        try:
            self.pause("abort", SHORT_S)
        except WeightcastError:
            self.resume()
            raise

    def call(self, method: str, *arguments: Any, timeout_s: float, stoppable: bool = False) -> None:
        """Calls a method of ``LmdeployRequests`` in the engine process.

        Raises:
            Refused: The engine process could not do it; nothing changed.
            DeadlineExceeded: It did not answer.
            EngineFailure: It is gone.
        """
        words = self.result(self._rpc(method, *arguments), timeout_s, stoppable=stoppable)
        if words:
            raise Refused(f"LMDeploy: {words}")

    def result(self, work: Any, timeout_s: float, *, stoppable: bool = False) -> Any:
        """As ``wait``, with room for the deadlines that the engine process keeps itself."""
        return self.wait(work, timeout_s, "its engine process", grace_s=_GRACE_S, stoppable=stoppable)

    def _rpc(self, *arguments: Any) -> Any:
        return self._async_engine.engine._collective_rpc_async(_CALL, *arguments)

    def _go_on(self) -> Any:
        return self._rpc("resume")


class LmdeployExecutor(SwitchExecutor):
    """Sends messages to all ranks, and the mark through LMDeploy's engine process."""

    def __init__(self, world_size: int, folder: str, hooks: LmdeployHooks) -> None:
        """Connects to every rank; ``EngineFailure`` if one does not listen, for example on another host."""
        self._hooks = hooks
        self._folder = folder
        super().__init__(world_size, folder)

    def why_not_now(self, timeout_s: float) -> str:
        """Implements ``SwitchExecutor.why_not_now``: brings the engine to rest for ``retract``."""
        if self.opened is None or self.opened.pause != "retract":
            return ""
        try:
            self._hooks.call("retract", timeout_s, timeout_s=timeout_s)
        except WeightcastError as error:
            return str(error)
        return ""

    def _lost(self, rank: int, what: str) -> EngineFailure:
        """Names the rank that the others ended because of, if the engine process has told which one that is."""
        words = failure_words(self._folder)
        return self._break(f"{words}, during {what}", [rank]) if words else super()._lost(rank, what)

    def engine_lost(self, words: str) -> EngineFailure:
        """Fails all later messages, since the engine process is gone."""
        return self._break(words, list(range(self.tp_size)))

    def after_decision(self, message: Message, timeout_s: float) -> None:
        """Implements ``SwitchExecutor.after_decision``."""
        try:
            self._hooks.call("mark", timeout_s=_MARK_S)
        except WeightcastError as error:
            log.error("the mark was not sent, and the ranks will give up: %s", error)
