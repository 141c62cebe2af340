"""The executor in vLLM's API server, which reaches all ranks of the engine over Unix sockets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection

import msgspec

from weightcast.errors import EngineFailure
from weightcast.plugins.vllm.rank_protocol import Hello, needs_main, socket_path
from weightcast.receiver.executor import ConnectedRanks, limit_sends
from weightcast.wire.messages import Abort, Commit, Message, RankAck

_MEET_S = 30.0


class VllmExecutor(ConnectedRanks):
    """Sends messages to all ranks; see ``receiver.executor.Executor``."""

    def __init__(self, world_size: int, *, listen: Callable[[str], None], on_main: Callable[[float], None]) -> None:
        """Connects to every rank.

        Args:
            world_size: Number of ranks.
            listen: Function that makes every rank listen in a folder.
            on_main: Function that lets every rank's main thread do its task, within a limit in seconds.

        Raises:
            EngineFailure: A rank does not listen, for example because it is on another host.
        """
        super().__init__()
        self.tp_size = world_size
        self.hellos: list[Hello] = []
        self._on_main = on_main
        self._committed = ""
        folder = tempfile.mkdtemp(prefix="weightcast-")
        try:
            listen(folder)
            for rank in range(world_size):
                self._control.append(_connect(folder, rank))
            greetings = self._replies(self._control, _MEET_S, "its greeting")
            self.hellos = [msgspec.json.decode(greeting, type=Hello) for greeting in greetings]
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # open connections do not need it

    def apply(self, message: Message, *, timeout_s: float) -> list[RankAck]:
        """Implements ``Executor.apply``."""
        return self._tell(message, timeout_s, lambda: self._call_main(message, timeout_s))

    def run(self, command: bytes) -> bytes:
        """Refuses: vLLM generates by itself."""
        raise EngineFailure("vLLM does not generate through this executor")

    def pids(self) -> Sequence[int]:
        """Returns the process id of each rank."""
        return tuple(hello.pid for hello in self.hellos)

    def close(self) -> None:
        """Closes the connections; vLLM ends its ranks itself."""
        self._closed = True
        with self._send_lock:
            for connection in self._control:
                connection.close()

    def _call_main(self, message: Message, timeout_s: float) -> None:
        """Wakes the ranks' main threads for a message that needs them; the ranks apply the same rule."""
        main = needs_main(message, self._committed)
        if isinstance(message, Commit):
            self._committed = message.session
        elif isinstance(message, Abort) and message.session == self._committed:
            self._committed = ""
        if main:
            self._on_main(timeout_s)

    def _lost(self, rank: int, what: str) -> EngineFailure:
        process = f" (pid {self.hellos[rank].pid})" if self.hellos else ""
        return self._break(f"rank {rank}{process} is gone during {what}", [rank])


def _connect(folder: str, rank: int) -> Connection:
    try:
        connection = Client(socket_path(folder, rank), family="AF_UNIX")
    except OSError as error:
        raise EngineFailure(f"rank {rank} does not listen on this host: {error}", ranks=[rank]) from error
    limit_sends(connection)
    return connection
