"""Which copies copy engines can make, and that they are those of torch."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightcast.digest import far_copies
from weightcast.digest.far_copies import far_copy


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_copies, "MIN_COPY_BYTES", 1)
    monkeypatch.setattr(far_copies, "MIN_ROW_BYTES", 1)


@st.composite
def views(draw, shape: tuple[int, ...]) -> torch.Tensor:
    """A view of a shape in memory with gaps, its dimensions in any order."""
    order = draw(st.permutations(range(len(shape))))
    around = [shape[dim] + draw(st.integers(0, 2)) for dim in order]
    memory = torch.zeros(around, dtype=torch.int16)
    index = tuple(slice(0, shape[dim]) for dim in order)
    return memory[index].permute([order.index(dim) for dim in range(len(shape))])


@given(st.data())
def test_a_copy_moves_what_torch_would_move(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    source, target = data.draw(views(shape)), data.draw(views(shape))
    source.copy_(torch.arange(1, source.numel() + 1, dtype=torch.int16).view(shape))
    copy = far_copy(source, target)
    if copy is None:
        return
    for row in range(copy.rows):
        ctypes.memmove(copy.target + row * copy.target_pitch, copy.source + row * copy.source_pitch, copy.row_bytes)
    assert torch.equal(target, source)
    assert copy.rows * copy.row_bytes == source.nbytes


def test_whole_rows_are_one_line_and_columns_a_rectangle():
    memory = torch.zeros(8, 6, 4)
    assert far_copy(memory[2:5], torch.zeros(3, 6, 4))[2:4] == (1, 3 * 6 * 4 * 4)
    assert far_copy(memory[:, 2:4], torch.zeros(8, 2, 4))[2:] == (8, 2 * 4 * 4, 6 * 4 * 4, 2 * 4 * 4)
    assert far_copy(memory[:, :, 1:3], torch.zeros(8, 6, 2))[2:] == (48, 8, 16, 8)


def test_what_no_rectangle_describes_is_left_to_a_kernel():
    memory = torch.zeros(8, 6, 4)
    assert far_copy(memory[:, :3, :2], torch.zeros(8, 3, 2)) is None
    assert far_copy(torch.zeros(4, 6).t(), torch.zeros(6, 4)) is None
    assert far_copy(torch.zeros(1, 6).expand(4, 6), torch.zeros(4, 6)) is None


def test_small_copies_and_short_rows_are_left_to_a_kernel(monkeypatch):
    monkeypatch.setattr(far_copies, "MIN_COPY_BYTES", 1024)
    assert far_copy(torch.zeros(16, 15), torch.zeros(16, 15)) is None
    assert far_copy(torch.zeros(16, 16), torch.zeros(16, 16)) is not None
    monkeypatch.setattr(far_copies, "MIN_ROW_BYTES", 65)
    assert far_copy(torch.zeros(16, 32)[:, :16], torch.zeros(16, 16)) is None
    assert far_copy(torch.zeros(16, 32)[:, :17], torch.zeros(16, 17)) is not None
