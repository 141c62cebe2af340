"""Keeps the trainer ranks in step: all enter a call together, and all receive the head's messages."""

from __future__ import annotations

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

    def agree(self, mine: WeightcastError | None) -> WeightcastError | None:
        """Returns, on every rank, the error that the first of them gave; None if none did."""
        payload = b"" if mine is None else msgspec.json.encode(Failure.of(mine))
        told = self.group.gather_bytes(payload, timeout_s=self.wait_s)
        first = next((one for one in told or () if one), b"")
        failure = msgspec.json.decode(first, type=Failure) if first else None
        failure = self.hear(AttemptResult(failure=failure)).failure
        return None if failure is None else failure.rebuild()

    def hear(self, message: AttemptResult) -> AttemptResult:
        """Returns the head's message on every rank; the argument counts on the head alone."""
        payload = msgspec.json.encode(message) if self.group.is_head else None
        heard = self.group.broadcast_bytes(payload, timeout_s=self.wait_s)
        return msgspec.json.decode(heard, type=AttemptResult)
