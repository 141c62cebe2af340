"""Flips by mapping on a GPU: captured graphs read the new contents at the old addresses, and no memory is lost."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.needs import needs
from weightcast.digest.definition import partial_sums
from weightcast.digest.pieces import TensorPiece, Transfer
from weightcast.receiver.staging import StagingSet

pytestmark = [pytest.mark.gpu, needs(1)]

SHAPES = {f"layer.{number}": (number % 7 + 300, 257) for number in range(40)} | {"large": (8192, 8192), "one": (1,)}


@pytest.fixture
def live() -> Iterator[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    yield {
        name: torch.nn.Parameter(torch.randn(shape, device="cuda").to(torch.bfloat16), requires_grad=False)
        for name, shape in SHAPES.items()
    }
    gc.collect()
    torch.cuda.empty_cache()


def copies(live: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in live.items()}


def same(live: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(live[name], tensor) for name, tensor in wanted.items())


def write(stage: StagingSet, live: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    new = {name: torch.randn_like(tensor) for name, tensor in live.items()}
    for name, tensor in new.items():
        stage.target(name).copy_(tensor)
    return new


def test_a_captured_graph_reads_what_a_flip_maps(live):
    view = live["layer.3"][2:5]  # stays where it is, so its contents are exchanged
    stage = StagingSet(live, "device", keep_storage=True, may_move=True)
    assert stage.mapped_bytes > sum(tensor.nbytes for name, tensor in live.items() if name != "layer.3")
    addresses = {name: tensor.data_ptr() for name, tensor in live.items()}
    read = {name: torch.empty_like(tensor) for name, tensor in live.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for name, tensor in live.items():
            read[name].copy_(tensor * 1)
    for version in range(6):
        old, new = copies(live), write(stage, live)
        graph.replay()  # runs while the flip begins
        stage.flip()
        assert same(read, old)
        assert same(live, new)
        graph.replay()
        torch.cuda.synchronize()
        assert same(read, new)
        assert torch.equal(view, new["layer.3"][2:5])
        if version % 2:
            stage.undo()
            graph.replay()
            torch.cuda.synchronize()
            assert same(live, old)
            assert same(read, old)
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == addresses


def test_the_second_copies_take_as_much_memory_as_the_first_and_give_it_back(live):
    size_bytes = sum(tensor.nbytes for tensor in live.values())
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    stage = StagingSet(live, "device", keep_storage=True, may_move=True)
    after, _ = torch.cuda.mem_get_info()
    assert before - after < size_bytes + (64 << 20)
    stage.free()
    freed, _ = torch.cuda.mem_get_info()
    assert before - freed < 64 << 20
    stage.allocate()
    old, new = copies(live), write(stage, live)
    stage.flip()
    assert same(live, new)
    stage.undo()
    assert same(live, old)
    del stage, old, new
    live.clear()
    gc.collect()
    torch.cuda.empty_cache()
    nothing, _ = torch.cuda.mem_get_info()
    assert nothing > before + size_bytes - (64 << 20)


@pytest.mark.parametrize("stored", [True, False])
def test_a_captured_graph_reads_weights_that_have_slept_without_memory(live, stored):
    size_bytes = sum(tensor.nbytes for tensor in live.values())
    stage = StagingSet(live, "device", keep_storage=True, may_move=True)
    read = {name: torch.empty_like(tensor) for name, tensor in live.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for name, tensor in live.items():
            read[name].copy_(tensor * 1)
    for _ in range(3):
        new = write(stage, live)
        stage.flip()
        before, _ = torch.cuda.mem_get_info()
        if stored:
            stage.store()
        stage.free()
        assert stage.let_go() >= size_bytes
        asleep, _ = torch.cuda.mem_get_info()
        assert asleep > before + 2 * size_bytes - (64 << 20)
        stage.restore()
        stage.allocate()
        awake, _ = torch.cuda.mem_get_info()
        assert awake > before - (64 << 20)
        if stored:
            graph.replay()
            torch.cuda.synchronize()
            assert same(live, new)
            assert same(read, new)
        new = write(stage, live)
        stage.flip()
        graph.replay()
        torch.cuda.synchronize()
        assert same(read, new)


def test_contents_that_another_stream_has_written_are_mapped_whole(live):
    stage = StagingSet(live, "device", keep_storage=True, may_move=True)
    side = torch.cuda.Stream()
    for value in (1.0, 2.0, 3.0):
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            for name in live:
                stage.target(name).fill_(value)
        stage.flip()
        assert all(bool((tensor == value).all()) for tensor in live.values())


def test_more_than_is_free_is_refused_before_anything_moves(live):
    free_bytes, _ = torch.cuda.mem_get_info()
    old = copies(live)
    # Fits once and not twice; the rest is left to tests beside this one.
    large = torch.empty(free_bytes * 6 // 10, dtype=torch.uint8, device="cuda")
    addresses = {name: tensor.data_ptr() for name, tensor in live.items()}
    try:
        with pytest.raises(torch.OutOfMemoryError, match="bytes of cuda:0 were asked for"):
            StagingSet(live | {"too large": large}, "device", keep_storage=True, may_move=True)
    finally:
        del large
        torch.cuda.empty_cache()
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == addresses
    assert same(live, old)


@needs(2)
@pytest.mark.parametrize("far", [True, False])
def test_what_comes_from_another_gpu_is_mapped_whole(live, far):
    from weightcast.digest.kernel import GpuLaunches  # which needs Triton

    for one, other in ((0, 1), (1, 0)):  # torch lets the GPUs reach each other's memory from then on
        torch.zeros(1, device=f"cuda:{one}").copy_(torch.zeros(1, device=f"cuda:{other}"))
    stage = StagingSet(live, "device", keep_storage=True, may_move=True)
    sources = {name: torch.randn_like(tensor, device="cuda:1") for name, tensor in live.items()}
    pieces = [TensorPiece(tensor=tensor, full_shape=tuple(tensor.shape)) for tensor in sources.values()]
    transfers = [
        Transfer(piece=piece, target=stage.target(name), total=number, far=far)
        for number, (name, piece) in enumerate(zip(sources, pieces, strict=True))
    ]
    torch.cuda.synchronize(1)
    with torch.cuda.stream(torch.cuda.Stream()):
        launches = GpuLaunches(transfers, len(transfers), torch.device("cuda", 0))
        for _ in range(3):
            for tensor in sources.values():
                tensor.normal_()
            torch.cuda.synchronize(1)
            sums = launches.launch()
            torch.cuda.current_stream().synchronize()
            stage.flip()
            assert all(torch.equal(live[name].cpu(), tensor.cpu()) for name, tensor in sources.items())
            assert torch.equal(sums.cpu(), partial_sums(pieces).cpu())
