"""Events of an update, which a trainer rank hands to the functions of ``connect(on_event=...)`` as they happen.

    every trainer rank    UpdateStarted, StepEnded for each step, UpdateEnded
    the head alone        AttemptStarted, Asked for each message to a target, TargetsChanged

All times are seconds of ``time.monotonic()``.  It counts from the start of the host, so times of processes on one host
compare.  ``Asked`` has the times of one message on both clocks, from which the clocks of two hosts can be aligned.

An event carries at most the first eight digits of a session's id, because whoever knows the whole id can take part in
the session.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from weightcast.report import UpdateReport

UpdateOutcome = Literal["succeeded", "partial", "failed"]
_Label = Annotated[str, Meta(max_length=64)]
_RankNumber = Annotated[int, Meta(ge=0, lt=1 << 20)]
_StepBucket = Annotated[int, Meta(ge=0, lt=1 << 20)]


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
    rank: _RankNumber | None
    began: float
    ended: float
    bucket: _StepBucket | None = None

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all events; the JSON form has the class name as ``type``."""


# -- every trainer rank


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
    outcome: UpdateOutcome
    report: UpdateReport | None = None
    error: str = ""
    error_kind: str = ""
    rank: int
    at: float


# -- the head alone


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


Event = UpdateStarted | StepEnded | UpdateEnded | AttemptStarted | Asked | TargetsChanged


def short(session: str) -> str:
    """The part of a session's id that events and logs may show."""
    return session[:8]
