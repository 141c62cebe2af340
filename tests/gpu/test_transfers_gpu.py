"""Copies that are summed on their way: the bytes arrive, and the sums are those of the CPU path."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_digest_gpu import SHAPES, on_gpu, part, random_tensor, whole
from weightcast.digest import far_copies
from weightcast.digest.copy_program import CopyProgram, CopyStep, View, flat_stand_in
from weightcast.digest.definition import partial_sums
from weightcast.digest.pieces import TensorPiece, Transfer
from weightcast.digest.transfers import can_transfer, launches_of, prepare_kernels
from weightcast.wire.box import Box

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda:0")


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def wider(shape: tuple[int, ...], dtype: torch.dtype, first: int) -> torch.Tensor:
    """Zeros of a shape inside of a larger tensor, as a part of a fused parameter is."""
    if len(shape) != 2:
        return torch.zeros(shape, dtype=dtype, device=DEVICE)
    return torch.zeros(shape[0] + 3, shape[1] + 16, dtype=dtype, device=DEVICE)[2:-1, first : first + shape[1]]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.int64], ids=str
)
@pytest.mark.parametrize("first", [0, 1, 16])
@pytest.mark.parametrize("far", [False, True])
def test_every_shape_in_one_launch(dtype, first, far, monkeypatch):
    monkeypatch.setattr(far_copies, "MIN_COPY_BYTES", 1)
    monkeypatch.setattr(far_copies, "MIN_ROW_BYTES", 1)
    pieces = [whole(random_tensor(shape, dtype, seed)) for seed, shape in enumerate(SHAPES)]
    there = [on_gpu(piece) for piece in pieces]
    goals = [wider(tuple(piece.tensor.shape), dtype, first) for piece in pieces]
    transfers = [
        Transfer(
            piece=piece,
            target=None if number % 3 == 1 else goal,
            total=None if number % 3 == 2 else number,
            far=far,
        )
        for number, (piece, goal) in enumerate(zip(there, goals, strict=True))
    ]
    assert all(can_transfer(transfer) for transfer in transfers)
    launches = launches_of(transfers, len(pieces), DEVICE)
    expected = partial_sums(pieces)
    for _ in range(2):
        sums = sums_of(launches).cpu()
        for number, (piece, goal) in enumerate(zip(pieces, goals, strict=True)):
            assert sums[number] == (0 if number % 3 == 2 else expected[number]), piece.tensor.shape
            arrived = torch.zeros_like(piece.tensor) if number % 3 == 1 else piece.tensor
            assert torch.equal(raw(goal), raw(arrived)), piece.tensor.shape
            goal.zero_()


def sums_of(launches) -> torch.Tensor:
    sums = launches.launch()
    assert sums is not None, "made for another stream"
    return sums


@pytest.mark.parametrize("first", [0, 1, 16])
@pytest.mark.parametrize("shift", [0, 1])
def test_masters_are_cast_as_torch_casts_them(first, shift):
    sources = []
    for seed, shape in enumerate(SHAPES):
        source = random_tensor(shape, torch.float32, seed)
        room = torch.empty(shift + source.numel(), device=DEVICE)
        sources.append(room[shift:].view(shape).copy_(source))
    wanted = [source.to(torch.bfloat16) for source in sources]
    pieces = list(map(whole, sources))
    goals = [wider(tuple(source.shape), torch.bfloat16, first) for source in sources]
    transfers = [
        Transfer(
            piece=piece,
            target=None if number % 3 == 1 else goal,
            total=None if number % 3 == 2 else number,
            far=number % 2 == 1,
            casts=True,
        )
        for number, (piece, goal) in enumerate(zip(pieces, goals, strict=True))
    ]
    assert all(map(can_transfer, transfers))
    sums = sums_of(launches_of(transfers, len(pieces), DEVICE)).cpu()
    expected = partial_sums([whole(values.cpu()) for values in wanted])
    for number, (values, goal) in enumerate(zip(wanted, goals, strict=True)):
        assert sums[number] == (0 if number % 3 == 2 else expected[number]), values.shape
        assert torch.equal(raw(goal), raw(torch.zeros_like(values) if number % 3 == 1 else values)), values.shape


def test_every_float32_is_cast_as_torch_casts_it():
    # The upper half decides with the bits around the middle of the lower one; NaN and infinities are among them.
    high = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device=DEVICE) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32, device=DEVICE)
    source = (high[:, None] | low).view(torch.float32).contiguous()
    target = torch.empty_like(source, dtype=torch.bfloat16)
    transfer = Transfer(piece=whole(source), target=target, total=0, casts=True)
    sums_of(launches_of([transfer], 1, DEVICE))
    assert torch.equal(raw(target), raw(source.to(torch.bfloat16)))


def test_nothing_is_written_beside_the_target():
    source = random_tensor((70, 1500), torch.bfloat16).to(DEVICE)
    around = random_tensor((80, 1600), torch.bfloat16, seed=1).to(DEVICE)
    wanted = around.clone()
    wanted[5:75, 8:1508] = source
    transfers = [Transfer(piece=whole(source), target=around[5:75, 8:1508], total=0)]
    sums = sums_of(launches_of(transfers, 1, DEVICE))
    assert torch.equal(raw(around), raw(wanted))
    assert sums.cpu().equal(partial_sums([whole(source.cpu())]))


def test_boxes_of_one_tensor_add_up():
    tensor = random_tensor((300, 4096), torch.bfloat16)
    boxes = [Box(offset=(row, col), shape=(150, 2048)) for row in (0, 150) for col in (0, 2048)]
    there = tensor.to(DEVICE)
    goal = torch.zeros_like(there)
    transfers = [Transfer(piece=part(there, box), target=part(goal, box).tensor, total=0) for box in boxes]
    sums = sums_of(launches_of(transfers, 1, DEVICE))
    assert sums.cpu().equal(partial_sums([whole(tensor)]))
    assert torch.equal(raw(goal), raw(tensor))


def test_a_program_sees_new_values_in_other_memory_and_on_another_stream():
    size_bytes, rows = 1 << 20, 64
    shape = (rows, size_bytes // 2 // rows)
    views = [View(memory, torch.bfloat16, shape, (shape[1], 1), 0) for memory in (0, 1)]
    step = CopyStep(source=views[0], target=views[1], full_shape=shape, total=0)
    program = CopyProgram([step], [flat_stand_in(size_bytes)] * 2, DEVICE, num_sums=1)

    def check(memory: torch.Tensor, goal: torch.Tensor) -> None:
        memory.random_(0, 256)
        sums = program.sums([memory, goal]).cpu()
        assert torch.equal(goal, memory)
        assert sums.equal(partial_sums([whole(memory.cpu().view(torch.bfloat16).view(shape))]))

    memories = [torch.zeros(size_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(4)]
    for source, target in ((0, 1), (0, 1), (2, 3), (0, 1)):
        check(memories[source], memories[target])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        check(memories[0], memories[1])


def test_what_cannot_be_one_launch():
    tensor = random_tensor((64, 128), torch.bfloat16).to(DEVICE)
    assert not can_transfer(Transfer(piece=whole(tensor.t()), total=0))
    assert not can_transfer(Transfer(piece=whole(tensor), target=torch.zeros_like(tensor, dtype=torch.float32)))
    assert not can_transfer(Transfer(piece=whole(tensor), target=torch.zeros(128, 64, device=DEVICE).bfloat16().t()))
    assert not can_transfer(Transfer(piece=whole(tensor), target=torch.zeros(64, 128, dtype=torch.bfloat16)))
    assert can_transfer(Transfer(piece=TensorPiece(tensor=tensor[3:9], full_shape=(6, 128)), target=tensor[20:26]))


def test_nothing_is_compiled_after_the_kernels_were_prepared():
    from weightcast.digest import kernel

    def variants() -> int:
        return len(kernel._sum_tiles.device_caches[DEVICE.index][0])

    prepare_kernels(DEVICE)
    prepared = variants()
    assert prepared >= 6  # words of one and of two bytes and casts, with and without copies
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
        sources = [on_gpu(whole(random_tensor(shape, dtype, seed))) for seed, shape in enumerate(SHAPES)]
        partial_sums(sources)
        for far in (False, True):
            copies = [
                Transfer(piece=piece, target=torch.empty_like(piece.tensor), total=number, far=far)
                for number, piece in enumerate(sources)
            ]
            sums_of(launches_of(copies, len(copies), DEVICE))
    for shift in (0, 1):
        source = torch.randn(64 * 130 + shift, device=DEVICE)[shift:].view(64, 130)
        for goal in (None, torch.empty(64, 130, dtype=torch.bfloat16, device=DEVICE)):
            transfer = Transfer(piece=whole(source), target=goal, total=0, casts=True)
            sums_of(launches_of([transfer], 1, DEVICE))
    assert variants() == prepared
