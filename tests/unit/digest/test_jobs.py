"""The jobs of the GPU's kernel, carried out in Python: every byte arrives, and every sum is the digest's."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.digest.coefficients import SEED_A, SEED_B, splitmix64
from weightcast.digest.definition import partial_sums
from weightcast.digest.jobs import ALIGNED, COLS, NARROW, TransferJob, TransferPlan, numbered_tiles, plans_of_transfers
from weightcast.digest.pieces import TensorPiece, Transfer
from weightcast.digest.transfers import can_transfer
from weightcast.wire.box import Box

DTYPES = (torch.bfloat16, torch.float32, torch.int8, torch.bool, torch.float64, torch.complex64)


def play(plans: Sequence[TransferPlan], count: int) -> list[int]:
    """The kernel's work on jobs and tiles, in Python."""
    totals = [0] * count
    for plan in plans:
        word = ctypes.c_int8 if plan.word_bytes == 1 else ctypes.c_int16
        jobs = [TransferJob._make(row) for row in plan.jobs.tolist()]
        assert plan.copies == any(job.goal for job in jobs)
        for number, tile in plan.tiles.tolist():
            job = jobs[number]
            across = -(-job.cols // COLS)
            assert job.kind != NARROW or across == 1
            if job.kind == ALIGNED:
                strides = [job.row_stride, job.goal_stride] if job.rows > 1 else []
                moving = [job.address, job.goal, *(size * plan.word_bytes for size in (job.cols, *strides))]
                assert all(place % 16 == 0 for place in moving)
            for row in range(tile // across * job.tile_rows, min(job.rows, (tile // across + 1) * job.tile_rows)):
                for col in range(tile % across * COLS, min(job.cols, (tile % across + 1) * COLS)):
                    value = word.from_address(job.address + (row * job.row_stride + col) * plan.word_bytes)
                    if job.goal:
                        goal = job.goal + (row * job.goal_stride + col) * plan.word_bytes
                        word.from_address(goal).value = value.value
                    if job.total >= 0:
                        column = job.first_column + col // job.run * job.run_stride + col % job.run
                        a = splitmix64((job.first_row + row + SEED_A) % 2**64) | 1
                        b = splitmix64((column + SEED_B) % 2**64) | 1
                        totals[job.total] += value.value * a * b
    return [(total + 2**63) % 2**64 - 2**63 for total in totals]


def noise(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(0, high, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).view(tuple(shape))


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_box_of_any_tensor_goes_anywhere(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    full = tuple(data.draw(st.lists(st.integers(1, 40), max_size=4)))
    if math.prod(full) > 6000:
        full = full[:2]
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in full)
    box = Box(
        offset=offset,
        shape=tuple(data.draw(st.integers(1, size - at)) for at, size in zip(offset, full, strict=True)),
    )
    tensor = noise(full, dtype, data.draw(st.integers(0, 99)))
    part = tensor[tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))]
    gap = data.draw(st.sampled_from([0, 1, 8, 16]))
    rows, width = (box.shape[0], math.prod(box.shape[1:])) if len(full) > 1 else (1, math.prod(box.shape))
    around = noise((rows, width + gap), dtype, 7)
    before = around.clone()
    inner = tuple(math.prod(box.shape[at + 1 :]) for at in range(len(full)))
    goal = around.as_strided(box.shape, (width + gap, *inner[1:]) if len(full) > 1 else inner)
    transfer = Transfer(
        piece=TensorPiece(tensor=part, full_shape=full, box=box if full else None), target=goal, total=0
    )
    if not can_transfer(transfer):
        assert not part.is_contiguous()
        return
    assert play(plans_of_transfers([transfer]), 1) == partial_sums([transfer.piece]).tolist()
    assert raw(goal) == raw(part)
    assert raw(around[:, width:]) == raw(before[:, width:])  # nothing beside it


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_at_once(dtype):
    shapes = [(), (1,), (0, 3), (130,), (3, 63), (3, 64), (65, 70), (2, 1040), (3, 4, 5)]
    pieces = [TensorPiece(tensor=noise(shape, dtype, 3), full_shape=shape) for shape in shapes]
    goals = [torch.zeros_like(piece.tensor) for piece in pieces]
    transfers = [
        Transfer(piece=piece, target=None if number % 3 == 1 else goal, total=None if number % 3 == 2 else number)
        for number, (piece, goal) in enumerate(zip(pieces, goals, strict=True))
    ]
    wanted = partial_sums(pieces).tolist()
    assert play(plans_of_transfers(transfers), len(shapes)) == [
        0 if number % 3 == 2 else total for number, total in enumerate(wanted)
    ]
    for number, (piece, goal) in enumerate(zip(pieces, goals, strict=True)):
        assert raw(goal) == (bytes(goal.nbytes) if number % 3 == 1 else raw(piece.tensor))


def test_parts_of_one_sum():
    tensor = noise((40, 96), torch.bfloat16, 1)
    goal = torch.zeros_like(tensor)
    boxes = [Box(offset=(row, col), shape=(20, 48)) for row in (0, 20) for col in (0, 48)]
    transfers = [
        Transfer(piece=TensorPiece(tensor=tensor[where], full_shape=(40, 96), box=box), target=goal[where], total=0)
        for box in boxes
        for where in [(slice(box.offset[0], box.offset[0] + 20), slice(box.offset[1], box.offset[1] + 48))]
    ]
    assert (
        play(plans_of_transfers(transfers), 1)
        == partial_sums([TensorPiece(tensor=tensor, full_shape=(40, 96))]).tolist()
    )
    assert raw(goal) == raw(tensor)


def test_what_is_no_run_is_not_taken():
    tensor = noise((6, 8), torch.float32, 0)
    for source, target in (
        (tensor.t(), None),
        (tensor, torch.zeros(8, 6).t()),
        (noise((2,), torch.complex64, 0).conj(), None),
    ):
        assert not can_transfer(
            Transfer(piece=TensorPiece(tensor=source, full_shape=tuple(source.shape)), target=target)
        )


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9))
def test_tiles_are_numbered_thing_by_thing(counts):
    wanted = [[thing, tile] for thing, count in enumerate(counts) for tile in range(count)]
    assert numbered_tiles(torch.tensor(counts)).tolist() == wanted
