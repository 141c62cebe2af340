"""Puts work off until an update is over, so that the update does not wait for it.

During an update the events are only kept (``Events`` in ``watch/listeners.py``).  The work is done by whoever comes
first:

- somebody who reads the result (a scrape of metrics), or who closes the updater: ``Later.settle`` on their thread,
- a thread of this process that looks a moment after the update is over,
- the end of the process.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

MAX_KEPT = 20_000  # then the update waits while they are worked on, and none is lost
# The proof of residence and the answer come first: making spans holds the interpreter for a millisecond.
_REST_S = 0.1


class Later:
    """Keeps values in order until it works on them.  Thread-safe."""

    def __init__(self, do: Callable[[Any], None]) -> None:
        """``do`` works on one value and must not raise."""
        self._do = do
        self._kept: deque[Any] = deque()
        self._doing = threading.RLock()
        self._is_due = False
        _KNOWN.add(self)

    def keep(self, value: Any) -> None:
        """Puts off the work on a value."""
        self._kept.append(value)
        if len(self._kept) >= MAX_KEPT:
            self.settle()

    def due(self, _: object = None) -> None:
        """Has the thread do the work soon, if there is any; the update is over."""
        if self._kept and not self._is_due:
            self._is_due = True
            _THREAD.look_at(self)

    def settle(self) -> None:
        """Does all work now, on the caller's thread; waits for a thread that does it already."""
        with self._doing:
            self._is_due = False
            while self._kept:
                self._do(self._kept.popleft())

    def forget(self) -> None:
        """Drops all work, in a forked child: the parent does it."""
        self._kept.clear()
        self._doing = threading.RLock()
        self._is_due = False


class _Thread:
    """Does the work that is due, on a daemon thread that starts with the first of it."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """A forked child has no thread."""
        self._queue: queue.SimpleQueue[tuple[Later, float]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def look_at(self, later: Later) -> None:
        """Has the thread settle it after a rest."""
        self._queue.put((later, time.monotonic() + _REST_S))
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
            later, due = self._queue.get()
            time.sleep(max(0.0, due - time.monotonic()))
            later.settle()
            del later  # nobody else may need it


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
