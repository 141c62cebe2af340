"""The compiled sums on a CPU: bit for bit the definition's, whatever the memory, the threads and the machine."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.tensors import DTYPES, random_tensor, sum_by_definition, tensors, whole
from weightcast.digest import on_cpu
from weightcast.digest.definition import _sums_by_torch, as_unsigned, partial_sums
from weightcast.digest.jobs import CPU_COLS
from weightcast.digest.pieces import TensorPiece, Transfer
from weightcast.digest.transfers import can_transfer
from weightcast.wire.box import Box

# Around the edges of tiles, of narrow tiles, and of rows that are summed four or eight at a time.
EDGES = [
    (3, CPU_COLS - 1),
    (5, CPU_COLS + 3),
    (1, 2 * CPU_COLS + 1),
    (2 * CPU_COLS + 1,),
    (9, 1024),
    (9, 1025),
    (8, 1023),
    (2051, 3),
    (70000, 1),
    (1030, 130),
    (7, 300, 11),
]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    assert on_cpu.available()


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("shape", EDGES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_sums_and_copies_of_every_shape_of_tile(shape, dtype):
    tensor = random_tensor(shape, dtype, seed=1)
    goal = random_tensor(shape, dtype, seed=2)
    launches = on_cpu.CpuLaunches([Transfer(piece=whole(tensor), target=goal, total=0)], 1)
    expected = _sums_by_torch([whole(tensor)])
    assert launches.launch().tolist() == expected.tolist()
    assert raw(goal) == raw(tensor)
    assert on_cpu.sums_of([whole(tensor)]).launch().tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("shape", "spare"),
    # Rows of a matrix with gaps between them are runs; those of more dimensions are none.
    [(shape, spare) for shape in EDGES for spare in (0, 3) if not spare or len(shape) < 3],
    ids=str,
)
@pytest.mark.parametrize("first", [0, 1], ids=["aligned", "shifted"])
def test_casts_have_the_bits_and_the_sums_of_torchs(shape, spare, first):
    def strided(dtype: torch.dtype) -> torch.Tensor:
        rows, cols = math.prod(shape[:-1]), shape[-1] + spare
        return random_tensor((first + rows * cols,), dtype, seed=7)[first:].view(*shape[:-1], cols)[..., : shape[-1]]

    source, target = strided(torch.float32), strided(torch.bfloat16)
    flat = source.clone(memory_format=torch.contiguous_format).view(-1)
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x00008000, 0x7F7F8000, 0x7F800000])
    flat[: len(ties)] = ties.to(torch.int32).view(torch.float32)[: flat.numel()]
    flat[-2:] = torch.tensor([-0.0, -math.inf])[-flat.numel() :]
    source.copy_(flat.view(shape))
    wanted = source.contiguous().to(torch.bfloat16)
    piece = TensorPiece(tensor=source, full_shape=shape)
    for goal in (target, None):
        transfer = Transfer(piece=piece, target=goal, total=0, casts=True)
        assert can_transfer(transfer)
        sums = on_cpu.CpuLaunches([transfer], 1).launch()
        assert sums.tolist() == _sums_by_torch([whole(wanted)]).tolist()
    assert raw(target) == raw(wanted)
    target.zero_()
    on_cpu.CpuLaunches([Transfer(piece=piece, target=target, casts=True)], 0).launch()
    assert raw(target) == raw(wanted)


def test_every_float32_is_cast_as_torch_casts_it():
    # The upper half decides with the bits around the middle of the lower one.
    high = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    source = (high[:, None] | low).view(torch.float32).contiguous()
    target = torch.empty_like(source, dtype=torch.bfloat16)
    transfer = Transfer(piece=whole(source), target=target, total=0, casts=True)
    launches = on_cpu.CpuLaunches([transfer], 1, looks=True)
    assert launches.launch().tolist() == _sums_by_torch([whole(source.to(torch.bfloat16))]).tolist()
    assert raw(target) == raw(source.to(torch.bfloat16))
    assert not launches.small
    source.normal_()
    launches.launch()
    assert launches.small
    source[77, 3] = 3.4e38  # finite, and infinite in bfloat16
    launches.launch()
    assert not launches.small


def test_a_cast_is_only_that_of_float32_to_bfloat16():
    source = torch.ones(4, 6)
    for dtype in (torch.float32, torch.float16):
        assert not can_transfer(Transfer(piece=whole(source), target=torch.ones(4, 6, dtype=dtype), casts=True))
    assert not can_transfer(Transfer(piece=whole(source.double()), total=0, casts=True))
    assert not can_transfer(Transfer(piece=whole(source), target=source.bfloat16()))


@pytest.mark.parametrize("cols", [64, 65, 288, 300, 1024], ids=str)
@pytest.mark.parametrize("spare_bytes", [64, 16, 2])
def test_copies_to_rows_that_do_or_do_not_begin_with_a_line_of_the_cache(cols, spare_bytes):
    line = 64
    row_bytes = -(-2 * cols // line) * line + spare_bytes
    room = torch.empty(42 * row_bytes + line, dtype=torch.uint8).random_()
    first = -room.data_ptr() % line + row_bytes
    target = room[first : first + 40 * row_bytes].view(torch.int16).view(40, -1)[:, :cols]
    source = random_tensor((40, cols + 3), torch.int16, seed=3)[:, :cols]
    kept = room.clone()
    kept[first : first + 40 * row_bytes].view(torch.int16).view(40, -1)[:, :cols] = source
    piece = TensorPiece(tensor=source, full_shape=(40, cols))
    sums = on_cpu.CpuLaunches([Transfer(piece=piece, target=target, total=0)], 1).launch()
    assert sums.tolist() == _sums_by_torch([whole(source.contiguous())]).tolist()
    assert torch.equal(room, kept)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_sums_and_copies_between_memory_of_any_strides(data):
    full = data.draw(tensors(max_side=9))
    shape = tuple(full.shape)
    offset = tuple(data.draw(st.integers(0, size)) for size in shape)
    box = Box(
        offset=offset, shape=tuple(data.draw(st.integers(0, n - at)) for n, at in zip(shape, offset, strict=True))
    )
    where = tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))
    source = full[where]
    spare = data.draw(st.integers(0, 3))  # a target whose rows are further apart
    wide = random_tensor((*shape[:-1], shape[-1] + spare) if shape else shape, full.dtype, seed=5)
    target = wide[where]
    kept = wide.clone()
    transfer = Transfer(piece=TensorPiece(tensor=source, full_shape=shape, box=box), target=target, total=1)
    if not can_transfer(transfer):
        return
    sums = on_cpu.CpuLaunches([transfer], 3).launch()
    contiguous = TensorPiece(tensor=source.contiguous(), full_shape=shape, box=box)
    assert sums.tolist() == [0, int(_sums_by_torch([contiguous])[0]), 0]
    kept[where] = source
    assert raw(wide) == raw(kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_at_any_address(dtype):
    for shift in range(9):
        data = bytearray(os.urandom(9 + 96)) if dtype is not torch.bool else bytearray([1, 0] * 53)
        tensor = torch.frombuffer(data, dtype=dtype, offset=shift, count=96 // dtype.itemsize).view(2, -1)
        room = torch.zeros(120, dtype=torch.uint8)
        target = room[8 : 8 + 96].view(dtype).view(2, -1)
        sums = on_cpu.CpuLaunches([Transfer(piece=whole(tensor), target=target, total=0)], 1).launch()
        assert as_unsigned(int(sums)) == sum_by_definition(tensor)
        assert bytes(room.tolist()) == bytes(8) + bytes(data[shift : shift + 96]) + bytes(16)


@pytest.mark.parametrize("shape", [(9,), (40, 30), (9, 1027), (20, 2048), (3, 5000)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("copies", [True, False])
def test_a_launch_that_looks_sees_every_value_that_is_not_finite(shape, dtype, copies):
    tensor = torch.randn(shape).to(dtype)
    target = torch.zeros_like(tensor) if copies else None
    launches = on_cpu.CpuLaunches([Transfer(piece=whole(tensor), target=target, total=0)], 1, looks=True)
    assert launches.launch().tolist() == _sums_by_torch([whole(tensor)]).tolist()
    assert launches.small
    flat = tensor.view(-1)
    for place in {0, 1, 2, 3, tensor.numel() // 2, tensor.numel() - 1}:
        for value in (math.nan, math.inf, -math.inf):
            kept, flat[place] = flat[place].clone(), value
            launches.launch()
            assert not launches.small
            flat[place] = kept
    launches.launch()
    assert launches.small
    launches.launch(summed=False)
    assert not launches.small, "it did not look"


def test_launches_of_many_threads_see_a_value_that_is_not_finite():
    tensor, before = torch.randn(4000, 1024).to(torch.bfloat16), torch.get_num_threads()
    launches = on_cpu.CpuLaunches([Transfer(piece=whole(tensor), total=0)], 1, looks=True)
    try:
        torch.set_num_threads(4)
        launches.launch()
        assert launches.small
        tensor[3999, 1000] = math.nan
        launches.launch()
        assert not launches.small
    finally:
        torch.set_num_threads(before)


def test_copies_without_sums():
    tensor, goal = random_tensor((40, 300), torch.float32), torch.zeros(40, 300)
    launches = on_cpu.CpuLaunches([Transfer(piece=whole(tensor), target=goal, total=0)], 1)
    assert launches.launch(summed=False).tolist() == [0]
    assert raw(goal) == raw(tensor)


def test_any_number_of_threads_gives_the_same():
    some = [random_tensor(shape, torch.bfloat16, seed=7) for shape in ((900, 4096), (5,), (3, 2_000_001), (1000, 999))]
    goals = [torch.zeros_like(tensor) for tensor in some]
    transfers = [Transfer(piece=whole(t), target=g, total=i) for i, (t, g) in enumerate(zip(some, goals, strict=True))]
    launches = on_cpu.CpuLaunches(transfers, len(some))
    expected = _sums_by_torch([whole(tensor) for tensor in some]).tolist()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            for goal in goals:
                goal.zero_()
            assert launches.launch().tolist() == expected
            assert list(map(raw, goals)) == list(map(raw, some))
    finally:
        torch.set_num_threads(before)


def test_launches_that_are_kept_read_the_memory_anew():
    tensor = random_tensor((64, 64), torch.bfloat16)
    launches = on_cpu.CpuLaunches([Transfer(piece=whole(tensor), total=0)], 1)
    assert launches.launch().tolist() == _sums_by_torch([whole(tensor)]).tolist()
    tensor.copy_(random_tensor((64, 64), torch.bfloat16, seed=9))
    assert launches.launch().tolist() == _sums_by_torch([whole(tensor)]).tolist()


def test_memory_that_is_no_rows_of_runs_is_summed_as_well():
    tensor = random_tensor((30, 50), torch.float32)
    assert not on_cpu.takes(whole(tensor.t()))
    assert partial_sums([whole(tensor.t())]).tolist() == _sums_by_torch([whole(tensor.t().contiguous())]).tolist()
    numbers = torch.view_as_complex(tensor.view(30, 25, 2)).conj()
    assert as_unsigned(int(partial_sums([whole(numbers)])[0])) == sum_by_definition(numbers.resolve_conj())


def test_wrong_machine_code_is_not_used(monkeypatch, caplog):
    from weightcast.digest import cpu_kernel

    def wrong(*, cached):
        return lambda *arguments: None

    monkeypatch.setattr(cpu_kernel, "run_tiles", wrong)
    with caplog.at_level("WARNING"):
        assert on_cpu._compiled() is None
    assert "another digest" in caplog.text
