"""One deadline for a wait of several steps, such as connecting, sending and reading; and the sleeps of a poll."""

from __future__ import annotations

import time
from collections.abc import Callable

_SHORTEST_S = 5e-5
_LONGEST_S = 2e-3
_SHARE = 1 / 16  # polling adds at most this share to the wait


class Deadline:
    """A limit for a wait that begins now."""

    def __init__(self, limit_s: float, *, begins: Callable[[], float | Deadline | None] | None = None) -> None:
        """Starts the clock now, or later if ``begins`` is given.

        Args:
            begins: Function that returns the start of the clock by ``time.monotonic``.  While another wait has to end
                first, it returns the deadline of that one, or None if there is none yet.  When that deadline passes,
                this one passes too, but not before ``limit_s``.  The clock starts after ``limit_s`` at the latest, so
                every wait ends.
        """
        self.limit_s = limit_s
        self._made = time.monotonic()
        self._begins = begins

    def left_s(self) -> float:
        """Returns the seconds left, negative after the deadline; before the clock starts, the least that is left."""
        now = time.monotonic()
        if self._begins is None:
            return self._made + self.limit_s - now
        began = self._begins()
        latest = self._made + 2 * self.limit_s
        if began is None:
            return min(self.limit_s, latest - now)
        if isinstance(began, Deadline):
            return min(max(self._made + self.limit_s - now, began.left_s()), latest - now)
        return min(max(began, self._made) + self.limit_s, latest) - now

    def at_most(self, limit_s: float) -> Deadline:
        """Returns this deadline or one of ``limit_s`` from now, whichever is earlier."""
        return self if limit_s >= self.left_s() else Deadline(limit_s)


class Backoff:
    """The sleeps of one poll, which begins now: short at first, longer the longer it waits."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def sleep(self) -> None:
        """Sleeps until the next poll."""
        time.sleep(min(max((time.monotonic() - self._began) * _SHARE, _SHORTEST_S), _LONGEST_S))
