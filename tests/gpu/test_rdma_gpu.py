"""``direct`` by rdma on GPUs: NIXL reads trainer ranks' buffers on a GPU into memory of engine ranks on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
import torch

from tests.gpu.needs import needs
from tests.gpu.test_direct_gpu import SHARED, engines, send, weights_of
from tests.gpu.test_updates_gpu import digests, info, start_trainer, toy_engine
from tests.helpers.commands import context
from tests.helpers.toy_engine import toy_weights
from weightcast.comm import nixl
from weightcast.comm.remote_memory import Arena
from weightcast.comm.remote_reads import Pull, RemoteReader, RemoteReadFailed
from weightcast.wire.bucket_sources import RemoteMemory
from weightcast.wire.pieces import Runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(bool(nixl.missing()), reason=nixl.missing()),
]
RDMA: dict[str, Any] = {"transport": "rdma", "timeout": 60}
SLOT_BYTES = 1 << 20
LONG_S = 60.0
EITHER = pytest.mark.parametrize("there", ["cuda:0", "cpu"])


def own(pipe: Connection, device: str) -> None:
    """A process with a buffer of random bytes on a device; it writes others when it is told a seed."""
    arena = Arena(2, SLOT_BYTES, torch.device(device))
    pipe.send_bytes(msgspec.json.encode(arena.memory(1)))
    while (seed := pipe.recv()) is not None:
        fresh = noise(seed).to(device)
        keep_busy(device)
        arena.slot(1).copy_(fresh)  # on a GPU this call returns long before the bytes are there
        pipe.send_bytes(msgspec.json.encode(arena.memory(1)))
    arena.close()


def keep_busy(device: str) -> None:
    """Gives the current stream of a GPU work for some tens of milliseconds; returns at once."""
    if device != "cpu":
        slow = torch.ones(1 << 26, device=device)
        for _ in range(100):
            slow = slow * 1.5


def noise(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (SLOT_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Owner:
    """Another process with memory on a device."""

    def __init__(self, device: str) -> None:
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=own, args=(there, device), daemon=True)
        self.process.start()
        there.close()
        self.memory = self._told()

    def fill(self, seed: int) -> None:
        self.pipe.send(seed)
        assert self._told() == self.memory

    def _told(self) -> RemoteMemory:
        assert self.pipe.poll(LONG_S), "the owner of the memory is silent"
        return msgspec.json.decode(self.pipe.recv_bytes(), type=RemoteMemory)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(LONG_S)


@pytest.fixture
def owner(there: str) -> Iterator[Owner]:
    started = Owner(there)
    yield started
    started.kill()


@pytest.fixture
def reader(here: str) -> Iterator[RemoteReader]:
    made = RemoteReader(torch.device(here))
    yield made
    made.close()


def read(reader: RemoteReader, pull: Pull, size_bytes: int, timeout_s: float = LONG_S) -> torch.Tensor:
    return reader.read([pull], size_bytes, what="bucket 3", timeout_s=timeout_s, interrupted=lambda: False)


@EITHER
@pytest.mark.parametrize("here", ["cuda:0"])
def test_a_gpu_gets_the_runs_that_it_asks_for_and_no_other_byte(owner: Owner, reader: RemoteReader) -> None:
    runs = [(0, Runs(5, 16, 1024, 64)), (4096, Runs(70_000, 40_000, 40_000, 1))]
    pull = Pull("a", owner.memory, runs)
    for seed in (1, 2, 3):
        owner.fill(seed)
        want = noise(seed)
        found = read(reader, pull, 4096 + 40_000 + 512)
        columns = want[5 : 5 + 64 * 1024].view(64, 1024)[:, :16].flatten()
        assert torch.equal(found[: 64 * 16].cpu(), columns)
        assert torch.equal(found[4096 : 4096 + 40_000].cpu(), want[70_000:110_000])
        if seed > 1:  # written by the turn before: what no run covers stays
            assert found[64 * 16 : 4096].eq(77).all()
            assert found[4096 + 40_000 :].eq(77).all()
        found.fill_(77)
    assert reader.prepared == 1


@pytest.mark.parametrize(("here", "there"), [("cuda:0", "cuda:0")])
def test_a_read_waits_for_kernels_that_still_use_the_memory(owner: Owner, reader: RemoteReader) -> None:
    pull = Pull("a", owner.memory, [(0, Runs(0, SLOT_BYTES, SLOT_BYTES, 1))])
    owner.fill(1)
    found = read(reader, pull, SLOT_BYTES)
    owner.fill(2)
    keep_busy("cuda:0")
    kept = found.clone()
    assert torch.equal(read(reader, pull, SLOT_BYTES).cpu(), noise(2))
    assert torch.equal(kept.cpu(), noise(1))


@pytest.mark.parametrize(("here", "there"), [("cuda:0", "cuda:0")])
def test_an_owner_on_a_gpu_that_was_killed_is_named(owner: Owner, reader: RemoteReader) -> None:
    owner.kill()
    with pytest.raises(RemoteReadFailed, match=rf"connecting to .*process {owner.process.pid}"):
        read(reader, Pull("a", owner.memory, [(0, Runs(0, 64, 64, 1))]), 64, timeout_s=20.0)


@pytest.mark.parametrize(
    ("world", "places"),
    [
        (1, [["cuda:0"]]),
        (2, [["cuda:0", "cuda:0"]]),
        (4, [["cuda:0", "cuda:0"], ["cuda:0"]]),
        pytest.param(2, [["cuda:1", "cuda:1"], ["cuda:1"]], marks=needs(2)),
    ],
    ids=["1 to tp1", "2 to tp2", "4 to tp2 and tp1", "2 to another GPU"],
)
def test_engine_ranks_read_their_shares_by_rdma(world: int, places: list[list[str]]) -> None:
    more = SHARED if world > 1 else {}
    with engines(places) as urls:
        assert all(set(digests(url).values()).isdisjoint(weights_of(7).values()) for url in urls)
        send(["cuda:0"] * world, urls, versions="1,2", **RDMA, **more)
        for url in urls:
            assert digests(url) == weights_of(7)
        send(["cuda:0"] * world, urls, versions="3,4", between="moved", **RDMA, **more)
        for url in urls:
            assert digests(url) == weights_of(7, sign=-1)  # the fourth update sent the negatives
        send(["cuda:0"] * world, urls, versions="5", **RDMA, **more)  # and back
        for url in urls:
            assert digests(url) == weights_of(7)
            assert info(url)["version"] == 5


@pytest.mark.parametrize(("trainer", "place"), [("cpu", "cuda:0"), ("cuda:0", "cpu")])
def test_rdma_crosses_from_a_cpu_to_a_gpu_and_back(trainer: str, place: str) -> None:
    with engines([[place]]) as [url]:
        send([trainer], [url], versions="1,2", **RDMA)
        assert digests(url) == weights_of(7)


@pytest.mark.parametrize("tp", [1, 2])
def test_each_engine_rank_reads_its_own_share(tmp_path: Any, tp: int) -> None:
    share = sum(
        tensor.nbytes // (tp if "up" in name or "down" in name else 1) for name, tensor in toy_weights(seed=7).items()
    )
    with toy_engine(
        *("--tp", str(tp), "--devices", ",".join(["cuda:0"] * tp), "--seed", "1", "--count-reads", str(tmp_path))
    ) as (url, _):
        send(["cuda:0"] * 2, [url], versions="1", **RDMA, **SHARED)
        for rank in range(tp):
            read_bytes = int((tmp_path / f"rank-{rank}").read_text())
            assert share <= read_bytes <= 1.1 * share, f"rank {rank} has read {read_bytes} bytes and keeps {share}"


def test_a_bit_that_flips_in_a_buffer_on_the_gpu_is_named_and_nothing_switches() -> None:
    with engines([["cuda:0"]]) as [url]:
        before = digests(url)
        [trainer] = start_trainer(["cuda:0"], [url], seed=7, bucket_bytes=50_000, versions="1", flip=1, **RDMA)
        output, _ = trainer.communicate(timeout=240)
        answer = msgspec.json.decode(output.strip().splitlines()[-1])
        assert not answer["ok"]
        assert any(name in answer["text"] for name in toy_weights(seed=7)), answer
        assert url in answer["text"]
        assert digests(url) == before
        send(["cuda:0"], [url], versions="1", **RDMA)
        assert digests(url) == weights_of(7)
