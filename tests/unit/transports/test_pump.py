"""Two buckets under way where that is allowed, never three; the first failure is the one that is raised."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.helpers.clock import PATIENCE_S
from weightcast.transports.pump import ThreadPump
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets

SPECS = [TensorSpec(name=f"t{number}", dtype="float32", shape=(4,)) for number in range(6)]
BUCKETS = [
    Bucket(layout, torch.empty(16, dtype=torch.uint8))
    for layout in plan_buckets(SPECS, bucket_bytes=16, packing=Packing())
]


class Way:
    """Where buckets go; each waits for its gate."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.most = 0
        self.failing: dict[int, Exception] = {}
        self.gates = [threading.Event() for _ in BUCKETS]
        self._inside = 0
        self._guard = threading.Lock()

    def send(self, bucket: Bucket, shared: object) -> None:
        index = bucket.layout.index
        with self._guard:
            self.begun.append(index)
            self._inside += 1
            self.most = max(self.most, self._inside)
        assert self.gates[index].wait(PATIENCE_S)
        with self._guard:
            self._inside -= 1
        if index in self.failing:
            raise self.failing[index]


def eventually(is_so) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_pump_sends_in_order_and_keeps_the_limit_on_buckets_in_flight(in_flight):
    way = Way()
    pump = ThreadPump(way.send, in_flight=in_flight)

    def put_all() -> None:
        for bucket in BUCKETS:
            pump.put(bucket, ())
        pump.drain()

    putting = threading.Thread(target=put_all)
    putting.start()
    for index, gate in enumerate(way.gates):
        last = min(index + in_flight, len(BUCKETS))
        eventually(lambda last=last: len(way.begun) == last)
        gate.set()
    putting.join(PATIENCE_S)
    assert not putting.is_alive()
    pump.close()
    assert sorted(way.begun) == list(range(len(BUCKETS)))
    assert way.most == in_flight


def test_put_returns_when_the_bucket_before_may_be_filled_again():
    way = Way()
    pump = ThreadPump(way.send, in_flight=2)
    pump.put(BUCKETS[0], ())  # there is none before it
    returned = threading.Event()

    def put() -> None:
        pump.put(BUCKETS[1], ())
        returned.set()

    threading.Thread(target=put).start()
    eventually(lambda: len(way.begun) == 2)
    assert not returned.wait(0.05)
    way.gates[0].set()
    assert returned.wait(PATIENCE_S)
    way.gates[1].set()
    pump.close()


def test_pump_raises_the_first_buckets_failure_and_waits_for_the_second():
    way = Way()
    way.failing = {0: ValueError("first"), 1: ValueError("second")}
    pump = ThreadPump(way.send, in_flight=2)
    pump.put(BUCKETS[0], ())
    way.gates[1].set()
    threading.Timer(0.05, way.gates[0].set).start()
    with pytest.raises(ValueError, match="first"):
        pump.put(BUCKETS[1], ())
    pump.settle()
    pump.drain()  # nothing is left
    pump.close()
    pump.close()
