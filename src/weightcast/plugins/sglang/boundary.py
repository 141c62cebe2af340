"""The mark that makes all ranks switch between the same two steps of SGLang.

SGLang's first rank broadcasts its requests to all ranks at the top of every pass of every event loop.  It adds a
``Step`` to them, and each rank carries out what waits when the ``Step`` comes to it (``plugins.switch_rank``).

An idle scheduler passes thousands of times a second and keeps Python's interpreter from our threads.  While our
receiver is at work it rests until a request or a mark comes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from weightcast.plugins.sglang.hook_points import REQUEST_RECEIVER_ATTRIBUTES, SGLANG

_REST_S = 0.02  # bounds what else an idle scheduler does in a pass, such as its metrics


@dataclass(frozen=True, slots=True)
class Step:
    """Travels with SGLang's requests to every rank; SGLang pickles it."""

    number: int


class Boundary:
    """Sends such marks from the first rank, and takes them on every rank."""

    def __init__(self, step: Callable[[], object]) -> None:
        """Makes a boundary without marks.

        Args:
            step: Called on the scheduler's thread when a mark comes; it must not raise.
        """
        self._step = step
        self._steps: deque[Step] = deque()
        self._count = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._scheduler: Any = None
        self._news: Any = None

    def attach(self, scheduler: Any) -> None:
        """Adds our type to a scheduler's dispatcher, and our wake-up to what an idle scheduler waits for."""
        # Neither is installed where this is checked.
        import zmq  # pyright: ignore[reportMissingImports]
        from sglang.utils import TypeBasedDispatcher  # pyright: ignore[reportMissingImports]

        scheduler._request_dispatcher += TypeBasedDispatcher([(Step, self._take)])
        if scheduler.idle_sleeper is not None:  # --sleep-on-idle: the first rank waits for its sockets up to a second
            scheduler.idle_sleeper.poller.register(self._wake, zmq.POLLIN)
        self._scheduler = scheduler
        receiver = scheduler.request_receiver
        SGLANG.check_attributes(receiver, REQUEST_RECEIVER_ATTRIBUTES)
        self._news = zmq.Poller()
        for source in (receiver.recv_from_tokenizer, receiver.recv_from_rpc, self._wake):
            if source is not None:  # ranks after the first have no sockets, and wait for its broadcast
                self._news.register(source, zmq.POLLIN)

    def rest(self) -> bool:
        """First rank only: waits until a request or a mark comes, if SGLang has nothing to do; True if it had not."""
        scheduler = self._scheduler
        if not (scheduler._engine_paused or scheduler.is_fully_idle()):
            return False
        self._news.poll(1e3 * _REST_S)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        return True

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
