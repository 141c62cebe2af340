"""In vLLM's API server: all ranks of the engine, behind the sockets that they listen on."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, wait

import msgspec

from weightcast.errors import EngineFailure
from weightcast.plugins.vllm.words import Hello, meeting_place, needs_main
from weightcast.wire.messages import Abort, Commit, Message, RankAck, decode_rank_ack, encode

_MEET_S = 30.0
_GRACE_S = 15.0
_APPLY, _INTERRUPT = b"A", b"I"


class VllmExecutor:
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
        self.tp_size = world_size
        self._on_main = on_main
        self._folder = tempfile.mkdtemp(prefix="weightcast-")
        self._lock, self._send_lock = threading.Lock(), threading.Lock()
        self._committed = ""
        self._broken: EngineFailure | None = None
        self._nowhere: tuple[str, ...] = ()
        try:
            listen(self._folder)
            self._connections = [self._meet(rank) for rank in range(world_size)]
            self.hellos = [self._hello(rank) for rank in range(world_size)]
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)  # who has met needs no meeting place
        placed = {name for hello in self.hellos for name in hello.places}
        self._nowhere = tuple(spec.name for spec in self.hellos[0].specs if spec.name not in placed)

    def apply(self, message: Message, *, timeout_s: float) -> list[RankAck]:
        """As ``Executor.apply``."""
        with self._lock:
            if self._broken is not None:
                raise EngineFailure(str(self._broken), ranks=self._broken.ranks, hint=self._broken.hint)
            main = needs_main(message, self._committed)
            if isinstance(message, Commit):
                self._committed = message.session
            elif isinstance(message, Abort) and message.session == self._committed:
                self._committed = ""
            self._send(_APPLY + encode(message))
            if main:
                try:
                    self._on_main(timeout_s)
                except EngineFailure as error:
                    raise self._break(str(error), list(range(self.tp_size))) from error
            replies = self._replies(timeout_s + _GRACE_S, f"the answer to {type(message).__name__}")
        acks = [decode_rank_ack(reply) for reply in replies]
        if not self._nowhere:
            return acks
        # A checkpoint may hold what this engine has no use for.
        return [msgspec.structs.replace(ack, unproven=(*ack.unproven, *self._nowhere)) for ack in acks]

    def run(self, command: bytes) -> bytes:
        """vLLM does its own work by itself."""
        raise EngineFailure("vLLM's work is not done through this executor")

    def interrupt(self, reason: str) -> None:
        """As ``Executor.interrupt``."""
        with self._send_lock:
            for connection in self._connections:
                with suppress(OSError, ValueError):
                    connection.send_bytes(_INTERRUPT + reason.encode(errors="replace"))

    def pids(self) -> Sequence[int]:
        """Process id of each rank."""
        return tuple(hello.pid for hello in self.hellos)

    def close(self) -> None:
        """Hang up; vLLM ends its ranks itself."""
        for connection in self._connections:
            connection.close()

    def _meet(self, rank: int) -> Connection:
        try:
            return Client(meeting_place(self._folder, rank), family="AF_UNIX")
        except OSError as error:
            raise EngineFailure(f"rank {rank} does not listen on this host: {error}", ranks=[rank]) from error

    def _hello(self, rank: int) -> Hello:
        connection = self._connections[rank]
        if not connection.poll(_MEET_S):
            raise EngineFailure(f"rank {rank} said nothing within {_MEET_S:g} s", ranks=[rank])
        return msgspec.json.decode(connection.recv_bytes(), type=Hello)

    def _send(self, frame: bytes) -> None:
        with self._send_lock:
            for rank, connection in enumerate(self._connections):
                try:
                    connection.send_bytes(frame)
                except (OSError, ValueError) as error:
                    raise self._break(f"rank {rank} (pid {self.hellos[rank].pid}) is gone: {error}", [rank]) from error

    def _replies(self, timeout_s: float, what: str) -> list[bytes]:
        deadline = time.monotonic() + timeout_s
        replies: dict[int, bytes] = {}
        while len(replies) < self.tp_size:
            waiting = {connection: rank for rank, connection in enumerate(self._connections) if rank not in replies}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(waiting.values())
                raise self._break(f"rank {late[0]} did not give {what} within {timeout_s:g} s", late)
            for connection, rank in waiting.items():
                if connection in ready:
                    try:
                        replies[rank] = connection.recv_bytes()
                    except (EOFError, OSError) as error:
                        words = f"rank {rank} (pid {self.hellos[rank].pid}) is gone during {what}"
                        raise self._break(words, [rank]) from error
        return [replies[rank] for rank in range(self.tp_size)]

    def _break(self, words: str, ranks: list[int]) -> EngineFailure:
        """From now on nothing is asked of the ranks: an answer that is still to come would be taken for another's."""
        self._broken = self._broken or EngineFailure(words, ranks=ranks, hint="restart the engine")
        return EngineFailure(words, ranks=ranks, hint="restart the engine")
