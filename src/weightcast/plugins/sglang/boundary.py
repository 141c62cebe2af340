"""The mark that makes all ranks switch between the same two steps of SGLang.

SGLang's first rank broadcasts its requests to all ranks at the top of every pass of every event loop.  It adds a
``Step`` to them, and each rank carries out what waits when the ``Step`` comes to it (``plugins.switch_rank``).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Step:
    """Travels with SGLang's requests to every rank; SGLang pickles it."""

    number: int


class Boundary:
    """Sends such marks from the first rank, and takes them on every rank."""

    def __init__(self, step: Callable[[], None]) -> None:
        """Makes a boundary without marks.

        Args:
            step: Called on the scheduler's thread when a mark comes; it must not raise.
        """
        self._step = step
        self._steps: deque[Step] = deque()
        self._count = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)

    def attach(self, scheduler: Any) -> None:
        """Adds our type to a scheduler's dispatcher, and our wake-up to what an idle scheduler waits for."""
        # SGLang is not installed where this is checked.
        from sglang.utils import TypeBasedDispatcher  # pyright: ignore[reportMissingImports]

        scheduler._request_dispatcher += TypeBasedDispatcher([(Step, self._take)])
        if scheduler.idle_sleeper is not None:  # --sleep-on-idle: the first rank waits for its sockets up to a second
            import zmq

            scheduler.idle_sleeper.poller.register(self._wake, zmq.POLLIN)

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

    def _take(self, step: Step) -> None:
        self._step()
