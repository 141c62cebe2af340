"""Messages to ranks in other processes and their replies, and the name of the rank that is dead or silent."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol

from weightcast.errors import EngineFailure
from weightcast.wire.answers import RankAck
from weightcast.wire.blobs import Blobs, SentBlobs, UnknownBlob
from weightcast.wire.codec import decode, decode_rank_ack, encode, names_of
from weightcast.wire.messages import Message

GRACE_S = 15.0  # a rank keeps its own deadlines; this much later the rank itself is given up
_LOOK_S = 1.0  # longest single wait for answers, short enough to notice that this process itself was stopped
_STOOD_STILL_S = 0.5  # a wait that ends this much too late: longer than a busy machine explains

Receive = Callable[[set[int], float], dict[int, bytes]]
_OK, _FAILED = b"+", b"-"
_LACKS_TABLE = b"?"  # the reply of a rank that lacks a table which a message names


class FarRanks:
    """The part that executors with ranks in other processes share.  An executor that broke stays broken."""

    def __init__(self) -> None:
        self._broken: EngineFailure | None = None
        self._closed = False
        self._sent = SentBlobs()  # tables that every rank has
        self._tables = Blobs(sys.maxsize)  # of the ranks' parts: a rank sends each once, and relies on it

    def _encode(self, message: Message) -> bytes:
        """The frame for all ranks, with those tables that they were not sent before."""
        frame = encode(message, self._sent)
        self._sent.add(names_of(message))
        return frame

    def _decode(self, reply: bytes) -> RankAck:
        """Decodes a rank's answer."""
        return decode_rank_ack(reply, self._tables)

    def _check(self) -> None:
        if self._closed:
            raise EngineFailure("the engine is shutting down")
        if self._broken is not None:
            raise EngineFailure(str(self._broken), ranks=self._broken.ranks, hint=self._broken.hint)

    def _break(self, words: str, ranks: list[int]) -> EngineFailure:
        """Marks the executor as broken: a late answer would be taken for the answer to another message."""
        if self._broken is None:
            self._broken = EngineFailure(words, ranks=ranks, hint="restart the engine")
        return EngineFailure(words, ranks=ranks, hint="restart the engine")

    def _gather(
        self,
        count: int,
        receive: Receive,
        timeout_s: float,
        what: str,
        *,
        work: bool = False,
        send_whole: Callable[[int], None] | None = None,
    ) -> list[bytes]:
        """Waits for one reply from each rank and returns them in order.

        On the work lane a failure is a reply too, unless the other ranks hang because of it.

        Args:
            receive: Waits for any of the given ranks, up to a limit in seconds, and raises for a lost rank.
            timeout_s: Limit of the whole wait, in seconds.
            what: What is waited for, for errors.
            work: True on the work lane.
            send_whole: Sends the message again to a rank that lacks one of its tables.
        """
        deadline = time.monotonic() + timeout_s
        replies: dict[int, bytes] = {}
        while len(replies) < count:
            waiting = {rank for rank in range(count) if rank not in replies}
            began = time.monotonic()
            limit_s = min(max(0.0, deadline - began), _LOOK_S)
            came = receive(waiting, limit_s)
            if send_whole is not None:
                for rank in [rank for rank, reply in came.items() if reply == _LACKS_TABLE]:
                    del came[rank]
                    send_whole(rank)  # at once: the other ranks may wait for this one
            replies |= came
            now = time.monotonic()
            if not came and now - began > limit_s + _STOOD_STILL_S:
                # This process was stopped and continued.  Its ranks may have been stopped too and need a moment.
                deadline = max(deadline, now + GRACE_S)
            elif not came and now >= deadline:
                for rank, words in failures_in(replies).items() if work else ():
                    raise self._break(f"rank {rank} failed in {what}: {words}", [rank])
                late = sorted(waiting)
                raise self._break(f"rank {late[0]} did not give {what} within {timeout_s:g} s", late)
            if work and failures_in(came):
                # The other ranks may wait for this one in a collective that it will never enter.
                deadline = min(deadline, time.monotonic() + GRACE_S)
        return [replies[rank] for rank in range(count)]

    @staticmethod
    def _first(replies: list[bytes], what: str) -> bytes:
        """Rank 0's answer on the work lane; raises if any rank failed."""
        failed = failures_in(dict(enumerate(replies)))
        for rank, words in failed.items():
            raise EngineFailure(f"rank {rank} failed in {what}: {words}", ranks=list(failed))
        return replies[0][1:]


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


def answer_message(worker: Messenger, frame: bytes, *, rank: int, sent: SentBlobs) -> bytes:
    """A reply for the message lane: the rank's ack, or the error that the worker raised.

    ``sent`` has the tables that the other end has, and takes those of this reply.
    """
    try:
        ack = worker.apply(decode(frame))
    except UnknownBlob:
        return _LACKS_TABLE
    except Exception as error:  # noqa: BLE001  the other end waits for an answer, whatever it is
        ack = RankAck(rank=rank, ok=False, error=f"{type(error).__name__}: {error}")
    reply = encode(ack, sent)
    sent.add(names_of(ack))
    return reply


def failures_in(replies: dict[int, bytes]) -> dict[int, str]:
    """Returns the words of each rank whose work failed, by rank."""
    return {rank: reply[1:].decode() for rank, reply in sorted(replies.items()) if reply[:1] == _FAILED}
