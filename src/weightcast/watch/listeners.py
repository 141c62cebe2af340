"""``Events``, which hands the events of this process to listeners, and the forms that a listener may have."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from weightcast.watch.events import Event, Step, StepEnded

log = logging.getLogger("weightcast.watch")

Listener = Callable[[Event], None]
# The fields of the log lines of updates; a formatter of the caller's may ask for them in every line.
NO_FIELDS: Mapping[str, object] = {"session": None, "version": None, "target": None}


class ByKind:
    """Base of listeners that hear only some kinds of events.

    A bucket has several events, so what a listener passes over must cost next to nothing.
    """

    def __init__(self, handlers: Mapping[type[Any], Callable[[Any], None]]) -> None:
        """Takes the function for each kind."""
        self._handlers = dict(handlers)

    def handler(self, kind: type[Any]) -> Callable[[Any], None] | None:
        """The function for events of a kind; None if they are passed over."""
        return self._handlers.get(kind)

    def __call__(self, event: Event) -> None:
        """As ``Listener``."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)


@runtime_checkable
class Attached(Protocol):
    """A listener that is told where it listens, before the first event and after the last."""

    def attach(self, rank: int) -> None:
        """Called once in each process.  An error ends ``connect``.

        Args:
            rank: Trainer rank of this process; 0 in an engine's server.
        """
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

    A listener runs on the thread of the update, so it must return soon.  An error of a listener is logged and ends
    neither the update nor the other listeners.
    """

    def __init__(self, listeners: Iterable[Listener] = (), *, rank: int = 0) -> None:
        """Attaches the listeners that want it.

        Args:
            listeners: Called with every event, in this order.
            rank: Trainer rank of this process; 0 in an engine's server.

        Raises:
            WeightcastError: As ``Attached.attach``.
        """
        self.rank = rank
        self._listeners = tuple(listeners)
        self._tracing = tuple(one for one in self._listeners if isinstance(one, Tracing))  # asked for each target
        self._hearing: dict[type[Any], tuple[tuple[Callable[[Any], None], Listener], ...]] = {}
        self._lock = threading.RLock()
        self._failed: set[int] = set()
        attached: list[Attached] = []
        try:
            for listener in self._listeners:
                if isinstance(listener, Attached):
                    listener.attach(rank)
                    attached.append(listener)
        except BaseException:
            for listener in attached:
                listener.detach()
            raise

    def emit(self, event: Event) -> None:
        """Hands an event to every listener."""
        with self._lock:
            hearing = self._hearing.get(type(event))
            for call, listener in self._that_hear(type(event)) if hearing is None else hearing:
                try:
                    call(event)
                except Exception as error:  # a caller's function; the update must not depend on it
                    first = id(listener) not in self._failed
                    self._failed.add(id(listener))
                    words = f"{type(error).__name__}: {error}"
                    name = type(event).__name__
                    log.error("%r failed at %s: %s", listener, name, words, exc_info=first, extra=NO_FIELDS)

    def _that_hear(self, kind: type[Any]) -> tuple[tuple[Callable[[Any], None], Listener], ...]:
        """The functions for a kind of events, with their listeners; buckets have many, so each is asked once."""
        calls = ((one.handler(kind) if isinstance(one, ByKind) else one, one) for one in self._listeners)
        found = self._hearing[kind] = tuple((call, one) for call, one in calls if call is not None)
        return found

    @contextmanager
    def step(self, phase: str, *, bucket: int | None = None) -> Generator[None]:
        """Emits ``StepEnded`` for the body of a ``with`` statement, also if it raises."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.step_ended(phase, began, time.monotonic(), bucket=bucket)

    def step_ended(self, phase: str, began: float, ended: float, *, bucket: int | None = None) -> None:
        """Emits ``StepEnded`` for a step of this trainer rank."""
        if self._listeners:
            self.emit(StepEnded(step=Step(phase, self.rank, began, ended, bucket)))

    def traceparent(self, target: str) -> str:
        """The span that a target's session is to continue; empty if nothing traces."""
        found = (listener.traceparent(target) for listener in self._tracing)
        return next(filter(None, found), "")

    def close(self) -> None:
        """Detaches the listeners; safe to call twice."""
        for listener in self._listeners:
            if isinstance(listener, Attached):
                listener.detach()
