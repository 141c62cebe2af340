"""Replies of a rank in another process: written at its end, read at the engine's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from weightcast.wire.answers import RankAck
from weightcast.wire.codec import decode, encode
from weightcast.wire.messages import Close, Commit, Message, Prepare, Readback, Revert

_OK, _FAILED = b"+", b"-"


class Messenger(Protocol):
    """The object in a rank's process that carries out weight messages."""

    def apply(self, message: Message) -> RankAck:
        """Carries out a message.  Called by one thread at a time."""
        ...

    def interrupt(self, reason: str) -> None:
        """Ends a wait inside ``apply`` now.  Called from another thread."""
        ...


def answer_work(do: Callable[[], bytes]) -> bytes:
    """A reply for the work lane: what ``do`` returns, or the error that it raises."""
    try:
        return _OK + do()
    except Exception as error:  # noqa: BLE001  the other end must hear it; the rank stays for the next command
        return _FAILED + f"{type(error).__name__}: {error}".encode()


def answer_message(worker: Messenger, frame: bytes, *, rank: int) -> bytes:
    """A reply for the message lane: the rank's ack, or the error that the worker raised."""
    known: tuple[str, ...] = ()
    try:
        message = decode(frame)
        names_tables = isinstance(message, Close | Commit | Revert | Readback | Prepare)
        known = message.known_tables if names_tables else ()
        ack = worker.apply(message)
    except Exception as error:  # noqa: BLE001  the other end waits for an answer, whatever it is
        ack = RankAck(rank=rank, ok=False, error=f"{type(error).__name__}: {error}")
    return encode(ack, known_tables=known)


def failures_in(replies: dict[int, bytes]) -> dict[int, str]:
    """Returns the words of each rank whose work failed, by rank."""
    return {rank: reply[1:].decode() for rank, reply in sorted(replies.items()) if reply[:1] == _FAILED}
