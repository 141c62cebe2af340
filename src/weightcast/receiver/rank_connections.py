"""Connections from an engine's process to its ranks: both ends, and the frames between them."""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection as LocalConnection
from multiprocessing.connection import wait
from typing import Any

from weightcast.comm.authenticated import AuthenticatedConnection
from weightcast.errors import EngineFailure, WeightcastError
from weightcast.receiver import lost_ranks
from weightcast.receiver.lost_ranks import FarRanks, Messenger, answer_message
from weightcast.wire.answers import RankAck
from weightcast.wire.blobs import SentBlobs
from weightcast.wire.codec import encode
from weightcast.wire.messages import Message

Connection = LocalConnection | AuthenticatedConnection  # to a rank on this host, or on another one

_SEND_S = 15  # whole seconds; a rank reads its messages at once, unless it is stopped or stuck

_APPLY, _INTERRUPT, CLOSE, _NOTE = b"A", b"I", b"C", b"N"


class ConnectedRanks(FarRanks):
    """Ranks with a connection each.  ``serve_messages`` runs at its other end."""

    def __init__(self) -> None:
        super().__init__()
        self._control: list[Connection] = []
        self._apply_lock, self._send_lock = threading.Lock(), threading.Lock()

    def interrupt(self, reason: str) -> None:
        """As ``Executor.interrupt``."""
        self._shout(_INTERRUPT + reason.encode(errors="replace"))

    def _tell(self, message: Message, timeout_s: float, meanwhile: Callable[[], None] | None = None) -> list[RankAck]:
        """Sends a message to every rank, calls ``meanwhile`` once each has it, and waits for the answers.

        ``timeout_s`` is the ranks' own deadline.
        """
        with self._apply_lock:
            self._check()
            with self._send_lock:
                self._send(self._control, _APPLY + self._encode(message))
            if meanwhile is not None:
                try:
                    meanwhile()
                except Exception as error:  # any error: the answers to this message will not be read
                    words = str(error) if isinstance(error, WeightcastError) else f"{type(error).__name__}: {error}"
                    raise self._break(words, list(range(len(self._control)))) from error

            def send_whole(rank: int) -> None:
                with self._send_lock:
                    self._send_to(rank, self._control[rank], _APPLY + encode(message))

            what = f"the answer to {type(message).__name__}"
            replies = self._replies(self._control, timeout_s + lost_ranks.GRACE_S, what, send_whole=send_whole)
        return [self._decode(reply) for reply in replies]

    def _note(self, note: bytes) -> None:
        """Sends a note to every rank; it overtakes the message that the rank is carrying out."""
        self._shout(_NOTE + note)

    def _shout(self, frame: bytes) -> None:
        """Sends a frame to every rank, also after one that is gone."""
        with self._send_lock:
            for connection in self._control:
                with suppress(OSError, ValueError):
                    connection.send_bytes(frame)

    def _send(self, connections: Sequence[Connection], payload: bytes) -> None:
        for rank, connection in enumerate(connections):
            self._send_to(rank, connection, payload)

    def _send_to(self, rank: int, connection: Connection, payload: bytes) -> None:
        try:
            connection.send_bytes(payload)
        except BlockingIOError as error:
            raise self._break(f"rank {rank} did not take a message within {_SEND_S} s", [rank]) from error
        except (OSError, ValueError) as error:
            raise self._lost(rank, f"a message to it: {error}") from error

    def _replies(self, connections: Sequence[Connection], timeout_s: float, what: str, **settings: Any) -> list[bytes]:
        """As ``_gather``, with its settings."""

        def receive(ranks: set[int], limit_s: float) -> dict[int, bytes]:
            waiting = {connections[rank]: rank for rank in ranks}
            replies: dict[int, bytes] = {}
            for connection in wait(list(waiting), limit_s):  # type: ignore[arg-type]  # it takes all with a descriptor
                rank = waiting[connection]  # type: ignore[index]
                try:
                    replies[rank] = connection.recv_bytes()  # type: ignore[union-attr]
                except (EOFError, OSError) as error:
                    raise self._lost(rank, f"{what}: {error}" if str(error) else what) from error
            return replies

        return self._gather(len(connections), receive, timeout_s, what, **settings)

    def _lost(self, rank: int, what: str) -> EngineFailure:
        return self._break(f"rank {rank} is gone during {what}", [rank])


def limit_sends(connection: Connection) -> None:
    """Gives writes to a rank a deadline: a rank that is stopped reads nothing, and its pipe fills."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))


def serve_messages(
    control: Connection, worker: Messenger, *, rank: int, on_note: Callable[[bytes], None] | None = None
) -> bool:
    """Answers weight messages that come over a connection, in order, while interrupts and notes overtake them.

    ``on_note`` is called on the thread that reads.  Returns True if the other end asked for the end, False if it is
    gone.
    """
    messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def answer() -> None:
        sent = SentBlobs()
        while (frame := messages.get()) is not None:
            reply = answer_message(worker, frame, rank=rank, sent=sent)
            with suppress(OSError, ValueError):
                control.send_bytes(reply)

    threading.Thread(target=answer, name="messages", daemon=True).start()
    try:
        while True:
            try:
                frame = control.recv_bytes()
            except (EOFError, OSError):
                return False
            if frame[:1] == _INTERRUPT:
                with suppress(RuntimeError, OSError):
                    worker.interrupt(frame[1:].decode())
            elif frame[:1] == _NOTE and on_note is not None:
                on_note(frame[1:])
            elif frame[:1] == CLOSE:
                return True
            else:
                messages.put(frame[1:])
    finally:
        messages.put(None)
