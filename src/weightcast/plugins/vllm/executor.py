"""In vLLM's API server: all ranks of the engine, behind the sockets that they listen on."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection

import msgspec

from weightcast.errors import EngineFailure
from weightcast.plugins.vllm.words import Hello, meeting_place, needs_main
from weightcast.receiver.executor import ConnectedRanks, limit_sends
from weightcast.wire.messages import Abort, Commit, Message, RankAck

_MEET_S = 30.0


class VllmExecutor(ConnectedRanks):
    """Fans messages out; see ``receiver.executor.Executor``."""

    def __init__(self, world_size: int, *, listen: Callable[[str], None], on_main: Callable[[float], None]) -> None:
        """Meet every rank.

        Args:
            world_size: How many there are.
            listen: Makes every rank listen in a folder.
            on_main: Lets every rank's main thread do what waits for it, within so many seconds.

        Raises:
            EngineFailure: A rank does not listen; on another host, say.
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
                self._control.append(_meet(folder, rank))
            greetings = self._replies(self._control, _MEET_S, "its greeting")
            self.hellos = [msgspec.json.decode(greeting, type=Hello) for greeting in greetings]
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # who has met needs no meeting place
        placed = {name for hello in self.hellos for name in hello.places}
        self._nowhere = tuple(spec.name for spec in self.hellos[0].specs if spec.name not in placed)

    def apply(self, message: Message, *, timeout_s: float) -> list[RankAck]:
        """As ``Executor.apply``."""
        acks = self._tell(message, timeout_s, lambda: self._call_main(message, timeout_s))
        if not self._nowhere:
            return acks
        # A checkpoint may hold what this engine has no use for.
        return [msgspec.structs.replace(ack, unproven=(*ack.unproven, *self._nowhere)) for ack in acks]

    def run(self, command: bytes) -> bytes:
        """vLLM does its own work by itself."""
        raise EngineFailure("vLLM's work is not done through this executor")

    def pids(self) -> Sequence[int]:
        """Process id of each rank."""
        return tuple(hello.pid for hello in self.hellos)

    def close(self) -> None:
        """Hang up; vLLM ends its ranks itself."""
        self._closed = True
        with self._send_lock:
            for connection in self._control:
                connection.close()

    def _call_main(self, message: Message, timeout_s: float) -> None:
        """The ranks go by the same rule, and wait for their main threads with a message that needs them."""
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


def _meet(folder: str, rank: int) -> Connection:
    try:
        connection = Client(meeting_place(folder, rank), family="AF_UNIX")
    except OSError as error:
        raise EngineFailure(f"rank {rank} does not listen on this host: {error}", ranks=[rank]) from error
    limit_sends(connection)
    return connection
