"""Keeps the trainer ranks in step: all enter a call together, and all receive the head's messages."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import msgspec

from weightcast.comm.trainer_group import TrainerGroup
from weightcast.errors import TrainerRankFailed, WeightcastError
from weightcast.update.follower import FOLLOW_DEADLINES
from weightcast.update.messages import AttemptResult, Failure

_NEXT = "the next call of the updater"


class TrainerRanks:
    """The trainer ranks, as one of them sees the others; ``wait_s`` limits one wait for another rank during a call."""

    def __init__(self, group: TrainerGroup, *, timeout_s: float) -> None:
        self.group = group
        self.wait_s = timeout_s * (1 if group.is_head else FOLLOW_DEADLINES)
        self._timeout_s = timeout_s
        self._heard: WeightcastError | None = None  # the last error that all ranks have heard

    def enter(self, *, flags: int = 0) -> int:
        """Waits until every rank has come to the same call, before any engine is asked for anything.

        A call that failed on any rank has ended the ranks' group on all of them.  So this renews the group.
        TrainerRankFailed says that a rank did not come.  Returns, on every rank, the bits that any of them gave as
        ``flags``.
        """
        patience_s = self._timeout_s * FOLLOW_DEADLINES
        if self.group.failed:
            # A rank that was dead or silent is not waited for as long again.
            self.group.renew(timeout_s=self._timeout_s if self.group.lost else patience_s)
        try:
            return self.group.barrier(_NEXT, flags=flags, timeout_s=patience_s)
        except TrainerRankFailed:
            if self.group.lost:
                raise
            # The call before failed on another rank and not on this one.
            self.group.renew(timeout_s=patience_s)
            return self.group.barrier(_NEXT, flags=flags, timeout_s=patience_s)

    def agree(self, mine: WeightcastError | None) -> None:
        """Raises, on every rank, the error that the first of them gave; nothing if none did."""
        payload = b"" if mine is None else msgspec.json.encode(Failure.of(mine))
        told = self.group.gather_bytes(payload, timeout_s=self.wait_s)
        first = next((one for one in told or () if one), b"")
        self.hear_or_raise(AttemptResult(failure=msgspec.json.decode(first, type=Failure) if first else None))

    def hear(self, message: AttemptResult) -> AttemptResult:
        """Returns the head's message on every rank; the argument counts on the head alone."""
        payload = msgspec.json.encode(message) if self.group.is_head else None
        heard = self.group.broadcast_bytes(payload, timeout_s=self.wait_s)
        return msgspec.json.decode(heard, type=AttemptResult)

    def hear_or_raise(self, message: AttemptResult) -> AttemptResult:
        """As ``hear``; raises the failure that the message has, on every rank."""
        heard = self.hear(message)
        if (error := self.error_in(heard)) is not None:
            raise error
        return heard

    def error_in(self, heard: AttemptResult) -> WeightcastError | None:
        """The error of a message that every rank has heard, which each of them raises; None if it has none."""
        if heard.failure is None:
            return None
        self._heard = heard.failure.rebuild(heard.report)
        return self._heard

    def has_heard(self, error: BaseException) -> bool:
        """True if every rank raises this error, so that none waits for another."""
        return error is self._heard

    @contextmanager
    def hear_of_errors(self) -> Generator[None]:
        """Ends the waits of the other ranks if the block fails for a reason of this rank."""
        try:
            yield
        except BaseException as error:
            if self.group.world_size > 1 and not self.has_heard(error):
                self.group.abort(f"{type(error).__name__}: {error}".rstrip(": "))
            raise
