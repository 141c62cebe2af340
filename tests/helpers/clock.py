"""Time that passes only when a test says so, for tests of what happens at a deadline.

A test that gives real waits a short deadline fails on a busy machine.  With this clock a wait is as long as the test
needs: it waits until everybody who should be there is there, and moves the clock past the deadline then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

# Longer than the busiest machine needs; a test that waits so long has failed.  Below the limit of one test.
PATIENCE_S = 400.0
# Deadline of updates in tests of something else.
AMPLE_S = 100.0


class Clock:
    """Stands in for the module ``time`` inside the modules under test."""

    def __init__(self) -> None:
        self._now = time.monotonic()
        self._sleepers: set[int] = set()

    @property
    def polling(self) -> int:
        """How many threads have slept between two looks so far."""
        return len(self._sleepers)

    def monotonic(self) -> float:
        """Seconds; the same until the clock is moved."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """A real pause, and a short one: nobody waits for time to pass."""
        self._sleepers.add(threading.get_ident())
        time.sleep(min(seconds, 0.01))

    def move(self, seconds: float) -> None:
        """Let so many seconds pass."""
        self._now += seconds

    @contextmanager
    def within(self, *modules: ModuleType) -> Generator[Clock]:
        """Give these modules this clock."""
        before: list[tuple[Any, Any]] = [(module, vars(module)["time"]) for module in modules]
        for module, _ in before:
            module.time = self
        try:
            yield self
        finally:
            for module, real in before:
                module.time = real


def wait_until(condition: Callable[[], Any], what: str) -> None:
    """Return as soon as the condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for {what}"
        time.sleep(0.002)
