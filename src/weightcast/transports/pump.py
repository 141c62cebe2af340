"""The part that every carrier shares: one bucket is sent while the next one fills.

``send`` starts to send a bucket and returns when the buffer of the bucket before it may be filled again.  So the
caller fills one buffer while the other one is sent, and at most two buckets are in flight.  An engine that allows it
gets the announcement of a bucket while it still reads the bucket before, which hides the network's latency.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from weightcast.comm.shared_buckets import Shared
from weightcast.protocols import Carrier
from weightcast.transports.blame import raise_together
from weightcast.wire.bucket import Bucket

SendOne = Callable[[Bucket, "tuple[Shared, ...]"], None]
StartOne = Callable[[Bucket, "tuple[Shared, ...]"], "Future[None]"]
MAX_IN_FLIGHT = 2  # as many as there are buffers


class Pump:
    """Sends each bucket by ``start_one``: in order, one after the other or two at a time."""

    def __init__(self, start_one: StartOne, *, in_flight: int = 1) -> None:
        """Sends nothing yet; the future of ``start_one`` ends when the bucket's buffer may be filled again.

        ``in_flight`` is 2 if a bucket may be started before the future of the bucket before has ended.
        """
        self._start_one = start_one
        self._in_flight = min(in_flight, MAX_IN_FLIGHT)
        self._sending: deque[Future[None]] = deque()

    def put(self, bucket: Bucket, shared: tuple[Shared, ...]) -> None:
        """Starts to send a bucket, and waits for the one before; its error names every target that failed."""
        if self._in_flight == 1:
            self.drain()
        self._sending.append(self._start_one(bucket, shared))
        while len(self._sending) > 1:
            self._read_first()

    def drain(self) -> None:
        """Waits for all buckets in flight; the WeightcastError of failed ones names every target that failed."""
        while self._sending:
            self._read_first()

    def _read_first(self) -> None:
        first = self._sending.popleft().exception()
        if first is None:
            return
        others = list[BaseException | None]()
        while self._sending:  # another target may have failed with the next bucket
            others.append(self._sending.popleft().exception())
        raise_together((first, *others))

    def settle(self) -> None:
        """Waits for all buckets in flight, and raises nothing for one that failed."""
        while self._sending:
            self._sending.popleft().exception()

    def close(self) -> None:
        """Waits for all buckets in flight, and ends threads; safe to call twice."""
        self.settle()


class ThreadPump(Pump):
    """Sends each bucket by a function that blocks until the bucket's buffer may be filled again."""

    def __init__(self, send_one: SendOne, *, in_flight: int = 1) -> None:
        """The arguments are as for ``Pump``."""
        self._threads = ThreadPoolExecutor(max_workers=MAX_IN_FLIGHT, thread_name_prefix="weightcast-send")
        super().__init__(partial(self._threads.submit, send_one), in_flight=in_flight)

    def close(self) -> None:
        """As ``Pump.close``."""
        super().close()
        self._threads.shutdown(wait=True)


class Pumped(Carrier):
    """A carrier that needs no group and sends one bucket at a time by the pump; subclasses have what is more."""

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        self._filled: dict[int, torch.cuda.Event] = {}  # by bucket, until a thread has waited for it
        self._closed = False

    def send(self, bucket: Bucket, shared: Sequence[Shared]) -> None:
        """As ``Carrier.send``.  The caller's current stream fills the bucket."""
        self._pump.put(bucket, tuple(shared))

    def drain(self) -> None:
        """As ``Carrier.drain``."""
        self._pump.drain()

    def settle(self) -> None:
        """As ``Carrier.settle``."""
        self._pump.settle()

    def close(self) -> None:
        """As ``Carrier.close``."""
        if not self._closed:
            self._closed = True
            self._end()

    def _end(self) -> None:
        """Ends the threads, and what the subclass has made."""
        self._pump.close()

    def _note_filled(self, bucket: Bucket) -> None:
        """Notes the end of the caller's work on a bucket, for which the stream of another thread does not wait."""
        if bucket.data.is_cuda:
            event = self._filled[bucket.layout.index] = torch.cuda.Event()
            event.record(torch.cuda.current_stream(bucket.data.device))
