"""Puts work off until an update is over and its answers are on their way, because making spans holds the interpreter.

A thread does it a moment later.  ``settle`` does it at once, and so does the end of the process.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger("weightcast.watch")
_REST_S = 0.1


class _Later:
    """The work of this process, and its daemon thread, which starts with the first of it."""

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._due: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._doing = threading.RLock()
        self._thread: threading.Thread | None = None

    def put_off(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        self._due.put(time.monotonic() + _REST_S)
        if self._thread is None:
            with self._doing:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="weightcast-watch", daemon=True)
                    self._thread.start()
                    # Functions run in reverse order: this one before that of an SDK that was there before the update.
                    atexit.register(settle)

    def settle(self) -> None:
        with self._doing:
            while self._jobs:
                try:
                    self._jobs.popleft()()
                except Exception:  # exporters of spans are other people's code, and the rest must still be done
                    log.exception("what was put off until the update was over has failed")

    def _run(self) -> None:
        while True:
            time.sleep(max(0.0, self._due.get() - time.monotonic()))
            self.settle()


def put_off(job: Callable[[], None]) -> None:
    """Has a thread do the work soon.  An error is logged."""
    _later.put_off(job)


def settle() -> None:
    """Does all work that was put off, on the caller's thread; waits for what the other thread is doing."""
    _later.settle()


def _forked() -> None:
    """Leaves the work to the parent; a forked child has no thread either."""
    global _later
    atexit.unregister(settle)
    _later = _Later()


_later = _Later()
os.register_at_fork(after_in_child=_forked)
