"""The replies that are due in a cell, and the order in which threads enter its group's collectives."""

from __future__ import annotations

import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import NamedTuple

from weightcast.comm.update_group import GroupFailed

_TURN_POLL_S = 0.05  # the abort of a group does not wake threads that wait for a turn


class Unanswered(NamedTuple):
    """Buckets' indices, and the targets' answers."""

    buckets: range
    posts: Sequence[Future[None]]


class InFlight:
    """Thread-safe: as many threads as buckets may be in flight send at once."""

    def __init__(self) -> None:
        self._unanswered: deque[Unanswered] = deque()
        self._turns = threading.Condition()
        self._turn = 0  # index of the bucket whose broadcast is entered next

    def __len__(self) -> int:
        return len(self._unanswered)

    def begin(self) -> None:
        """Starts an attempt, in which no bucket was sent yet; nothing is due."""
        self._turn = 0

    def expect(self, buckets: range, posts: Sequence[Future[None]]) -> None:
        """Notes replies that are due, in order: the threads of two buckets may come here in any order."""
        with self._turns:
            insort(self._unanswered, Unanswered(buckets, posts), key=lambda one: one.buckets.start)

    def first(self, last: int | None = None) -> Unanswered | None:
        """The first replies that are due to buckets up to ``last``, None for all; None if there are none."""
        with self._turns:
            if self._unanswered and (last is None or self._unanswered[0].buckets[-1] <= last):
                return self._unanswered[0]
        return None

    def was_answered(self, unanswered: Unanswered) -> None:
        """Notes that these replies were read; two threads may read the same."""
        with self._turns:
            if self._unanswered and self._unanswered[0] is unanswered:
                self._unanswered.popleft()

    def settle(self) -> None:
        """Waits for the replies that are due, good or bad."""
        while (unanswered := self.first()) is not None:
            wait(unanswered.posts)
            self.was_answered(unanswered)

    @contextmanager
    def turn(self, index: int, lives: Callable[[], bool]) -> Generator[None]:
        """Makes threads enter the group's collectives in the order of the buckets, as long as the group ``lives``."""
        with self._turns:
            while self._turn != index:
                if not lives():
                    raise GroupFailed(f"bucket {self._turn} failed, which came before bucket {index}")
                self._turns.wait(_TURN_POLL_S)
        yield
        with self._turns:
            self._turn = index + 1
            self._turns.notify_all()
