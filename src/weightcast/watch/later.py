"""Puts the work of listeners off until an update is over, so that the update does not wait for it.

During an update a listener only keeps what it heard.  The work is done by whoever comes first:

- somebody who reads the result (a scrape of metrics), or who closes the updater: ``Later.settle`` on their thread,
- a thread of this process that looks a moment after the update is over,
- the end of the process.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from weightcast.watch.listeners import NO_FIELDS, ByKind

log = logging.getLogger("weightcast.watch")

MAX_KEPT = 20_000  # of one listener; then the update waits while its events are counted, and none is lost
# The proof of residence and the answer come first: making spans holds the interpreter for a millisecond.
_REST_S = 0.1


class Later:
    """The work that one listener has put off, in order.  Thread-safe."""

    def __init__(self, owner: object) -> None:
        """Nothing is put off yet.

        Args:
            owner: The listener, which the log line of an error names.
        """
        self._owner = repr(owner)
        self._work: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._doing = threading.RLock()
        self._is_due = False
        _KNOWN.add(self)

    def keep(self, do: Callable[[Any], None], value: Any) -> None:
        """Puts off the call of a function with one value."""
        self._work.append((do, value))
        if len(self._work) >= MAX_KEPT:
            self.settle()

    def due(self) -> None:
        """Has the thread do the work soon; the update is over."""
        if not self._is_due:
            self._is_due = True
            _THREAD.look_at(self)

    def settle(self) -> None:
        """Does all work now, on the caller's thread; waits for a thread that does it already."""
        with self._doing:
            self._is_due = False
            while self._work:
                finish(self._owner, *self._work.popleft())

    def forget(self) -> None:
        """Drops all work, in a forked child: the parent does it."""
        self._work.clear()
        self._doing = threading.RLock()
        self._is_due = False


def finish(owner: str, do: Callable[[Any], None], value: Any) -> None:
    """Does one piece of work; an error is logged under the owner's name."""
    try:
        do(value)
    except Exception as error:  # exporters are the caller's; no update depends on them
        words = f"{type(error).__name__}: {error}"
        log.error("%s failed at %s: %s", owner, type(value).__name__, words, exc_info=True, extra=NO_FIELDS)


class Deferred(ByKind):
    """Base of listeners with work for later."""

    def __init__(self, handlers: Mapping[type[Any], Callable[[Any], None]]) -> None:
        super().__init__(handlers)
        self.later = Later(self)

    def attach(self, rank: int) -> None:
        """As ``Attached.attach``; does nothing."""

    def detach(self) -> None:
        """Does what was put off."""
        self.settle()

    def settle(self) -> None:
        """Does what was put off, on the caller's thread."""
        self.later.settle()


class _Thread:
    """Does the work that is due, on a daemon thread that starts with the first of it."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begins anew: a forked child has no thread."""
        self._queue: queue.SimpleQueue[tuple[weakref.ref[Later], float]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def look_at(self, later: Later) -> None:
        """Has the thread settle it after a rest."""
        self._queue.put((weakref.ref(later), time.monotonic() + _REST_S))
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                # Functions run in reverse order: this one before those of an SDK that was there before the update.
                atexit.register(_settle_all)
                self._thread = threading.Thread(target=self._run, name="weightcast-watch", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            found, due = self._queue.get()
            time.sleep(max(0.0, due - time.monotonic()))
            later = found()
            if later is not None:
                later.settle()
            del later


def _settle_all() -> None:
    for later in tuple(_KNOWN):
        later.settle()


def _forked() -> None:
    atexit.unregister(_settle_all)
    _THREAD.forget()
    for later in tuple(_KNOWN):
        later.forget()


_KNOWN: weakref.WeakSet[Later] = weakref.WeakSet()
_THREAD = _Thread()
os.register_at_fork(after_in_child=_forked)
