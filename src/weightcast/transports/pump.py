"""The part that every transport shares: buckets under way while the next one fills.

``send`` hands a bucket to a thread and returns when the one before it may be filled again; so the caller fills one
buffer while the other is under way, and there are never more than two.  Engines that allow it hear of a bucket while
they still read the one before it, which hides the way there and back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from weightcast.comm.shared_buckets import Shared
from weightcast.transports.blame import raise_together
from weightcast.wire.bucket import Bucket

SendOne = Callable[[Bucket, "tuple[Shared, ...]"], None]
MAX_IN_FLIGHT = 2  # as many as there are buffers


class Pump:
    """Runs ``send_one`` for each bucket: in order, one after the other or two at a time."""

    def __init__(self, send_one: SendOne, *, in_flight: int = 1) -> None:
        """Nothing is sent yet.

        Args:
            send_one: Sends a bucket; returns when it may be filled again.
            in_flight: 2 if it may be called for a bucket before it has returned for the one before.
        """
        self._send_one = send_one
        self._in_flight = min(in_flight, MAX_IN_FLIGHT)
        self._threads = ThreadPoolExecutor(max_workers=self._in_flight, thread_name_prefix="weightcast-send")
        self._under_way: deque[Future[None]] = deque()

    def put(self, bucket: Bucket, shared: tuple[Shared, ...]) -> None:
        """Start sending and wait for the bucket before it.

        Raises:
            WeightcastError: That bucket failed.  By then nothing is under way any more, and the error names every
                target that failed.
        """
        if self._in_flight == 1:
            self.drain()
        self._under_way.append(self._threads.submit(self._send_one, bucket, shared))
        while len(self._under_way) > 1:
            self._read_first()

    def drain(self) -> None:
        """Wait for what is under way; raise what went wrong with it, of all targets together."""
        while self._under_way:
            self._read_first()

    def _read_first(self) -> None:
        first = self._under_way.popleft().exception()
        if first is None:
            return
        others = list[BaseException | None]()
        while self._under_way:  # another target may have failed with the next bucket
            others.append(self._under_way.popleft().exception())
        raise_together((first, *others))

    def settle(self) -> None:
        """Wait for what is under way, whatever became of it."""
        while self._under_way:
            self._under_way.popleft().exception()

    def close(self) -> None:
        """End the threads; safe to call twice."""
        self.settle()
        self._threads.shutdown(wait=True)


class Pumped:
    """The calls of ``Transport`` that are the pump's alone."""

    def __init__(self, send_one: SendOne, *, in_flight: int = 1) -> None:
        self._pump = Pump(send_one, in_flight=in_flight)

    def drain(self) -> None:
        """Return when every bucket sent so far has been taken over by every target; raise what went wrong."""
        self._pump.drain()

    def settle(self) -> None:
        """Return when nothing is under way any more, whatever became of it."""
        self._pump.settle()
