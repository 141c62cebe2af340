"""Work of the receiver's thread that must run between two steps of SGLang, in the same pass of the loop on all ranks.

SGLang's first rank broadcasts its requests to all ranks at the top of every pass of every event loop.  It adds a
``Step`` to them, and each rank carries out what waits when the ``Step`` comes to it.  Before the first rank may do so,
every rank has said that it is ready (``executor``).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from weightcast.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Step:
    """Travels with SGLang's requests to every rank; SGLang pickles it."""

    number: int


class BoundaryTask:
    """Work for the scheduler's thread."""

    def __init__(self, do: Callable[[], None]) -> None:
        self.do = do
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        """Notes that the work is over, and how it failed."""
        self._error = error
        self._done.set()

    def wait(self, timeout_s: float) -> None:
        """Waits until the work is over.

        Raises:
            DeadlineExceeded: SGLang's loop did not come to it in time; it may still do so.
            BaseException: The error of the work.
        """
        if not self._done.wait(timeout_s):
            raise DeadlineExceeded(who="SGLang", waiting_for="its loop to switch weights", timeout_s=timeout_s)
        if self._error is not None:
            raise self._error


class Boundary:
    """One rank's queue of such work."""

    def __init__(self, carry_out: Callable[[BoundaryTask], None]) -> None:
        """Makes an empty queue.

        Args:
            carry_out: Called on the scheduler's thread with each task; it must not raise.
        """
        self._carry_out = carry_out
        self._tasks: deque[BoundaryTask] = deque()
        self._steps: deque[Step] = deque()
        self._count = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)

    def attach(self, scheduler: Any) -> None:
        """Adds our type to a scheduler's dispatcher, and our wake-up to what an idle scheduler waits for."""
        # SGLang is not installed where this is checked.
        from sglang.utils import TypeBasedDispatcher  # pyright: ignore[reportMissingImports]

        scheduler._request_dispatcher += TypeBasedDispatcher([(Step, self.step)])
        if scheduler.idle_sleeper is not None:  # --sleep-on-idle: the first rank waits for its sockets up to a second
            import zmq

            scheduler.idle_sleeper.poller.register(self._wake, zmq.POLLIN)

    def post(self, do: Callable[[], None]) -> BoundaryTask:
        """Queues work; it runs when the next ``Step`` comes."""
        task = BoundaryTask(do)
        self._tasks.append(task)
        return task

    def withdraw(self, task: BoundaryTask) -> None:
        """Takes work back for which no ``Step`` will come."""
        with suppress(ValueError):
            self._tasks.remove(task)

    def inject(self) -> None:
        """First rank only: adds a ``Step`` to the next requests."""
        self._count += 1
        self._steps.append(Step(self._count))
        os.eventfd_write(self._wake, 1)

    def pulled(self, requests: list[Any] | None) -> None:
        """First rank only: called with what SGLang is about to broadcast."""
        if requests is None or not self._steps:
            return
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._steps:
            requests.append(self._steps.popleft())

    def step(self, step: Step) -> None:
        """Carries out the oldest work that waits.  A rank with none has nothing to switch."""
        if self._tasks:
            self._carry_out(self._tasks.popleft())
