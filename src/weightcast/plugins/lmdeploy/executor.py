"""The executor in LMDeploy's API server: all ranks agree, the engine comes to rest if it must, and the mark is sent."""

from __future__ import annotations

import logging

from weightcast.errors import EngineFailure, WeightcastError
from weightcast.plugins.lmdeploy.engine_calls import EngineCalls
from weightcast.plugins.lmdeploy.folder import failure_words
from weightcast.plugins.switch_executor import SwitchExecutor
from weightcast.wire.answers import RankAck
from weightcast.wire.messages import Message, Open

log = logging.getLogger("weightcast.plugins.lmdeploy")

_MARK_S = 60.0


class LmdeployExecutor(SwitchExecutor):
    """Sends messages to all ranks, and the mark through LMDeploy's engine process."""

    def __init__(self, world_size: int, folder: str, calls: EngineCalls, *, prefix_caching: bool = False) -> None:
        """Connects to every rank.

        Args:
            world_size: Number of ranks.
            folder: Folder of their sockets.
            calls: Reaches the engine process.
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
                words = "requests that go on with pause in_place would leave prefixes of the old weights to others"
                why = f"{words} (use pause retract, or start LMDeploy without --enable-prefix-caching)"
                return [RankAck(rank=rank, ok=False, refused=True, error=why) for rank in range(self.tp_size)]
            self._mode = message.pause
        return super().apply(message, timeout_s=timeout_s)

    def why_not_now(self, timeout_s: float) -> str:
        """Implements ``SwitchExecutor.why_not_now``: brings the engine to rest for ``retract``."""
        if self._mode != "retract":
            return ""
        try:
            self._calls.call("weightcast_retract", timeout_s, timeout_s=timeout_s)
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
            self._calls.call("weightcast_mark", timeout_s=_MARK_S)
        except WeightcastError as error:
            log.error("the mark was not sent, and the ranks will give up: %s", error)
