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
    UpdateEnded,
    UpdateStarted,
)
from weightcast.watch.listeners import ByKind
from weightcast.watch.timeline import Recording, TimelineRecorder

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class TrainerSpans(ByKind):
    """Makes the spans of the head."""

    def __init__(self, recorder: TimelineRecorder) -> None:
        """Makes none yet; ``recorder`` listens to the same events, and keeps the steps and the messages."""
        super().__init__(
            {UpdateStarted: self._begin, AttemptStarted: self._attempt, UpdateEnded: self._leave},
            later={UpdateEnded: self._make},
        )
        self._recorder = recorder
        self._otel: _Otel | None = None
        self._open: _OpenSpans | None = None
        self._left: dict[float, _OpenSpans] = {}

    def traceparent(self, target: str) -> str:
        """As ``Tracing.traceparent``."""
        return "" if self._open is None else self._open.traceparent(target)

    def _begin(self, event: UpdateStarted) -> None:
        if event.rank:
            return
        otel = self._otel = self._otel or _Otel.here()
        if otel is None:
            return
        clock = _Clock(event)
        root = otel.start("update", clock.ns(event.at))
        if root.get_span_context().is_valid:  # else there is neither an SDK nor a span of the caller's to continue
            self._open = _OpenSpans(otel, clock, root, event)

    def _attempt(self, event: AttemptStarted) -> None:
        if self._open is not None:
            self._open.attempt(event)

    def _leave(self, event: UpdateEnded) -> None:
        found, self._open = self._open, None
        if found is not None:
            found.leave(self._recorder.recording)
            self._left[event.at] = found

    def _make(self, event: UpdateEnded) -> None:
        found = self._left.pop(event.at, None)
        if found is not None:
            found.end(event)


class _OpenSpans:
    """The spans that begin with an update of the head: its own, and those that engines continue."""

    def __init__(self, otel: _Otel, clock: _Clock, root: Any, started: UpdateStarted) -> None:
        self._otel = otel
        self._clock = clock
        self._root = root
        self._inside = otel.inside(root)
        self._token = otel.attach(self._inside)  # spans and logs of the caller's own code in the update belong to it
        self._number, self._session = 0, ""
        self._num_targets = len(started.targets)
        self._attempts: list[tuple[float, dict[str, Any]]] = []
        self._begin_targets(started.targets, started.at)
        self._recording = Recording()

    def traceparent(self, target: str) -> str:
        """The span of a target, in the form of W3C Trace Context."""
        _, spans = self._attempts[-1]
        context = spans.get(target, self._root).get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def attempt(self, event: AttemptStarted) -> None:
        self._number, self._session = event.number, event.session
        if event.number > 1:
            self._begin_targets(event.targets, event.at)

    def leave(self, recording: Recording) -> None:
        """The update is over; what it did is in the recording."""
        self._otel.detach(self._token)
        self._recording = recording

    def end(self, event: UpdateEnded) -> None:
        otel, root, report = self._otel, self._root, event.report
        rows = report.targets if report is not None else ()
        failed = {row.url: row.message or row.status for row in rows if row.status != "serving"}
        messages = [asked for asked in self._recording.asked if asked.ended <= event.at]
        until = event.at
        for began, spans in reversed(self._attempts):
            asked = [asked for asked in messages if began <= asked.began < until]
            self._end_targets(spans, asked, failed, until)
            failed, until = {}, began
        if root.is_recording():
            steps = _Worked()
            for step in self._recording.steps:
                steps.add(step.phase, step.began, step.ended)
            otel.make_spans(steps, self._inside, self._clock)
            values: dict[str, Any] = {
                "version": event.version,
                "transport": event.transport,
                "targets": self._num_targets,
                "outcome": event.outcome,
                "attempts": self._number,
                "session": self._session,
            }
            if report is not None:
                values |= {"bytes": report.bytes, "buckets": report.buckets}
            root.set_attributes(_named(values))
            if event.outcome == "failed":
                otel.fail(root, f"{event.error_kind}: {event.error}")
        root.end(self._clock.ns(event.at))

    def _begin_targets(self, urls: Sequence[str], began: float) -> None:
        start, at = self._otel.start, self._clock.ns(began)
        self._attempts.append((began, {url: start("target", at, self._inside, kind="CLIENT") for url in urls}))

    def _end_targets(
        self, spans: Mapping[str, Any], asked: Sequence[Asked], failed: Mapping[str, str], until: float
    ) -> None:
        by_target: dict[str, list[Asked]] = {url: [] for url in spans}
        for message in asked:
            by_target.setdefault(message.target, []).append(message)
        for url, span in spans.items():
            messages = by_target[url]
            if span.is_recording():
                span.set_attributes(_named({"target": url}))
                worked = _Worked()
                for message in messages:
                    name = "buckets" if message.message == "bucket" else message.message
                    worked.add(name, message.began, message.ended)
                self._otel.add_events(worked, span, self._clock)
                error = failed.get(url) or next((message.error for message in messages if not message.ok), "")
                if error:
                    self._otel.fail(span, error)
            span.end(self._clock.ns(messages[-1].ended if messages else until))


class EngineSpans(ByKind):
    """Makes the spans of an engine's server and its ranks."""

    def __init__(self) -> None:
        super().__init__({}, later={SessionOpened: self._begin, Answered: self._answer, SessionEnded: self._end})
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
        opened, otel = self._opened, self._otel or _Otel.here()
        self._otel = otel
        if opened is None or event.session != opened.session:
            return
        answered, self._answered = self._answered, []
        reverts = event.outcome == "reverted"
        answered = [answer for answer in answered if not reverts or answer.message == "revert"]
        if otel is None or not answered:
            return
        clock, parent = _Clock(opened), otel.parent(opened.traceparent)
        values: dict[str, Any] = {"version": event.version, "session": event.session, "outcome": event.outcome}
        name = "revert" if reverts else "session"
        span = otel.start(name, clock.ns(answered[0].began), parent, values, kind="SERVER")
        if span.is_recording():
            by_rank: dict[int | None, _Worked] = {}
            for answer in answered:
                for step in answer.steps:
                    by_rank.setdefault(step.rank, _Worked()).add(step.phase, step.began, step.ended)
            inside = otel.inside(span)
            for rank, worked in by_rank.items():
                otel.make_spans(worked, inside, clock, _NOTHING if rank is None else {"rank": rank})
            size_bytes = sum(answer.bytes for answer in answered)
            span.set_attributes(_named({"bytes": size_bytes, "stall_s": event.stall_s}))
            if event.outcome != "committed":
                otel.fail(span, event.reason)
        span.end(clock.ns(event.at))


class _Worked:
    """First beginning, last end, seconds and number of the pieces of work of each name."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[float, float, float, int]] = {}

    def add(self, name: str, began: float, ended: float) -> None:
        first, last, seconds, count = self.rows.get(name, (began, ended, 0.0, 0))
        self.rows[name] = min(first, began), max(last, ended), seconds + ended - began, count + 1


class _Clock:
    """The time that OpenTelemetry wants for a monotonic time."""

    def __init__(self, began: UpdateStarted | SessionOpened) -> None:
        self._offset_ns = round((began.time_s - began.at) * 1e9)

    def ns(self, at: float) -> int:
        return round(at * 1e9) + self._offset_ns


class _Otel:
    """OpenTelemetry's API as this process has it.  A parent is a context of the API; None is the caller's."""

    def __init__(self, trace: Any) -> None:
        from opentelemetry import context  # the process has imported it already

        self._trace = trace
        self._tracer = trace.get_tracer("weightcast", __version__)
        self.attach, self.detach = context.attach, context.detach
        self.inside = trace.set_span_in_context

    @classmethod
    def here(cls) -> _Otel | None:
        """Returns the API, or None if this process has not imported it."""
        trace = sys.modules.get("opentelemetry.trace")
        return None if trace is None else cls(trace)

    def start(
        self,
        name: str,
        start_ns: int,
        parent: Any = None,
        values: Mapping[str, Any] = _NOTHING,
        *,
        kind: str = "INTERNAL",
    ) -> Any:
        return self._tracer.start_span(
            f"weightcast.{name}",
            context=parent,
            kind=getattr(self._trace.SpanKind, kind),
            attributes=_named(values) if values else None,
            start_time=start_ns,
        )

    def make_spans(self, pieces: _Worked, parent: Any, clock: _Clock, values: Mapping[str, Any] = _NOTHING) -> None:
        """Makes one span for each name, from the first beginning to the last end."""
        for name, (began, ended, seconds, count) in pieces.rows.items():
            worked = {"seconds": seconds, "count": count} if count > 1 else {}
            self.start(name, clock.ns(began), parent, {**worked, **values}).end(clock.ns(ended))

    def add_events(self, pieces: _Worked, span: Any, clock: _Clock) -> None:
        """Adds one event for each name, at its last end; it costs a tenth of a span."""
        for name, (_, ended, seconds, count) in pieces.rows.items():
            span.add_event(f"weightcast.{name}", _named({"seconds": seconds, "count": count}), clock.ns(ended))

    def fail(self, span: Any, words: str) -> None:
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, words))

    def parent(self, traceparent: str) -> Any:
        """The span that a W3C traceparent names; one without a trace if it is empty, so that a new trace begins."""
        found = self._trace.INVALID_SPAN
        if traceparent:
            _, trace_id, span_id, flags = traceparent.split("-")
            context = self._trace.SpanContext(
                int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=self._trace.TraceFlags(int(flags, 16))
            )
            found = self._trace.NonRecordingSpan(context)
        return self.inside(found)


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"weightcast.{key}": value for key, value in values.items()}
