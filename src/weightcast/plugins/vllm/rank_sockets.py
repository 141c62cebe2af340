"""The executor in vLLM's API server, which reaches all ranks of the engine over Unix sockets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable

from weightcast.plugins.rank_sockets import SocketRanks, committed_after, switches_weights
from weightcast.wire.messages import Message, RankAck


class VllmExecutor(SocketRanks):
    """Sends messages to all ranks; those that switch weights wait for the ranks' main threads."""

    def __init__(self, world_size: int, *, listen: Callable[[str], None], on_main: Callable[[float], None]) -> None:
        """Connects to every rank.

        Args:
            world_size: Number of ranks.
            listen: Function that makes every rank listen in a folder.
            on_main: Function that lets every rank's main thread do its task, within a limit in seconds.

        Raises:
            EngineFailure: A rank does not listen, for example because it is on another host.
        """
        self._on_main = on_main
        self._committed = ""
        folder = tempfile.mkdtemp(prefix="weightcast-")
        try:
            listen(folder)
            super().__init__(world_size, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # open connections do not need it

    def apply(self, message: Message, *, timeout_s: float) -> list[RankAck]:
        """Implements ``Executor.apply``."""
        return self._tell(message, timeout_s, lambda: self._call_main(message, timeout_s))

    def _call_main(self, message: Message, timeout_s: float) -> None:
        """Wakes the ranks' main threads for a message that needs them; the ranks apply the same rule."""
        main = switches_weights(message, self._committed)
        self._committed = committed_after(message, self._committed)
        if main:
            self._on_main(timeout_s)
