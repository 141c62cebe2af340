"""The part that every transport shares: one bucket under way while the next one fills.

``send`` hands a bucket to a thread and returns when the one before it has been taken over; so the caller fills one
buffer while the other is under way, and there are never more than two.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from weightcast.comm.share import Shared
from weightcast.wire.bucket import Bucket

SendOne = Callable[[Bucket, "tuple[Shared, ...]"], None]


class Pump:
    """Runs ``send_one`` for each bucket, in order, on one thread."""

    def __init__(self, send_one: SendOne) -> None:
        self._send_one = send_one
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weightcast-send")
        self._under_way: Future[None] | None = None

    def put(self, bucket: Bucket, shared: tuple[Shared, ...]) -> None:
        """Start sending; first wait for the bucket before it, and raise what went wrong with that one."""
        self.drain()
        self._under_way = self._thread.submit(self._send_one, bucket, shared)

    def drain(self) -> None:
        """Wait for the bucket under way; raise what went wrong with it."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def settle(self) -> None:
        """Wait for the bucket under way, whatever became of it."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.exception()

    def close(self) -> None:
        """End the thread; safe to call twice."""
        self.settle()
        self._thread.shutdown(wait=True)


class Pumped:
    """The calls of ``Transport`` that are the pump's alone."""

    def __init__(self, send_one: SendOne) -> None:
        self._pump = Pump(send_one)

    def drain(self) -> None:
        """Return when every bucket sent so far has been taken over by every target; raise what went wrong."""
        self._pump.drain()

    def settle(self) -> None:
        """Return when nothing is under way any more, whatever became of it."""
        self._pump.settle()
