"""OpenTelemetry spans of an update: the head's, and those of every engine with our receiver, in one trace.

    weightcast.update                      the head
      weightcast.gather, pack, send ...    the head's phases
      weightcast.target                    one for each target; the head's messages to it are its events
        weightcast.session                 the engine; its parent comes with ``Open.traceparent``
          weightcast.wire, load ...        phases of each engine rank
          weightcast.pause, resume         the engine's server

Only OpenTelemetry's API is used, and only if the process has imported it, which every application with an SDK has.
Spans are few, and they are made when the update is over: a phase with many buckets is one span, from its first
beginning to its last end.  Then ``weightcast.seconds`` is the time that it worked, and ``weightcast.count`` the number
of its parts.  They are made and ended later (``watch/later.py``), with their true times, so that no update waits for
the SDK.  Only the spans whose ids go out in ``Open`` begin with the update, and get their attributes later.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from weightcast.version import __version__
from weightcast.watch.events import (
    Answered,
    Asked,
    AttemptStarted,
    SessionEnded,
    SessionOpened,
    StepEnded,
    UpdateEnded,
    UpdateStarted,
)
from weightcast.watch.later import Deferred

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class TrainerSpans(Deferred):
    """Makes the spans of the head."""

    def __init__(self) -> None:
        super().__init__(
            {
                UpdateStarted: self._begin,
                AttemptStarted: self._attempt,
                StepEnded: self._step,
                Asked: self._was_asked,
                UpdateEnded: self._end,
            }
        )
        self._otel: _Otel | None = None
        self._making: _UpdateSpans | None = None
        self._current: Any = None
        self._targets: dict[str, Any] = {}

    def traceparent(self, target: str) -> str:
        """As ``Tracing.traceparent``."""
        if self._making is None:
            return ""
        return _traceparent(self._targets.get(target, self._making.root))

    def _begin(self, event: UpdateStarted) -> None:
        if event.rank:
            return
        self._making = self._current = None
        otel = self._otel = _Otel.here(event.time_s - event.at, self._otel)
        if otel is None:
            return
        root = otel.start("update", event.at)
        if not root.get_span_context().is_valid:  # no SDK, and no span of the caller's to continue
            return
        self._current = otel.make_current(root)  # spans and logs of the caller's own code in the update belong to it
        self._making = _UpdateSpans(otel, root, event)
        self._begin_targets(event.targets, event.at)

    def _begin_targets(self, urls: Sequence[str], began: float) -> None:
        """Begins them at once: engines continue them."""
        making = self._making
        assert making is not None
        self._targets = {url: making.otel.start("target", began, parent=making.root, kind="CLIENT") for url in urls}
        self.later.keep(making.begin_targets, self._targets)

    def _attempt(self, event: AttemptStarted) -> None:
        if self._making is None:
            return
        self.later.keep(self._making.attempt, event)
        if event.number > 1:
            self._begin_targets(event.targets, event.at)

    def _step(self, event: StepEnded) -> None:
        if self._making is not None:
            self.later.keep(self._making.step, event)

    def _was_asked(self, event: Asked) -> None:
        if self._making is not None:
            self.later.keep(self._making.was_asked, event)

    def _end(self, event: UpdateEnded) -> None:
        making, self._making = self._making, None
        if making is None:
            return
        self._targets = {}
        making.otel.make_old(self._current)
        self.later.keep(making.end, event)
        self.later.due()


class _UpdateSpans:
    """The spans of one update of the head.  What it adds to them is done later."""

    def __init__(self, otel: _Otel, root: Any, started: UpdateStarted) -> None:
        self.otel = otel
        self.root = root
        self._started = started
        self._offset_ns = otel.offset_ns  # of the next update it may be another
        self._steps = _Worked()
        self._targets: Mapping[str, Any] = _NOTHING
        self._asked: dict[str, _Messages] = {}
        self._attempts, self._session = 0, ""

    def begin_targets(self, spans: Mapping[str, Any]) -> None:
        """Notes the spans of an attempt's targets."""
        self._targets = spans

    def attempt(self, event: AttemptStarted) -> None:
        """Ends the spans of the attempt before."""
        self._attempts, self._session = event.number, event.session
        if event.number > 1:
            self._end_targets({}, event.at)

    def step(self, event: StepEnded) -> None:
        """Adds a step of the head."""
        self._steps.add(event.step.phase, event.step.began, event.step.ended)

    def was_asked(self, event: Asked) -> None:
        """Adds a message to a target."""
        messages = self._asked.get(event.target)
        if messages is None:
            messages = self._asked[event.target] = _Messages()
        messages.add(event)

    def end(self, event: UpdateEnded) -> None:
        """Makes the spans of the phases, and ends all."""
        otel, root, report = self.otel, self.root, event.report
        rows = report.targets if report is not None else ()
        self._end_targets({row.url: row.message or row.status for row in rows if row.status != "serving"}, event.at)
        if root.is_recording():
            otel.make_spans(self._steps, root, self._offset_ns)
            values: dict[str, Any] = {
                "version": event.version,
                "transport": event.transport,
                "targets": len(self._started.targets),
                "outcome": event.outcome,
                "attempts": self._attempts,
                "session": self._session,
            }
            if report is not None:
                values |= {"bytes": report.bytes, "buckets": report.buckets}
            root.set_attributes(_named(values))
            if event.outcome == "failed":
                otel.fail(root, f"{event.error_kind}: {event.error}")
        root.end(_ns_of(event.at, self._offset_ns))

    def _end_targets(self, failed: Mapping[str, str], at: float) -> None:
        targets, self._targets = self._targets, _NOTHING
        asked, self._asked = self._asked, {}
        for url, span in targets.items():
            messages = asked.get(url) or _Messages()
            if span.is_recording():
                span.set_attributes(_named({"target": url}))
                self.otel.add_events(messages.worked, span, self._offset_ns)
                error = failed.get(url) or messages.error
                if error:
                    self.otel.fail(span, error)
            span.end(_ns_of(at if messages.ended is None else messages.ended, self._offset_ns))


class EngineSpans(Deferred):
    """Makes the spans of an engine's server and its ranks."""

    def __init__(self) -> None:
        super().__init__({SessionOpened: self._begin, Answered: self._answer, SessionEnded: self._end})
        self._otel: _Otel | None = None
        self._opened: SessionOpened | None = None
        self._answered: list[Answered] = []

    def _begin(self, event: SessionOpened) -> None:
        self._opened = event
        self._answered = []

    def _answer(self, event: Answered) -> None:
        if self._opened is not None and event.session == self._opened.session:
            self._answered.append(event)

    def _end(self, event: SessionEnded) -> None:
        opened = self._opened
        if opened is not None and event.session == opened.session:
            answered, self._answered = self._answered, []
            self.later.keep(self._make, (opened, event, answered))
            self.later.due()

    def _make(self, ended: tuple[SessionOpened, SessionEnded, Sequence[Answered]]) -> None:
        opened, event, answered = ended
        otel = self._otel = _Otel.here(opened.time_s - opened.at, self._otel)
        reverts = event.outcome == "reverted"
        answered = [answer for answer in answered if not reverts or answer.message == "revert"]
        if otel is None or not answered:
            return
        values: dict[str, Any] = {"version": event.version, "session": event.session, "outcome": event.outcome}
        name = "revert" if reverts else "session"
        span = otel.start(name, answered[0].began, values, parent=otel.parent(opened.traceparent), kind="SERVER")
        if span.is_recording():
            by_rank: dict[int | None, _Worked] = {}
            for answer in answered:
                for step in answer.steps:
                    by_rank.setdefault(step.rank, _Worked()).add(step.phase, step.began, step.ended)
            for rank, worked in by_rank.items():
                otel.make_spans(worked, span, otel.offset_ns, _NOTHING if rank is None else {"rank": rank})
            size_bytes = sum(answer.bytes for answer in answered)
            span.set_attributes(_named({"bytes": size_bytes, "stall_s": event.stall_s}))
            if event.outcome != "committed":
                otel.fail(span, event.reason)
        span.end(_ns_of(event.at, otel.offset_ns))


class _Worked:
    """First beginning, last end, seconds and number of the pieces of work of each name."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[float, float, float, int]] = {}

    def add(self, name: str, began: float, ended: float) -> None:
        """Adds a piece."""
        first, last, seconds, count = self.rows.get(name, (began, ended, 0.0, 0))
        self.rows[name] = min(first, began), max(last, ended), seconds + ended - began, count + 1


class _Messages:
    """The messages to one target.

    Attributes:
        worked: The messages by name.
        error: The first error; empty without one.
        ended: When the last answer had been read; None without one.
    """

    def __init__(self) -> None:
        self.worked = _Worked()
        self.error = ""
        self.ended: float | None = None

    def add(self, asked: Asked) -> None:
        """Adds a message."""
        self.worked.add("buckets" if asked.message == "bucket" else asked.message, asked.began, asked.ended)
        self.ended = asked.ended
        if not asked.ok and not self.error:
            self.error = asked.error


class _Otel:
    """OpenTelemetry's API as this process has it, and its clock."""

    def __init__(self, trace: Any) -> None:
        self._trace = trace
        self._tracer = trace.get_tracer("weightcast", __version__)
        self.offset_ns = 0

    @classmethod
    def here(cls, offset_s: float, known: _Otel | None) -> _Otel | None:
        """Returns the API, or None if this process has not imported it.

        Args:
            offset_s: Seconds to add to a monotonic time for the seconds since 1970.
            known: What the call before returned.
        """
        trace = sys.modules.get("opentelemetry.trace")
        found = known or (None if trace is None else cls(trace))
        if found is not None:
            found.offset_ns = round(offset_s * 1e9)
        return found

    def start(
        self,
        name: str,
        began: float,
        values: Mapping[str, Any] = _NOTHING,
        *,
        parent: Any = None,
        kind: str = "INTERNAL",
        offset_ns: int | None = None,
    ) -> Any:
        """Starts a span; its parent is a span, a span context, or (None) the caller's current span."""
        context = None if parent is None else self._trace.set_span_in_context(parent)
        return self._tracer.start_span(
            f"weightcast.{name}",
            context=context,
            kind=getattr(self._trace.SpanKind, kind),
            attributes=_named(values) if values else None,
            start_time=_ns_of(began, self.offset_ns if offset_ns is None else offset_ns),
        )

    def make_spans(self, pieces: _Worked, parent: Any, offset_ns: int, values: Mapping[str, Any] = _NOTHING) -> None:
        """Makes one span for each name, from the first beginning to the last end."""
        for name, (began, ended, seconds, count) in pieces.rows.items():
            worked = {"seconds": seconds, "count": count} if count > 1 else {}
            span = self.start(name, began, {**worked, **values}, parent=parent, offset_ns=offset_ns)
            span.end(_ns_of(ended, offset_ns))

    def add_events(self, pieces: _Worked, span: Any, offset_ns: int) -> None:
        """Adds one event for each name, at its last end; it costs a tenth of a span."""
        for name, (_, ended, seconds, count) in pieces.rows.items():
            values = _named({"seconds": seconds, "count": count})
            span.add_event(f"weightcast.{name}", values, _ns_of(ended, offset_ns))

    def fail(self, span: Any, words: str) -> None:
        """Marks a span as failed."""
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, words))

    def parent(self, traceparent: str) -> Any:
        """The span that a W3C traceparent names; one without a trace if it is empty, so that a new trace begins."""
        if not traceparent:
            return self._trace.INVALID_SPAN
        _, trace_id, span_id, flags = traceparent.split("-")
        context = self._trace.SpanContext(
            int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=self._trace.TraceFlags(int(flags, 16))
        )
        return self._trace.NonRecordingSpan(context)

    def make_current(self, span: Any) -> Any:
        """Makes a span the current one of this thread; returns the token that undoes it."""
        from opentelemetry import context  # the process has imported it already

        return context.attach(self._trace.set_span_in_context(span))

    def make_old(self, token: Any) -> None:
        """Undoes ``make_current``."""
        from opentelemetry import context

        context.detach(token)


def _ns_of(at: float, offset_ns: int) -> int:
    """Nanoseconds since 1970 of a monotonic time."""
    return round(at * 1e9) + offset_ns


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"weightcast.{key}": value for key, value in values.items()}


def _traceparent(span: Any) -> str:
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
