"""The receiver's engine hooks and executor in LMDeploy's API server, and their calls of the engine process.

The engine process holds requests back (``requests_at_switch``).  The pause modes ``in_place`` and ``retract`` are part
of the switch itself: all ranks agree, the engine comes to rest if it must, and the mark is sent.
"""

from __future__ import annotations

import logging
from typing import Any

from weightcast.config import PauseMode
from weightcast.errors import EngineFailure, Refused, WeightcastError
from weightcast.plugins.api_server import EngineLoop
from weightcast.plugins.lmdeploy.folder import failure_words
from weightcast.plugins.rank_sockets import SwitchExecutor
from weightcast.wire.answers import RankAck
from weightcast.wire.messages import Message, Open

log = logging.getLogger("weightcast.plugins.lmdeploy")

# With prefix caching.
NO_IN_PLACE = (
    "requests that go on with pause in_place would leave prefixes of the old weights to others (use pause retract, or "
    "start LMDeploy without --enable-prefix-caching)"
)
_SHORT_S = 30.0
_GRACE_S = 10.0
_MARK_S = 60.0


class LmdeployHooks:
    """``EngineHooks`` over LMDeploy's engine process."""

    def __init__(self, async_engine: Any, calls: EngineCalls) -> None:
        self._async_engine = async_engine
        self._calls = calls
        self._held = False
        self._stopped = False

    @property
    def paused(self) -> bool:
        """True while requests are held back, by an update or the quarantine, and while LMDeploy sleeps."""
        return self._held or bool(self._async_engine.is_sleeping)

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Returns when no request runs, for ``abort`` and ``wait``; at once for the modes that keep requests.

        An engine that sleeps runs none, and holds new ones back already.
        """
        if mode in ("in_place", "retract") or self.asleep:
            return
        self._held, self._stopped = True, False
        try:
            self._calls.call("pause", mode, timeout_s, timeout_s=timeout_s)
        except Refused:
            if self._stopped:
                raise Refused("pause cancelled: the update that asked for it was aborted") from None
            raise

    def stop_waiting(self) -> None:
        """Cancels a pause that waits for running requests; ``resume`` must follow."""
        if self._held and not self._stopped:
            self._stopped = True
            try:
                self._calls.call("stop_waiting", timeout_s=_SHORT_S)
            except WeightcastError as error:
                log.warning("could not cancel the pause: %s", error)

    def resume(self) -> None:
        """Lets requests go on, unless some memory sleeps."""
        if self._held and not self.asleep:
            self._calls.call("resume", timeout_s=_SHORT_S)
            self._held = False

    @property
    def asleep(self) -> frozenset[str]:
        """Tags of the memory that sleeps, as LMDeploy tells them."""
        return frozenset(self._async_engine.sleeping_tags) if self._async_engine.is_sleeping else frozenset()

    def hold_for_sleep(self) -> None:
        """Drops the requests that run, as LMDeploy's sleep does, and holds new ones back.

        LMDeploy itself would move weights while a forward that it sent ahead may still run.

        Raises:
            Refused: The forward that runs did not end; nothing is held.
        """
        try:
            self.pause("abort", _SHORT_S)
        except WeightcastError:
            self.resume()
            raise

    def drop_caches(self) -> None:
        """Does nothing: the pause, or the switch, has dropped them."""

    def set_version(self, version: int) -> None:
        """Does nothing: LMDeploy reports no version of its weights."""


class EngineCalls(EngineLoop):
    """Our methods in the engine process, as threads of the API server call them over LMDeploy's own connection."""

    engine = "LMDeploy"

    def __init__(self, engine: Any) -> None:
        """``engine`` is LMDeploy's ``ZMQMPEngine``."""
        super().__init__()
        self._engine = engine

    def call(self, method: str, *arguments: Any, timeout_s: float) -> None:
        """Calls a method of ``LmdeployRequests`` in the engine process.

        Raises:
            Refused: The engine process could not do it; nothing changed.
            DeadlineExceeded: It did not answer.
            EngineFailure: It is gone.
        """
        words = self.result(self._engine._collective_rpc_async("weightcast_call", method, *arguments), timeout_s)
        if words:
            raise Refused(f"LMDeploy: {words}")

    def result(self, work: Any, timeout_s: float) -> Any:
        """As ``wait``, with room for the deadlines that the engine process keeps itself."""
        return self.wait(work, timeout_s, "its engine process", grace_s=_GRACE_S)


class LmdeployExecutor(SwitchExecutor):
    """Sends messages to all ranks, and the mark through LMDeploy's engine process."""

    def __init__(self, world_size: int, folder: str, calls: EngineCalls, *, prefix_caching: bool = False) -> None:
        """Connects to every rank.

        Args:
            prefix_caching: True if LMDeploy keeps prefixes for other requests (``--enable-prefix-caching``).

        Raises:
            EngineFailure: A rank does not listen, for example because it is on another host.
        """
        self._calls = calls
        self._folder = folder
        self._prefix_caching = prefix_caching
        self._mode = "in_place"
        super().__init__(world_size, folder)

    def apply(self, message: Message, *, timeout_s: float) -> list[RankAck]:
        """Implements ``Executor.apply``."""
        if isinstance(message, Open):
            if message.pause == "in_place" and self._prefix_caching:
                return [RankAck(rank=rank, ok=False, refused=True, error=NO_IN_PLACE) for rank in range(self.tp_size)]
            self._mode = message.pause
        return super().apply(message, timeout_s=timeout_s)

    def why_not_now(self, timeout_s: float) -> str:
        """Implements ``SwitchExecutor.why_not_now``: brings the engine to rest for ``retract``."""
        if self._mode != "retract":
            return ""
        try:
            self._calls.call("retract", timeout_s, timeout_s=timeout_s)
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

    def after_decision(self) -> None:
        """Implements ``SwitchExecutor.after_decision``."""
        try:
            self._calls.call("mark", timeout_s=_MARK_S)
        except WeightcastError as error:
            log.error("the mark was not sent, and the ranks will give up: %s", error)
