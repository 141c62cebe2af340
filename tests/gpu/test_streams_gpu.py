"""An update beside an engine that computes: what it reads, and what waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gpu.needs import needs
from weightcast.comm.cuda_driver import as_tensor
from weightcast.digest.pieces import TensorPiece, Transfer
from weightcast.digest.transfers import launches_of, prepare_kernels
from weightcast.plugins.switch_rank import SwitchRank
from weightcast.wire.answers import RankAck
from weightcast.wire.messages import Message, Open, Readback

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE, OTHER = torch.device("cuda:0"), torch.device("cuda:1")
LONG_CYCLES = 500_000_000  # a quarter of a second


class Reading:
    """A receiver that reads weights."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights
        self.streams: set[int] = set()

    def apply(self, message: Message) -> RankAck:
        self.streams.add(torch.cuda.current_stream(DEVICE).cuda_stream)
        return RankAck(rank=0, ok=True, error=str(float(self.weights.sum())))


class Rank(SwitchRank):
    engine = "an engine"

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__(0, DEVICE)
        self.reading = Reading(weights)
        receiver: Any = self.reading
        self.receiver = receiver

    def carry_out(self, do: Callable[[], None], session: Open, *, forward: bool) -> None:
        do()


def test_an_update_reads_what_the_engine_has_written_on_the_default_stream():
    weights = torch.zeros(4, device=DEVICE)
    rank = Rank(weights)
    torch.cuda._sleep(LONG_CYCLES)  # pyright: ignore[reportPrivateUsage]
    weights.fill_(1.0)
    found: list[RankAck] = []
    thread = threading.Thread(target=lambda: found.append(rank.apply(Readback())))
    thread.start()
    thread.join()
    assert found[0].error == "4.0"
    assert torch.cuda.default_stream(DEVICE).cuda_stream not in rank.reading.streams


@needs(2)
def test_steps_do_not_wait_for_a_copy_from_another_gpu():
    prepare_kernels(DEVICE)
    size_bytes = 8 << 30
    there = torch.full((size_bytes,), 7, dtype=torch.uint8, device=OTHER)
    torch.empty(1, dtype=torch.uint8, device=DEVICE).copy_(there[:1]).to(OTHER)  # torch lets the GPUs reach each other
    source = as_tensor(there.data_ptr(), size_bytes, DEVICE, OTHER).view(torch.int16).view(-1, 4096)
    target = torch.zeros_like(source)
    transfers = [
        Transfer(piece=TensorPiece(tensor=source, full_shape=tuple(source.shape)), target=target, total=0, far=True)
    ]
    matrix = torch.randn(1024, 1024, device=DEVICE, dtype=torch.bfloat16)

    def step() -> None:
        for _ in range(100):
            torch.mm(matrix, matrix)

    def seconds_of_a_step() -> float:
        start = time.perf_counter()
        step()
        torch.cuda.current_stream(DEVICE).synchronize()
        return time.perf_counter() - start

    copying = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(copying):
        launches = launches_of(transfers, 1, DEVICE)
        launches.launch()
    torch.cuda.synchronize(DEVICE)
    alone = min(seconds_of_a_step() for _ in range(5))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.zero_()
    torch.cuda.synchronize(DEVICE)
    with torch.cuda.stream(copying):
        start.record()
        launches.launch()
        end.record()
    beside = list[float]()
    while not end.query():
        beside.append(seconds_of_a_step())
    took = start.elapsed_time(end) / 1e3
    print(f"copy {1e3 * took:.1f} ms, step alone {1e3 * alone:.2f} ms, beside {[round(1e3 * s, 2) for s in beside]}")
    assert torch.equal(target, source)
    assert len(beside) > 2, "no step ended before the copy did"
    assert max(beside) < took / 2
