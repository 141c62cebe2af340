"""The record of a session in an engine's server, and the base of those that read it.

The server adds each answer to the record of its session.  Log lines, spans, metrics and ``/weightcast/status`` read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec

from weightcast.watch.events import Step

SessionOutcome = Literal["committed", "aborted", "quarantined", "reverted"]
Work = tuple[float, float, float, int]  # first beginning, last end, seconds and number of pieces of work
_Key = TypeVar("_Key")


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """A message that an engine has carried out, or has refused.

    Attributes:
        session: First eight digits of the session's id; empty for a message of no session.
        message: As ``Asked.message``, and ``readback``.
        bucket: Index of the bucket; None for other messages.
        transport: Transport of the bucket; else empty.
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


@dataclass(slots=True, kw_only=True)
class SessionRecord:
    """One session of an engine, so far.

    Attributes:
        session: First eight digits of its id.
        version: The version that it brings.
        owner: The trainer's process, in words.
        traceparent: The trainer's span, in the form of W3C Trace Context; empty without one.
        began: Monotonic time at which its Open had been read.
        began_unix_s: The same moment in seconds since 1970.
        transport: Transport of the last bucket.
        bytes: Bytes of the buckets that arrived.
        work: Work of each rank by phase; the rank of the server is None.
        last: The last answer.
        outcome: None while it is open.
        reason: Why it was not committed.
        serves: The version that the engine serves after it; None if unknown.
        stall_s: Seconds without generation.
        ended: Monotonic time of its end, or of its reversal; None while it is open.
    """

    session: str
    version: int
    owner: str = ""
    traceparent: str = ""
    began: float
    began_unix_s: float
    transport: str = ""
    bytes: int = 0
    buckets: int = 0
    work: dict[tuple[int | None, str], Work] = field(default_factory=dict[tuple["int | None", str], Work])
    last: Answered | None = None
    outcome: SessionOutcome | None = None
    reason: str = ""
    serves: int | None = None
    stall_s: float = 0.0
    ended: float | None = None

    def add(self, answered: Answered) -> None:
        """Adds an answer to a message of this session."""
        self.last = answered
        if answered.ok and answered.bucket is not None:
            self.transport = answered.transport
            self.bytes += answered.bytes
            self.buckets += 1
        for step in answered.steps:
            add_work(self.work, (step.rank, step.phase), step.began, step.ended)

    def phases(self) -> dict[str, float]:
        """Seconds of the slowest rank by phase."""
        slowest: dict[str, float] = {}
        for (_, phase), (_, _, seconds, _) in self.work.items():
            slowest[phase] = max(slowest.get(phase, 0.0), seconds)
        return slowest


class SessionWatcher:
    """Base of those that are told of an engine's sessions, one call at a time.

    The trainer may wait for the call, so it must return soon.  An error is logged and ends nothing.  A session is None
    if there was none yet.
    """

    def opened(self, session: SessionRecord) -> None:
        """A trainer has opened a session."""

    def answered(self, session: SessionRecord | None, answered: Answered) -> None:
        """The engine has answered a message, which may be of no session or of another one."""

    def ended(self, session: SessionRecord) -> None:
        """A session is over, or a committed one was taken back."""

    def state_changed(self, session: SessionRecord | None, state: str, version: int | None, reason: str) -> None:
        """The engine's state or version is another than before; ``reason`` says why it is quarantined."""


def work_of(answered: Answered) -> dict[tuple[int | None, str], Work]:
    """The work of each rank by phase that one answer tells of."""
    table: dict[tuple[int | None, str], Work] = {}
    for step in answered.steps:
        add_work(table, (step.rank, step.phase), step.began, step.ended)
    return table


def add_work(table: dict[_Key, Work], key: _Key, began: float, ended: float) -> None:
    """Adds a piece of work to a row of a table."""
    first, last, seconds, count = table.get(key, (began, ended, 0.0, 0))
    table[key] = min(first, began), max(last, ended), seconds + ended - began, count + 1
