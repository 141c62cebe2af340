"""Events of an imaginary update, for the tests of what listens to them."""

from __future__ import annotations

from typing import Any

import msgspec

from weightcast.report import TargetReport, UpdateReport
from weightcast.watch.events import (
    Asked,
    AttemptStarted,
    Event,
    Step,
    StepEnded,
    TargetNow,
    TargetsChanged,
    UpdateEnded,
    UpdateStarted,
)
from weightcast.watch.sessions import Answered, SessionRecord, SessionWatcher

A, B = "http://a:8000", "http://b:8000"
SESSION = "0123abcd"


def row(url: str, **changes: Any) -> TargetReport:
    made = TargetReport(url=url, engine="e 1", version_after=7, status="serving", ranks=2, stall_s=0.25)
    return msgspec.structs.replace(made, **changes)


def report(*rows: TargetReport, version: int = 7) -> UpdateReport:
    phases = {"open": 0.02, "gather": 0.5, "pack": 0.1, "send": 1.0, "load": 0.3, "verify": 0.2, "commit": 0.04}
    return UpdateReport(
        version=version,
        transport="ipc",
        bytes=1000,
        buckets=2,
        seconds=2.0,
        phases=phases | {"stall": 0.25},
        peak_extra_bytes=64,
        digest="d",
        targets=rows,
    )


def started(version: int = 7, *, rank: int = 0, at: float = 10.0) -> UpdateStarted:
    return UpdateStarted(version=version, transport="ipc", targets=(A, B), rank=rank, at=at, time_s=1000.0 + at)


def ended(outcome: Any = "succeeded", found: UpdateReport | None = None, **changes: Any) -> UpdateEnded:
    values: dict[str, Any] = {"version": 7, "transport": "ipc", "rank": 0, "at": 12.0} | changes
    return UpdateEnded(outcome=outcome, report=found, **values)


def targets(**states: str) -> TargetsChanged:
    """The state of each target; the version goes with it."""
    urls = {"a": A, "b": B}
    rows = tuple(
        TargetNow(
            url=urls[name],
            state=state,
            active=state == "serving",
            version=7 if state == "serving" else None,
            reason="" if state == "serving" else "a reason",
        )
        for name, state in states.items()
    )
    return TargetsChanged(targets=rows, at=12.0)


def trainer_events() -> list[Event]:
    """A whole update of A and B in two buckets; B refuses the commit."""
    attempt = AttemptStarted(number=1, session=SESSION, version=7, targets=(A, B), at=10.1)
    asked = [
        Asked(target=A, message="open", began=10.1, ended=10.2, ok=True, heard=5.0, answered=5.1),
        Asked(target=A, message="bucket", bucket=0, began=10.3, ended=10.5, ok=True),
        Asked(target=A, message="bucket", bucket=1, began=10.5, ended=10.9, ok=True),
        Asked(target=A, message="commit", began=11.0, ended=11.5, ok=True),
        Asked(target=B, message="commit", began=11.0, ended=11.6, ok=False, error="out of memory"),
    ]
    steps = [
        ("gather", 10.2, 10.3, 0),
        ("send", 10.3, 10.5, 0),
        ("gather", 10.5, 10.6, 1),
        ("commit", 11.0, 11.6, None),
    ]
    done = [StepEnded(step=Step(phase, 0, began, end, bucket)) for phase, began, end, bucket in steps]
    last = ended("partial", report(row(A), row(B, status="quarantined", message="out of memory")))
    return [started(), attempt, *asked, *done, targets(a="serving", b="quarantined"), last]


def tell_session(watcher: SessionWatcher, outcome: Any = "committed", *, traceparent: str = "") -> SessionRecord:
    """Tells a watcher of a session of two ranks and one bucket."""
    session = SessionRecord(
        session=SESSION,
        version=7,
        owner="process 1 on t",
        traceparent=traceparent,
        began=5.0,
        began_unix_s=1005.0,
    )
    watcher.opened(session)
    bucket = Answered(
        session=SESSION,
        message="bucket",
        bucket=0,
        transport="ipc",
        bytes=1000,
        began=5.1,
        ended=5.6,
        ok=True,
        steps=(
            Step("wire", 0, 5.1, 5.2, 0),
            Step("load", 0, 5.2, 5.5, 0),
            Step("wire", 1, 5.1, 5.3, 0),
            Step("load", 1, 5.3, 5.4, 0),
        ),
    )
    pause = (Step("pause", None, 6.0, 6.1),)
    commit = Answered(session=SESSION, message="commit", began=6.0, ended=6.5, ok=True, steps=pause)
    for answered in (bucket, commit):
        session.add(answered)
        watcher.answered(session, answered)
    end_session(watcher, session, outcome, at=6.5)
    return session


def end_session(watcher: SessionWatcher, session: SessionRecord, outcome: Any, *, at: float) -> None:
    """Tells a watcher that a session is over, or was taken back."""
    good = outcome == "committed"
    session.outcome, session.reason = outcome, "" if good else "the trainer gave up"
    session.serves, session.stall_s, session.ended = 7 if good else 6, 0.4, at
    watcher.ended(session)
