"""Boxes and spans, held against masks of the elements that they cover."""

import itertools
import math
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.wire.box import (
    Box,
    are_disjoint,
    box_of_view,
    contains,
    contiguous_strides,
    intersection,
    span_of,
    split,
    tiles,
)

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)


@st.composite
def boxes_of(draw, shape, *, empty=False):
    offset = tuple(draw(st.integers(0, size - 1)) for size in shape)
    least = 0 if empty else 1
    return Box(
        offset=offset, shape=tuple(draw(st.integers(least, size - at)) for at, size in zip(offset, shape, strict=True))
    )


def slices(box):
    return tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))


def mask(shape, *boxes):
    """How many of the boxes cover each element."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        counts[slices(box)] += 1
    return counts


@given(st.data())
def test_the_intersection_covers_the_elements_that_both_boxes_cover(data):
    shape = data.draw(SHAPES)
    first, second = data.draw(boxes_of(shape)), data.draw(boxes_of(shape))
    common = intersection(first, second)
    assert common == intersection(second, first)
    wanted = (mask(shape, first) * mask(shape, second)).to(torch.int64)
    assert torch.equal(mask(shape, *([] if common is None else [common])), wanted)


@given(st.data())
def test_a_box_contains_another_if_their_intersection_is_the_other(data):
    shape = data.draw(SHAPES)
    outer, inner = data.draw(boxes_of(shape)), data.draw(boxes_of(shape))
    assert contains(outer, inner) == (intersection(outer, inner) == inner)


def test_no_box_contains_one_with_another_number_of_dimensions():
    assert not contains(Box(offset=(0,), shape=(4,)), Box(offset=(0, 0), shape=(1, 1)))


@given(st.data())
def test_boxes_are_disjoint_if_they_cover_no_element_twice(data):
    shape = data.draw(SHAPES)
    boxes = data.draw(st.lists(boxes_of(shape, empty=True), max_size=6))
    assert are_disjoint(boxes) == (int(mask(shape, *boxes).max()) <= 1)


@given(st.data())
def test_boxes_tile_another_if_they_cover_each_of_its_elements_once_and_no_other(data):
    shape = data.draw(SHAPES)
    whole = data.draw(boxes_of(shape, empty=True))
    # Parts of the whole, which tile it if nothing is done to them, and boxes that lie anywhere.
    boxes = list(split(whole, data.draw(st.integers(1, 20))))
    for _ in range(data.draw(st.integers(0, 2))):
        if boxes and data.draw(st.booleans()):
            boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        else:
            boxes.append(data.draw(boxes_of(shape, empty=True)))
    boxes = data.draw(st.permutations(boxes))
    assert tiles(boxes, whole) == torch.equal(mask(shape, *boxes), mask(shape, whole))


def test_boxes_with_another_number_of_dimensions_tile_nothing():
    assert not tiles([Box(offset=(0,), shape=(4,))], Box(offset=(0, 0), shape=(4, 1)))


def test_a_negative_extent_does_not_cancel_what_another_box_covers_too_much():
    boxes = [Box(offset=(0,), shape=(12,)), Box(offset=(12,), shape=(-2,))]
    assert not tiles(boxes, Box(offset=(0,), shape=(10,)))


def _checkerboard(side):
    return [Box(offset=(i * 4, j * 4), shape=(4, 4)) for i in range(side) for j in range(side)]


def _long(count):
    return [Box(offset=(0, i), shape=(count, 1)) for i in range(count)]


@pytest.mark.parametrize("boxes", [_checkerboard(128), _long(16_384)], ids=["checkerboard", "long"])
def test_many_boxes_are_compared_in_a_moment(boxes):
    ends = [max(box.offset[dim] + box.shape[dim] for box in boxes) for dim in (0, 1)]
    whole = Box(offset=(0, 0), shape=tuple(ends))
    moved = [*boxes[:-1], Box(offset=boxes[-2].offset, shape=boxes[-1].shape)]  # with the same volume
    started = time.process_time()
    found = are_disjoint(boxes), tiles(boxes, whole), are_disjoint(moved), tiles(moved, whole)
    took_s = time.process_time() - started
    assert found == (True, True, False, False)
    assert took_s < 10  # 139 s if each is compared with each


@given(st.data())
def test_the_parts_of_a_split_box_make_it_up_in_order(data):
    shape = data.draw(SHAPES)
    box = data.draw(boxes_of(shape))
    limit = data.draw(st.integers(1, 20))
    parts = list(split(box, limit))
    assert all(part.numel <= limit for part in parts)
    assert torch.equal(mask(shape, *parts), mask(shape, box))
    order = torch.arange(math.prod(shape)).view(shape)
    runs = [order[slices(part)].flatten() for part in parts]
    assert all(int(before[-1]) < int(after[0]) for before, after in pairwise(runs))


@given(SHAPES)
def test_contiguous_strides_are_those_of_torch(shape):
    assert contiguous_strides(shape) == torch.zeros(shape).stride()


@given(st.data())
def test_a_span_covers_a_view_from_its_first_element_to_its_last(data):
    shape = data.draw(SHAPES)
    box = data.draw(boxes_of(shape))
    order = torch.arange(math.prod(shape)).view(shape)
    dims = data.draw(st.permutations(range(len(shape))))
    view = order[slices(box)].permute(tuple(dims))
    span = span_of(int(view.storage_offset()), view.shape, view.stride())
    assert span == (int(view.min()), int(view.max()) + 1)


def test_the_span_of_an_empty_region_is_empty():
    assert span_of(7, (3, 0), (4, 1)) == (7, 7)


@pytest.mark.parametrize(
    ("first", "second", "overlap"),
    [((0, 4), (4, 8), False), ((0, 5), (4, 8), True), ((0, 8), (2, 3), True), ((3, 3), (3, 3), False)],
)
def test_spans_overlap_if_they_have_an_element_in_common(first, second, overlap):
    one, other = (span_of(start, (end - start,), (1,)) for start, end in (first, second))
    assert one.overlaps(other) is overlap
    assert other.overlaps(one) is overlap


def test_a_view_that_is_no_box_is_not_taken_for_one():
    whole = torch.arange(24).view(4, 6)
    for view in (whole[:, ::2], whole.view(-1)[3:9], whole.diagonal()):
        assert box_of_view(whole.shape, int(view.storage_offset()), tuple(view.shape), view.stride()) is None


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def views(draw):
    """A contiguous tensor of its own flat indices and some view of it."""
    shape = draw(shapes)
    whole = torch.arange(math.prod(shape)).reshape(shape)
    view = whole
    plain = True
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(
            st.sampled_from(["narrow", "permute", "select", "unsqueeze", "squeeze", "step", "expand", "flatten"])
        )
        if kind == "unsqueeze":
            view = view.unsqueeze(draw(st.integers(0, view.dim())))
        elif kind == "squeeze":
            view = view.squeeze()
        elif kind == "permute" and view.dim():
            view = view.permute(draw(st.permutations(range(view.dim()))))
        elif kind in ("narrow", "select", "step") and view.dim():
            dim = draw(st.integers(0, view.dim() - 1))
            if not view.shape[dim]:
                continue
            start = draw(st.integers(0, view.shape[dim] - 1))
            if kind == "select":
                view = view.select(dim, start)
            elif kind == "narrow":
                view = view.narrow(dim, start, draw(st.integers(0, view.shape[dim] - start)))
            else:
                view = view[(slice(None),) * dim + (slice(start, None, 2),)]
                plain = False
        elif kind == "expand" and view.dim() and 1 in view.shape:
            view = view.expand([3 if size == 1 else size for size in view.shape])
            plain = False
        elif kind == "flatten" and view.is_contiguous():
            view = view.reshape(-1)
            plain = False
    return whole, view, plain


@settings(max_examples=600, deadline=None)
@given(views())
def test_a_box_is_exactly_what_the_view_shows(case):
    whole, view, plain = case
    found = box_of_view(whole.shape, int(view.storage_offset()), tuple(view.shape), view.stride())
    if found is None:
        assert not plain or not view.numel(), "slices, permutations and dimensions of one are boxes"
        return
    box, dims = found
    part = whole[slices(box)]
    assert tuple(part.shape) == box.shape
    if not view.numel():
        assert not part.numel()
        return
    # Dimension d of the box runs along dimension dims[d] of the view, and every element is in its place.
    long_dims = [dim for dim, size in enumerate(view.shape) if size > 1]
    assert sorted(dim for dim in dims if dim is not None) == long_dims
    for index in itertools.product(*map(range, box.shape)):
        place = [0] * view.dim()
        for box_dim, view_dim in enumerate(dims):
            if view_dim is not None:
                place[view_dim] = index[box_dim]
        assert part[index] == view[tuple(place)]
