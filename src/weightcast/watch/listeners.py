"""``Events``, which hands the events of this process to listeners, and the forms that a listener may have."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from weightcast.watch.events import Event, SessionEnded, Step, StepEnded, TargetsChanged, UpdateEnded
from weightcast.watch.later import Later

log = logging.getLogger("weightcast.watch")

Listener = Callable[[Event], None]
# The fields of the log lines of updates; a formatter of the caller's may ask for them in every line.
NO_FIELDS: Mapping[str, object] = {"session": None, "version": None, "target": None}
_LAST = (SessionEnded, TargetsChanged, UpdateEnded)  # then what was put off is due
_Call = tuple[Callable[[Any], None], object]  # a function for events, and its owner


class ByKind:
    """Base of listeners that hear only some kinds of events, some of them later.

    A bucket has several events, so what a listener passes over must cost next to nothing.
    """

    def __init__(
        self,
        handlers: Mapping[type[Any], Callable[[Any], None]],
        *,
        later: Mapping[type[Any], Callable[[Any], None]] = MappingProxyType({}),
    ) -> None:
        """Takes the function for each kind; those in ``later`` are called after the update, in order of the events."""
        self._handlers = dict(handlers)
        self._later = dict(later)
        self._settle: Callable[[], None] = lambda: None

    def attach(self, events: Events) -> None:
        """As ``Attached.attach``."""
        self._settle = events.settle

    def detach(self) -> None:
        """As ``Attached.detach``."""
        self._settle = lambda: None

    def handler(self, kind: type[Any]) -> Callable[[Any], None] | None:
        """The function for events of a kind; None if they are passed over."""
        return self._handlers.get(kind)

    def later(self, kind: type[Any]) -> Callable[[Any], None] | None:
        """The function for events of a kind that may be called later; None if there is none."""
        return self._later.get(kind)

    def __call__(self, event: Event) -> None:
        """As ``Listener``; puts nothing off."""
        for handler in (self.handler(type(event)), self.later(type(event))):
            if handler is not None:
                handler(event)


@runtime_checkable
class Attached(Protocol):
    """A listener that is told where it listens, before the first event and after the last."""

    def attach(self, events: Events) -> None:
        """Called once in each process.  An error ends ``connect``."""
        ...

    def detach(self) -> None:
        """Called when the updater closes; safe to call twice."""
        ...


@runtime_checkable
class Tracing(Protocol):
    """A listener whose spans continue in the engines."""

    def traceparent(self, target: str) -> str:
        """The span of this target's part of the update, for ``Open.traceparent``; empty without one."""
        ...


class Events:
    """Hands events to listeners, one event at a time.  Thread-safe.

    A listener runs on the thread of the update, so it must return soon.  What a ``ByKind`` does later waits for
    ``settle``; a thread calls it soon after the update.  An error of a listener is logged and ends neither the update
    nor the other listeners.
    """

    def __init__(self, listeners: Iterable[Listener] = (), *, rank: int = 0) -> None:
        """Attaches the listeners that want it; errors are those of ``Attached.attach``.

        Every event comes to the listeners in this order, but to each ``ByKind`` before the others.  ``rank`` is the
        trainer rank of this process, and 0 in an engine's server.
        """
        self.rank = rank
        self._listeners = tuple(listeners)
        self._tracing = tuple(one for one in self._listeners if isinstance(one, Tracing))  # asked for each target
        self._hearing: dict[type[Any], tuple[_Call, ...]] = {}
        self._hearing_later: dict[type[Any], tuple[_Call, ...]] = {}
        self._later = Later(lambda event: self._hand(event, self._hearing_later[type(event)]))
        self._lock = threading.RLock()
        self._failed: set[int] = set()
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
        """Hands an event to every listener."""
        with self._lock:
            hearing = self._hearing.get(type(event))
            self._hand(event, self._that_hear(type(event)) if hearing is None else hearing)

    def settle(self) -> None:
        """Does what listeners have put off, on the caller's thread."""
        self._later.settle()

    def _hand(self, event: Event, hearing: Iterable[_Call]) -> None:
        for call, listener in hearing:
            try:
                call(event)
            except Exception as error:  # a caller's function; the update must not depend on it
                first = id(listener) not in self._failed
                self._failed.add(id(listener))
                words = f"{type(error).__name__}: {error}"
                name = type(event).__name__
                log.error("%r failed at %s: %s", listener, name, words, exc_info=first, extra=NO_FIELDS)

    def _that_hear(self, kind: type[Any]) -> tuple[_Call, ...]:
        """The functions for a kind of events, with their listeners; buckets have many, so each is asked once."""
        by_kind = [one for one in self._listeners if isinstance(one, ByKind)]
        calls: list[_Call] = [(call, one) for one in by_kind if (call := one.handler(kind)) is not None]
        later: list[_Call] = [(call, one) for one in by_kind if (call := one.later(kind)) is not None]
        if later:
            self._hearing_later[kind] = tuple(later)
            calls.append((self._later.keep, self))
        if kind in _LAST:
            calls.append((self._later.due, self))
        # A function of the caller's comes last: it may read metrics.
        calls += [(one, one) for one in self._listeners if not isinstance(one, ByKind)]
        found = self._hearing[kind] = tuple(calls)
        return found

    @contextmanager
    def step(self, phase: str, *, bucket: int | None = None) -> Generator[None]:
        """Emits ``StepEnded`` for the body of a ``with`` statement, also if it raises."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.step_ended(phase, began, time.monotonic(), bucket=bucket)

    def step_ended(
        self, phase: str, began: float, ended: float, *, bucket: int | None = None, so_far: tuple[int, int] = (0, 0)
    ) -> None:
        """Emits ``StepEnded`` for a step of this trainer rank; ``so_far`` has its bytes sent, and those in all."""
        if self._listeners:
            step = Step(phase, self.rank, began, ended, bucket)
            self.emit(StepEnded(step=step, sent_bytes=so_far[0], total_bytes=so_far[1]))

    def traceparent(self, target: str) -> str:
        """The span that a target's session is to continue; empty if nothing traces."""
        found = (listener.traceparent(target) for listener in self._tracing)
        return next(filter(None, found), "")

    def close(self) -> None:
        """Detaches the listeners; safe to call twice."""
        self.settle()
        for listener in self._listeners:
            if isinstance(listener, Attached):
                listener.detach()
