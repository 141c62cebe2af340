"""A worker that says what it was told; light, because ranks of every kind of executor import it."""

from __future__ import annotations

import os
import threading
import time

from weightcast.wire.answers import RankAck
from weightcast.wire.messages import Abort, Message


class Echo:
    """Answers with what it was told; waits, fails or ends on request."""

    def __init__(self, rank: int, tp_size: int, rendezvous: str, *, trouble: str = "") -> None:
        self.rank, self.tp_size, self.rendezvous = rank, tp_size, rendezvous
        self.stopped = threading.Event()
        self.closed = False
        if trouble == "one" and rank == 1:
            raise LookupError("no such model")
        if trouble == "exit" and rank == 1:
            os._exit(7)
        if trouble and rank == 0:
            time.sleep(100)  # as if in a collective with the other

    def apply(self, message: Message) -> RankAck:
        if isinstance(message, Abort):
            match message.reason:
                case "wait":
                    if not self.stopped.wait(200):
                        return RankAck(rank=self.rank, ok=False, error="nobody interrupted")
                    self.stopped.clear()
                    return RankAck(rank=self.rank, ok=False, error="interrupted")
                case "raise":
                    raise LookupError("unforeseen")
                case "exit 1" if self.rank == 1:
                    os._exit(3)
                case "long 0":
                    return RankAck(rank=self.rank, error="x" * 5_000_000)
        return RankAck(rank=self.rank, error=type(message).__name__)

    def run(self, command: bytes) -> bytes:
        if command == b"raise":
            raise LookupError(f"rank {self.rank} cannot")
        if command == b"raise 1" and self.rank == 1:
            raise LookupError("only me")
        if command == b"hang 0" and self.rank == 0:
            time.sleep(100)
        return command + f" on {self.rank} of {self.tp_size}".encode()

    def interrupt(self, reason: str) -> None:
        self.stopped.set()

    def close(self) -> None:
        self.closed = True
