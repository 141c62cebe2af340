"""``Events``, which records what happens in an update of this trainer rank, and hands it to those that watch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from weightcast.watch import later
from weightcast.watch.events import (
    Asked,
    AttemptStarted,
    Event,
    Step,
    StepEnded,
    TargetsChanged,
    UpdateEnded,
    UpdateStarted,
)
from weightcast.watch.logs import NO_FIELDS, UpdateLog
from weightcast.watch.recording import Recording
from weightcast.watch.spans import TrainerSpans

log = logging.getLogger("weightcast.watch")

Listener = Callable[[Event], object]


@runtime_checkable
class Attached(Protocol):
    """A listener that is told where it listens, before the first event and after the last."""

    def attach(self, events: Events) -> None:
        """Called once in each process.  An error ends ``connect``."""
        ...

    def detach(self) -> None:
        """Called when the updater closes; safe to call twice."""
        ...


class GuardedCalls:
    """Calls functions of others.  An error of theirs is logged, the first one of each with its traceback."""

    def __init__(self) -> None:
        self._failed: set[int] = set()

    def call(self, owner: object, at: str, function: Callable[..., object], *values: object) -> None:
        """Calls a function of ``owner``; ``at`` names the moment in the log line."""
        try:
            function(*values)
        except Exception as error:  # a caller's function; the update must not depend on it
            first = id(owner) not in self._failed
            self._failed.add(id(owner))
            words = f"{type(error).__name__}: {error}"
            log.error("%r failed at %s: %s", owner, at, words, exc_info=first, extra=NO_FIELDS)


class Events:
    """Records the events of this trainer rank, and hands each to the listeners, one at a time.  Thread-safe.

    A listener runs on the thread of the update, so it must return soon.  An error of a listener is logged and ends
    neither the update nor the other listeners.  The log lines and the spans of the head are made from the recording.

    Attributes:
        rank: The trainer rank of this process.
        recording: The present update, or the last one.
    """

    def __init__(self, listeners: Iterable[Listener] = (), *, rank: int = 0) -> None:
        """Attaches the listeners that want it; errors are those of ``Attached.attach``.

        These hear each event before the others, which may read the metrics that they keep.
        """
        self.rank = rank
        self.recording = Recording()
        self._log, self._spans = UpdateLog(), TrainerSpans()
        self._own: Mapping[type[Any], Callable[[Any], None]] = {
            UpdateStarted: self._started,
            AttemptStarted: self._attempt,
            StepEnded: lambda event: self.recording.add_step(event.step),
            Asked: self._asked,
            TargetsChanged: lambda event: self._log.targets(self.recording, event),
            UpdateEnded: self._ended,
        }
        self._listeners = tuple(sorted(listeners, key=lambda one: not isinstance(one, Attached)))
        self._guard = GuardedCalls()
        self._lock = threading.RLock()
        attached: list[Attached] = []
        try:
            for listener in self._listeners:
                if isinstance(listener, Attached):
                    listener.attach(self)
                    attached.append(listener)
        except BaseException:
            for listener in attached:
                listener.detach()
            raise

    def emit(self, event: Event) -> None:
        """Records an event, and hands it to every listener."""
        kind = type(event)
        with self._lock:
            self._guard.call(self, kind.__name__, self._own[kind], event)
            for listener in self._listeners:
                self._guard.call(listener, kind.__name__, listener, event)

    def step_ended(
        self, phase: str, began: float, ended: float, *, bucket: int | None = None, so_far: tuple[int, int] = (0, 0)
    ) -> None:
        """Emits ``StepEnded`` for a step of this trainer rank; ``so_far`` has its bytes sent, and those in all."""
        step = Step(phase, self.rank, began, ended, bucket)
        self.emit(StepEnded(step=step, sent_bytes=so_far[0], total_bytes=so_far[1]))

    def traceparent(self, target: str) -> str:
        """The span that a target's session is to continue; empty if nothing traces."""
        return self._spans.traceparent(target)

    def close(self) -> None:
        """Detaches the listeners; safe to call twice."""
        later.settle()
        for listener in self._listeners:
            if isinstance(listener, Attached):
                listener.detach()

    def _started(self, event: UpdateStarted) -> None:
        self.recording = Recording(event.version, event.targets, event.rank, event.at, event.time_s)
        if self.rank == 0:
            self._log.began(self.recording, event)
            self._spans.begin(self.recording)

    def _attempt(self, event: AttemptStarted) -> None:
        self.recording.attempts.append(event)
        self._spans.attempt(event)

    def _asked(self, event: Asked) -> None:
        self.recording.add_message(event)
        self._log.asked(self.recording, event)

    def _ended(self, event: UpdateEnded) -> None:
        if self.rank == 0:
            self._guard.call(self._spans, "UpdateEnded", self._spans.end, event)  # it calls the SDK
            self._log.ended(self.recording, event)
