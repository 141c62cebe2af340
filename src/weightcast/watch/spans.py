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
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from weightcast.version import __version__
from weightcast.watch.events import Asked, AttemptStarted, UpdateEnded
from weightcast.watch.later import put_off
from weightcast.watch.recording import Recording
from weightcast.watch.sessions import SessionRecord, SessionWatcher, Work, add_work, work_of

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class TrainerSpans:
    """Makes the spans of the head."""

    def __init__(self) -> None:
        self._otel: _Otel | None = None
        self._open: _OpenSpans | None = None

    def traceparent(self, target: str) -> str:
        """The span of this target's part of the update, for ``Open.traceparent``; empty if nothing traces."""
        return "" if self._open is None else self._open.traceparent(target)

    def begin(self, update: Recording) -> None:
        """An update begins."""
        otel = self._otel = self._otel or _Otel.here()
        if otel is None:
            return
        clock = _Clock(update.began, update.began_unix_s)
        root = otel.start("update", clock.ns(update.began))
        if root.get_span_context().is_valid:  # else there is neither an SDK nor a span of the caller's to continue
            self._open = _OpenSpans(otel, clock, root, update)

    def attempt(self, event: AttemptStarted) -> None:
        """An attempt begins; the spans of the first one's targets begin with the update."""
        if self._open is not None and event.number > 1:
            self._open.begin_targets(event.targets, event.at)

    def end(self, event: UpdateEnded) -> None:
        """The update is over; its spans are made later."""
        found, self._open = self._open, None
        if found is not None:
            found.detach()
            put_off(partial(found.end, event))


class _OpenSpans:
    """The spans that begin with an update of the head: its own, and those that engines continue."""

    def __init__(self, otel: _Otel, clock: _Clock, root: Any, update: Recording) -> None:
        self._otel = otel
        self._clock = clock
        self._root = root
        self._inside = otel.inside(root)
        token = otel.attach(self._inside)  # spans and logs of the caller's own code in the update belong to it
        self.detach = partial(otel.detach, token)
        self._recording = update
        self._attempts: list[tuple[float, dict[str, Any]]] = []
        self.begin_targets(update.targets, update.began)

    def traceparent(self, target: str) -> str:
        """The span of a target, in the form of W3C Trace Context."""
        _, spans = self._attempts[-1]
        context = spans.get(target, self._root).get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def begin_targets(self, urls: Sequence[str], began: float) -> None:
        start, at = self._otel.start, self._clock.ns(began)
        self._attempts.append((began, {url: start("target", at, self._inside, kind="CLIENT") for url in urls}))

    def end(self, event: UpdateEnded) -> None:
        otel, root, report, update = self._otel, self._root, event.report, self._recording
        rows = report.targets if report is not None else ()
        failed = {row.url: row.message or row.status for row in rows if row.status != "serving"}
        messages = [asked for asked in update.asked if asked.ended <= event.at]
        until = event.at
        for began, spans in reversed(self._attempts):
            asked = [asked for asked in messages if began <= asked.began < until]
            self._end_targets(spans, asked, failed, until)
            failed, until = {}, began
        if root.is_recording():
            work: dict[str, Work] = {}
            for step in update.steps:
                add_work(work, step.phase, step.began, step.ended)
            for name, row in work.items():
                otel.make_span(name, row, self._inside, self._clock)
            last = update.attempts[-1] if update.attempts else None
            values: dict[str, Any] = {
                "version": event.version,
                "transport": event.transport,
                "targets": len(update.targets),
                "outcome": event.outcome,
                "attempts": 0 if last is None else last.number,
                "session": "" if last is None else last.session,
            }
            if report is not None:
                values |= {"bytes": report.bytes, "buckets": report.buckets}
            root.set_attributes(_named(values))
            if event.outcome == "failed":
                otel.fail(root, f"{event.error_kind}: {event.error}")
        root.end(self._clock.ns(event.at))

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
                work: dict[str, Work] = {}
                for message in messages:
                    name = "buckets" if message.message == "bucket" else message.message
                    add_work(work, name, message.began, message.ended)
                for name, (_, ended, seconds, count) in work.items():  # an event costs a tenth of a span
                    told = _named({"seconds": seconds, "count": count})
                    span.add_event(f"weightcast.{name}", told, self._clock.ns(ended))
                error = failed.get(url) or next((message.error for message in messages if not message.ok), "")
                if error:
                    self._otel.fail(span, error)
            span.end(self._clock.ns(messages[-1].ended if messages else until))


class EngineSpans(SessionWatcher):
    """Makes the spans of an engine's server and its ranks."""

    def __init__(self) -> None:
        self._otel: _Otel | None = None

    def ended(self, session: SessionRecord) -> None:
        """As ``SessionWatcher.ended``."""
        otel = self._otel = self._otel or _Otel.here()
        if otel is not None:
            # A revert may change the record before its spans are made.
            put_off(partial(_end_session, otel, replace(session, work=dict(session.work))))


def _end_session(otel: _Otel, session: SessionRecord) -> None:
    assert session.ended is not None
    clock, parent = _Clock(session.began, session.began_unix_s), otel.parent(session.traceparent)
    name, began, work = "session", session.began, session.work
    if session.outcome == "reverted" and session.last is not None:
        name, began, work = "revert", session.last.began, work_of(session.last)
    values = {"version": session.version, "session": session.session, "outcome": session.outcome}
    span = otel.start(name, clock.ns(began), parent, values, kind="SERVER")
    if span.is_recording():
        inside = otel.inside(span)
        for (rank, phase), row in work.items():
            otel.make_span(phase, row, inside, clock, _NOTHING if rank is None else {"rank": rank})
        size_bytes = 0 if name == "revert" else session.bytes
        span.set_attributes(_named({"bytes": size_bytes, "stall_s": session.stall_s}))
        if session.outcome != "committed":
            otel.fail(span, session.reason)
    span.end(clock.ns(session.ended))


class _Clock:
    """The time that OpenTelemetry wants for a monotonic time."""

    def __init__(self, at: float, unix_s: float) -> None:
        self._offset_ns = round((unix_s - at) * 1e9)

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

    def make_span(
        self, name: str, work: Work, parent: Any, clock: _Clock, values: Mapping[str, Any] = _NOTHING
    ) -> None:
        """Makes the span of a phase, from its first beginning to its last end."""
        began, ended, seconds, count = work
        worked = {"seconds": seconds, "count": count} if count > 1 else {}
        self.start(name, clock.ns(began), parent, {**worked, **values}).end(clock.ns(ended))

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
