"""The state of one target in one attempt at an update, and of its part in the whole update.

Each is made anew and never reset: a late answer to an earlier attempt changes nothing of this one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from weightcast.comm.http import Lease
from weightcast.digest.sent import Sent
from weightcast.errors import VerificationFailed, WeightcastError
from weightcast.report import LegReport, TargetReport, TargetStatus
from weightcast.runtime.deadline import Deadline
from weightcast.transports.plan import TargetPlan, reads_memory
from weightcast.wire.answers import Ack, Taken
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.messages import Commit

Proof = Literal["none", "received", "resident", "behaviour"]
UNPLANNED = TargetPlan()


@dataclass(slots=True, kw_only=True)
class LinkSession:
    """One attempt at an update of one target.

    Attributes:
        id: Id of the open session; empty without one.
        load_s: Seconds that the target's slowest rank spent on copies.
        verify_s: Seconds that the target's slowest rank spent on digests.
        peak_extra_bytes: Most extra memory of any rank, in bytes.
        sent: Number of buckets that the target has loaded.
        overdue: True once the target has missed a deadline.
        deaf: True if it is overdue, and has not answered a message that ends something either.
        opened, committed: Answers to Open and Commit; None before them.
        closed: Answer to Close, or to the last bucket if that answers Close too; None before it.
        asked: The Commit; None before it is sent.
        opening: Waits for the answer to Open.
        limit_s: Deadline of one answer, in seconds.
        moving_s: Seconds in which at least one bucket was announced and not yet taken.
        answered_at: When buckets were answered, as ``time.monotonic``, by the index of the last of each request.
        awaited: Deadline of those that are not answered, likewise.
    """

    id: str = ""
    load_s: float = 0.0
    verify_s: float = 0.0
    peak_extra_bytes: int = 0
    sent: int = 0
    overdue: bool = False
    deaf: bool = False
    opened: Ack | None = None
    closed: Ack | None = None
    committed: Ack | None = None
    asked: Commit | None = None
    opening: asyncio.Task[Any] | None = None
    limit_s: float = 30.0
    lease: Lease | None = None
    moving_s: float = 0.0
    answered_at: dict[int, float] = field(default_factory=dict[int, float])
    awaited: dict[int, Deadline] = field(default_factory=dict[int, Deadline])
    _adding: threading.Lock = field(default_factory=threading.Lock)
    _moving: int = 0  # buckets
    _moving_since: float = 0.0

    @contextmanager
    def moves(self) -> Generator[None]:
        """Counts the time in which a bucket is on its way; two may be at once."""
        with self._adding:
            self._moving += 1
            if self._moving == 1:
                self._moving_since = time.monotonic()
        try:
            yield
        finally:
            with self._adding:
                self._moving -= 1
                if not self._moving:
                    self.moving_s += time.monotonic() - self._moving_since

    def legs(self, plan: TargetPlan, size_bytes: int) -> tuple[LegReport, ...]:
        """The legs of the target's plan with what they carried, given the bytes of all tensors."""
        if self.closed is None:
            return plan.legs
        found: list[LegReport] = []
        for leg in plan.legs:
            taken = {leg.by: size_bytes * len(leg.ranks)} if plan.gathers else self._taken_over(leg, self.closed.taken)
            found += (
                msgspec.structs.replace(leg, by=by, bytes=count, seconds=self.moving_s) for by, count in taken.items()
            )
        return tuple(found)

    @staticmethod
    def _taken_over(leg: LegReport, taken: Sequence[Taken]) -> dict[str, int]:
        """Bytes that the ranks of a leg took, by carrier: what could not be read in place came by bucket."""
        in_place, in_buffers, in_messages = (
            sum(one[kind] for rank, one in enumerate(taken) if rank in leg.ranks) for kind in range(3)
        )
        if leg.by == "mapped":
            both = {"mapped": in_place, "buffer": in_buffers}
            return {by: count for by, count in both.items() if count} or {leg.by: 0}
        return {leg.by: in_buffers if reads_memory([leg.by]) else in_messages}

    def took_over(self, ack: Ack | None = None, count: int = 1) -> None:
        """Counts buckets that the engine has loaded.  The answer to the last bucket may answer Close too."""
        with self._adding:
            self.sent += count
            if ack is not None and ack.closed:
                self.closed = ack

    def add_costs(self, ack: Ack) -> None:
        """Adds up what a step took."""
        with self._adding:  # answers to two buckets may arrive at once
            self.load_s += ack.load_s
            self.verify_s += ack.verify_s
            self.peak_extra_bytes = max(self.peak_extra_bytes, ack.peak_extra_bytes)

    def turn_began(self, bucket: int) -> float | Deadline | None:
        """Returns the time at which the bucket before was answered (``time.monotonic``).

        Until then it returns that bucket's deadline.  The deadlines of two buckets may pass in either order, and a
        silent engine is not waited for twice.  None if the bucket before was not announced yet.
        """
        if bucket == 0 or self.overdue:
            return 0.0
        answered_at = self.answered_at.get(bucket - 1)
        return self.awaited.get(bucket - 1) if answered_at is None else answered_at


@dataclass(slots=True)
class Outcome:
    """One target in one update, across attempts.

    Attributes:
        info: The target's description when it was to take part; None if it did not answer.
        failed: The failure of the target, which takes no part in the attempts that follow; None if it has not failed.
        plan: How the target was to get the weights in its last attempt; without a transport if there was none.
        proof: Highest level of proof that was reached.
        digest: Returns the model digest at that level; empty without proof.  Called when the update is over.
        matched: Number of engine ranks that agree with it.
        in_doubt: True if the answer to Commit was lost and the target could not be asked again.
        uncompared: True if its behaviour had to be compared with the trainer's and could not be.
        reverted: The target's answer to Revert; None if it was not switched back.
        ahead: True if the target serves the new version although others were switched back.
        notes: Failures that did not fail the update.
    """

    info: EngineInfo | None = None
    failed: WeightcastError | None = None
    plan: TargetPlan = UNPLANNED
    proof: Proof = "none"
    digest: Callable[[], str] = str
    matched: int = 0
    in_doubt: bool = False
    uncompared: bool = False
    reverted: Ack | None = None
    ahead: bool = False
    notes: list[str] = field(default_factory=list[str])
    message: str = ""

    @property
    def answers_otherwise(self) -> bool:
        """True if the target keeps what was sent, but its log-probabilities differ from the trainer's."""
        return isinstance(self.failed, VerificationFailed) and self.proof == "resident" and not self.uncompared

    def add(self, words: str) -> None:
        """Adds a remark for the report."""
        self.message = f"{words}; {self.message}" if self.message else words

    def received(self, ack: Ack, sent: Sent) -> None:
        """Records that the target received exactly what was sent, according to its answer to Close."""
        self.proof = "received"
        self.matched = ack.ranks
        self.digest = lambda: sent.digest

    def resident(self, ack: Ack, digest: str) -> None:
        """Records that the target keeps what was sent, with this model digest, according to its answer to Commit."""
        self.proof = "resident"
        self.matched = ack.resident_ranks
        self.digest = lambda: digest

    def row(
        self,
        url: str,
        session: LinkSession,
        now: EngineInfo | WeightcastError | None,
        legs: tuple[LegReport, ...],
    ) -> TargetReport:
        """Returns the target's row in the report.

        ``now`` is the result of another probe, for a target that has not committed or has failed; None for others.
        """
        ack = session.committed
        answer = self.reverted or ack
        status: TargetStatus = "serving" if answer is not None and self.reverted is None else "untouched"
        after = answer.version if answer is not None else None
        message = self.message
        if isinstance(now, EngineInfo):
            status = "quarantined" if now.state == "quarantined" else "unknown" if self.in_doubt else status
            after = now.version
            message = message or now.message
        elif now is not None:
            status = "unknown" if self.in_doubt else "quarantined"
            after = None
            message = str(now)
        if self.failed is not None:
            message = str(self.failed)
        if self.in_doubt:
            message = f"{message}; it is not known whether the engine has switched: send it a full update"
        if self.ahead or (isinstance(self.failed, VerificationFailed) and ack is not None):
            # The engine serves other weights than were sent, or than the other engines do, whatever state it reports.
            status = "quarantined" if self.reverted is None else status
        if self.reverted is not None and self.message and self.message not in message:
            message = f"{self.message}; {message}"
        info, serving = self.info, status == "serving"
        return TargetReport(
            url=url,
            engine=info.engine if info is not None else "unknown",
            version_before=info.version if info is not None else None,
            version_after=after,
            digest=(self.digest() if serving else "") or None,
            status=status,
            proof=self.proof if serving else "none",
            ranks=info.tp_size if info is not None else 0,
            digests_matched=self.matched if serving else 0,
            stall_s=ack.stall_s if ack is not None else 0.0,
            peak_extra_bytes=session.peak_extra_bytes if ack is not None else 0,
            not_updated=ack.not_updated if ack is not None else (),
            transport=self.plan.transport,
            legs=legs,
            message=message,
            notes=tuple(self.notes),
        )
