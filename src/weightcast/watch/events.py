"""Events of an update, which ``watch/listeners.py`` hands to listeners.

Each process emits the events of its own part:

    trainer, every rank   UpdateStarted, StepEnded for each step, UpdateEnded
    trainer, head only    AttemptStarted, Asked for each message to a target, TargetsChanged
    engine                SessionOpened, Answered for each message, SessionEnded, StateChanged

All times are seconds of ``time.monotonic()``.  It counts from the start of the host, so times of processes on one host
compare.  ``Asked`` has the times of one message on both clocks, from which the clocks of two hosts can be aligned.

An event carries at most the first eight digits of a session's id, because whoever knows the whole id can take part in
the session.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from weightcast.report import UpdateReport

Outcome = Literal["succeeded", "partial", "failed"]
SessionOutcome = Literal["committed", "aborted", "quarantined", "reverted"]
_Label = Annotated[str, Meta(max_length=64)]
_Rank = Annotated[int, Meta(ge=0, lt=1 << 20)]
_Index = Annotated[int, Meta(ge=0, lt=1 << 20)]


class Step(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A piece of work with a beginning and an end.  Steps of one rank may overlap.

    Attributes:
        phase: On a trainer rank ``open``, ``gather``, ``pack``, ``send``, ``verify`` or ``commit``, as in
            ``UpdateReport.phases``, and ``wire`` for each broadcast of the head.  On an engine rank ``wire`` (a bucket
            arrives), ``load`` (it is copied), ``verify`` (digests) or ``switch`` (new weights become live).  In an
            engine's server ``pause`` or ``resume``.
        rank: The trainer rank or engine rank; None for an engine's server.
        began, ended: Beginning and end, on the clock of that rank's host.
        bucket: Index of the bucket that the work was for; None if it was for no single one.
    """

    phase: _Label
    rank: _Rank | None
    began: float
    ended: float
    bucket: _Index | None = None

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all events; the JSON form has the class name as ``type``."""


# -- trainer, every rank


class UpdateStarted(_Event, frozen=True, kw_only=True):
    """``update()``, or the catch-up of ``retarget()``, was called.

    Attributes:
        targets: URLs of the targets that are to take part; empty on ranks other than the head.
        rank: This trainer rank; 0 is the head.
        time_s: The moment ``at`` in seconds since 1970.
    """

    version: int
    transport: str
    targets: tuple[str, ...]
    rank: int
    at: float
    time_s: float


class StepEnded(_Event, frozen=True, kw_only=True):
    """A trainer rank has finished a step of the update.

    Attributes:
        sent_bytes: On the head, after a bucket was handed to the transport: bytes of the buckets so far in this
            attempt.  0 after every other step.
        total_bytes: Bytes of all buckets then; else 0.
    """

    step: Step
    sent_bytes: int = 0
    total_bytes: int = 0


class UpdateEnded(_Event, frozen=True, kw_only=True):
    """The update is over.

    Attributes:
        outcome: ``succeeded`` (every target serves the new version), ``partial`` (some do, and ``update`` returned a
            report) or ``failed`` (``update`` raised).
        report: The report; None if the update failed before it had one.
        error: Text of the error that ``update`` raises; empty if it raises none.
        error_kind: Class name of that error.
    """

    version: int
    transport: str
    outcome: Outcome
    report: UpdateReport | None = None
    error: str = ""
    error_kind: str = ""
    rank: int
    at: float


# -- trainer, head only


class AttemptStarted(_Event, frozen=True, kw_only=True):
    """The head opens a session on every target that takes part in this attempt; ``number`` counts from 1."""

    number: int
    session: str
    version: int
    targets: tuple[str, ...]
    at: float


class Asked(_Event, frozen=True, kw_only=True):
    """The head has sent a message to a target and has read the answer, or has given up.

    Attributes:
        message: ``open``, ``join``, ``bucket``, ``close``, ``commit``, ``revert``, ``abort`` or ``leave``.
            In the place of buckets, ``disk`` has ``folder`` and ``checkpoint-engine`` has ``handles``.
        bucket: Index of the bucket; None for other messages.
        began: Monotonic time here, before the message was sent.
        ended: Monotonic time here, after the answer was read.
        ok: False if the target refused, failed or did not answer; ``error`` says why.
        heard: Monotonic time of the engine's host when its server had read the message; None from stock engines.
        answered: Monotonic time there when the answer was ready; None likewise.
        steps: Work inside the engine that this answer tells of, on the engine's clock.
    """

    target: str
    message: str
    bucket: int | None = None
    began: float
    ended: float
    ok: bool
    error: str = ""
    heard: float | None = None
    answered: float | None = None
    steps: tuple[Step, ...] = ()


class TargetNow(msgspec.Struct, frozen=True, kw_only=True):
    """One target as ``WeightUpdater.health()`` knows it.

    Attributes:
        state: ``gone``, ``joining``, ``updating``, ``serving`` or ``quarantined``.
        active: True if it serves the fleet's version in full.
        version: Version that it serves; None if unknown.
        reason: Reason for the state; empty for a healthy target.
    """

    url: str
    state: str
    active: bool
    version: int | None
    reason: str = ""


class TargetsChanged(_Event, frozen=True, kw_only=True):
    """The state of all targets, after ``connect``, ``retarget`` and every update."""

    targets: tuple[TargetNow, ...]
    at: float


# -- engine


class SessionOpened(_Event, frozen=True, kw_only=True):
    """A trainer has opened a session on this engine.

    Attributes:
        owner: The trainer's process, in words.
        traceparent: The trainer's span, in the form of W3C Trace Context; empty without one.
        at: Monotonic time at which the message had been read.
        time_s: The moment ``at`` in seconds since 1970.
    """

    session: str
    version: int
    owner: str
    traceparent: str = ""
    at: float
    time_s: float


class Answered(_Event, frozen=True, kw_only=True):
    """This engine has carried out a message.

    Attributes:
        session: First eight digits of the session's id; empty for a message of no session.
        message: As ``Asked.message``, and ``readback``.
        bucket: Index of the bucket; None for other messages.
        transport: ``ipc`` or ``broadcast`` for a bucket; else empty.
        bytes: Bytes of the bucket; else 0.
        began: Monotonic time at which the message had been read.
        ended: Monotonic time at which the answer was ready.
        ok: False if it was refused or failed; ``error`` says why.
        steps: The work of the ranks and of the server.
    """

    session: str
    message: str
    bucket: int | None = None
    transport: str = ""
    bytes: int = 0
    began: float
    ended: float
    ok: bool
    error: str = ""
    steps: tuple[Step, ...] = ()


class SessionEnded(_Event, frozen=True, kw_only=True):
    """A session of this engine is over, or a committed one was taken back.

    Attributes:
        version: The version that it brought, or was to bring.
        serves: The version that the engine serves now; None if unknown.
        outcome: ``committed``, ``aborted`` (the old version stays), ``quarantined`` or ``reverted``.
        reason: Why, if it was not committed.
        stall_s: Seconds without generation.
    """

    session: str
    version: int
    serves: int | None
    outcome: SessionOutcome
    reason: str = ""
    stall_s: float = 0.0
    at: float


class StateChanged(_Event, frozen=True, kw_only=True):
    """The state or the version of this engine is another than before.

    Attributes:
        state: ``serving``, ``updating`` or ``quarantined``.
        version: Version that it serves; None if unknown.
        reason: Why it is quarantined; else empty.
    """

    state: str
    version: int | None
    reason: str = ""
    at: float


TrainerEvent = UpdateStarted | StepEnded | UpdateEnded | AttemptStarted | Asked | TargetsChanged
EngineEvent = SessionOpened | Answered | SessionEnded | StateChanged
Event = TrainerEvent | EngineEvent


def short(session: str) -> str:
    """The part of a session's id that events and logs may show."""
    return session[:8]


def within(steps: Sequence[Step], phase: str) -> float:
    """Seconds that the slowest rank spent in a phase."""
    by_rank: dict[int | None, float] = {}
    for step in steps:
        if step.phase == phase:
            by_rank[step.rank] = by_rank.get(step.rank, 0.0) + step.seconds
    return max(by_rank.values(), default=0.0)
