"""The executor in vLLM's API server, which reaches all ranks of the engine over Unix sockets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable

from weightcast.plugins.switch_executor import SwitchExecutor
from weightcast.wire.answers import RankAck
from weightcast.wire.messages import Message


class VllmExecutor(SwitchExecutor):
    """Sends messages to all ranks; when all are ready to switch weights, calls their main threads."""

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
        self._timeout_s = 0.0
        folder = tempfile.mkdtemp(prefix="weightcast-")
        try:
            listen(folder)
            super().__init__(world_size, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # open connections do not need it

    def apply(self, message: Message, *, timeout_s: float) -> list[RankAck]:
        """Implements ``Executor.apply``."""
        self._timeout_s = timeout_s
        return super().apply(message, timeout_s=timeout_s)

    def after_decision(self) -> None:
        """Implements ``SwitchExecutor.after_decision``: the engine core takes the call between two steps."""
        self._on_main(self._timeout_s)
