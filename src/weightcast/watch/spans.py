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
of its parts.  A thread of their own makes and ends them a moment later, so that no update waits for the SDK.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
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
from weightcast.watch.listeners import ByKind

log = logging.getLogger("weightcast.watch")

_SETTLE_S = 10.0
_REST_S = 0.02  # the last answer of an update leaves first: making spans holds the interpreter for a millisecond
_Piece = tuple[str, float, float]  # name, beginning, end
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class _Later:
    """Calls functions one after the other on a thread of its own, which Python waits for at its end."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._hurry = threading.Event()

    def __call__(self, do: Callable[[], None]) -> None:
        """Calls a function after a short rest; an error is logged."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="weightcast-spans")
        self._pool.submit(self._do, do, time.monotonic() + _REST_S)

    def _do(self, do: Callable[[], None], due: float) -> None:
        self._hurry.wait(max(0.0, due - time.monotonic()))
        _logged(do)

    def settle(self) -> None:
        """Waits until everything so far is done, or for ten seconds."""
        if self._pool is not None:
            self._hurry.set()
            wait([self._pool.submit(int)], _SETTLE_S)
            self._hurry.clear()


def _logged(do: Callable[[], None]) -> None:
    try:
        do()
    except Exception as error:  # an exporter is the caller's; no update depends on it
        log.error("spans were not made: %s: %s", type(error).__name__, error, exc_info=True)


class _Deferred(ByKind):
    """A listener that makes its spans later."""

    def __init__(self, handlers: Mapping[type[Any], Callable[[Any], None]]) -> None:
        super().__init__(handlers)
        self._later = _Later()

    def attach(self, rank: int) -> None:
        """As ``Attached.attach``; does nothing."""

    def detach(self) -> None:
        """Waits for the spans of updates that are over."""
        self.settle()

    def settle(self) -> None:
        """Waits until the spans of every update that is over are made."""
        self._later.settle()


class TrainerSpans(_Deferred):
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
        self._root: Any = None
        self._current: Any = None
        self._attempts, self._session = 0, ""
        self._targets: dict[str, Any] = {}
        self._steps: list[_Piece] = []
        self._asked: dict[str, list[Asked]] = {}

    def traceparent(self, target: str) -> str:
        """As ``Tracing.traceparent``."""
        span = self._targets.get(target, self._root)
        return "" if span is None else _traceparent(span)

    def _step(self, event: StepEnded) -> None:
        if self._root is not None:
            self._steps.append((event.step.phase, event.step.began, event.step.ended))

    def _was_asked(self, event: Asked) -> None:
        if self._root is not None:
            self._asked.setdefault(event.target, []).append(event)

    def _begin(self, event: UpdateStarted) -> None:
        if event.rank:
            return
        otel = self._otel = _Otel.here(event.time_s - event.at, self._otel)
        self._root = self._current = None
        self._attempts, self._session = 0, ""
        if otel is None:
            return
        values = {"version": event.version, "transport": event.transport, "targets": len(event.targets)}
        root = otel.start("update", event.at, values)
        if not root.get_span_context().is_valid:  # no SDK, and no span of the caller's to continue
            return
        self._root = root
        self._current = otel.make_current(root)  # spans and logs of the caller's own code in the update belong to it
        self._steps.clear()
        self._asked.clear()
        self._begin_targets(event.targets, event.at)

    def _begin_targets(self, urls: Sequence[str], began: float) -> None:
        otel = self._otel
        assert otel is not None
        for url in urls:
            self._targets[url] = otel.start("target", began, {"target": url}, parent=self._root, kind="CLIENT")

    def _attempt(self, event: AttemptStarted) -> None:
        if self._root is None:
            return
        self._attempts, self._session = event.number, event.session
        if event.number > 1:
            self._later(self._end_of_targets({}))
            self._begin_targets(event.targets, event.at)

    def _end(self, event: UpdateEnded) -> None:
        otel, root = self._otel, self._root
        if otel is None or root is None:
            return
        self._root = None
        otel.make_old(self._current)
        rows = event.report.targets if event.report is not None else ()
        failed = {row.url: row.message or row.status for row in rows if row.status != "serving"}
        end_targets = self._end_of_targets(failed)
        steps, self._steps = self._steps, []
        values: dict[str, Any] = {"outcome": event.outcome, "attempts": self._attempts, "session": self._session}
        if event.report is not None:
            values |= {"bytes": event.report.bytes, "buckets": event.report.buckets}
        offset_ns = otel.offset_ns

        def make() -> None:
            end_targets()
            if root.is_recording():
                otel.make_spans(steps, root, offset_ns)
                root.set_attributes(_named(values))
                if event.outcome == "failed":
                    otel.fail(root, f"{event.error_kind}: {event.error}")
            root.end(_ns_of(event.at, offset_ns))

        self._later(make)

    def _end_of_targets(self, failed: Mapping[str, str]) -> Callable[[], None]:
        """Returns the function that ends the spans of the targets, with the words of those that failed."""
        otel = self._otel
        assert otel is not None
        targets, self._targets = self._targets, {}
        messages, self._asked = self._asked, {}
        offset_ns = otel.offset_ns

        def end() -> None:
            for url, span in targets.items():
                asked = messages.get(url, [])
                if span.is_recording():
                    named = (("buckets" if one.message == "bucket" else one.message, one) for one in asked)
                    otel.add_events(((name, one.began, one.ended) for name, one in named), span, offset_ns)
                    error = failed.get(url) or next((one.error for one in asked if not one.ok), "")
                    if error:
                        otel.fail(span, error)
                span.end(_ns_of(asked[-1].ended, offset_ns) if asked else None)

        return end


class EngineSpans(_Deferred):
    """Makes the spans of an engine's server and its ranks."""

    def __init__(self) -> None:
        super().__init__({SessionOpened: self._begin, Answered: self._answer, SessionEnded: self._end})
        self._otel: _Otel | None = None
        self._opened: SessionOpened | None = None
        self._answered: list[Answered] = []

    def _begin(self, event: SessionOpened) -> None:
        self._opened = event
        self._answered.clear()

    def _answer(self, event: Answered) -> None:
        if self._opened is not None and event.session == self._opened.session:
            self._answered.append(event)

    def _end(self, event: SessionEnded) -> None:
        opened = self._opened
        if opened is not None and event.session == opened.session:
            answered, self._answered = self._answered, []
            self._later(lambda: self._make(opened, event, answered))

    def _make(self, opened: SessionOpened, event: SessionEnded, answered: Sequence[Answered]) -> None:
        otel = self._otel = _Otel.here(opened.time_s - opened.at, self._otel)
        reverts = event.outcome == "reverted"
        answered = [answer for answer in answered if not reverts or answer.message == "revert"]
        if otel is None or not answered:
            return
        values: dict[str, Any] = {"version": event.version, "session": event.session, "outcome": event.outcome}
        name = "revert" if reverts else "session"
        span = otel.start(name, answered[0].began, values, parent=otel.parent(opened.traceparent), kind="SERVER")
        if span.is_recording():
            by_rank: dict[int | None, list[_Piece]] = {}
            for answer in answered:
                for step in answer.steps:
                    by_rank.setdefault(step.rank, []).append((step.phase, step.began, step.ended))
            for rank, pieces in by_rank.items():
                otel.make_spans(pieces, span, otel.offset_ns, _NOTHING if rank is None else {"rank": rank})
            size_bytes = sum(answer.bytes for answer in answered)
            span.set_attributes(_named({"bytes": size_bytes, "stall_s": event.stall_s}))
            if event.outcome != "committed":
                otel.fail(span, event.reason)
        span.end(_ns_of(event.at, otel.offset_ns))


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
        values: Mapping[str, Any],
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
            attributes=_named(values),
            start_time=_ns_of(began, self.offset_ns if offset_ns is None else offset_ns),
        )

    def make_spans(
        self, pieces: Iterable[_Piece], parent: Any, offset_ns: int, values: Mapping[str, Any] = _NOTHING
    ) -> None:
        """Makes one span for each name, from the first beginning to the last end."""
        for name, (began, ended, seconds, count) in _by_name(pieces).items():
            worked = {"seconds": seconds, "count": count} if count > 1 else {}
            span = self.start(name, began, {**worked, **values}, parent=parent, offset_ns=offset_ns)
            span.end(_ns_of(ended, offset_ns))

    def add_events(self, pieces: Iterable[_Piece], span: Any, offset_ns: int) -> None:
        """Adds one event for each name, at its last end; it costs a tenth of a span."""
        for name, (_, ended, seconds, count) in _by_name(pieces).items():
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


def _by_name(pieces: Iterable[_Piece]) -> dict[str, tuple[float, float, float, int]]:
    """First beginning, last end, seconds and number of the pieces of each name."""
    found: dict[str, tuple[float, float, float, int]] = {}
    for name, began, ended in pieces:
        first, last, seconds, count = found.get(name, (began, ended, 0.0, 0))
        found[name] = min(first, began), max(last, ended), seconds + ended - began, count + 1
    return found


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"weightcast.{key}": value for key, value in values.items()}


def _traceparent(span: Any) -> str:
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
