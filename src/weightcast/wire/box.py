"""The geometry of parts: boxes of a tensor, and spans of strided memory.

Boxes are counted in elements of the full tensor.  Spans are counted in elements of a storage.  Integers only.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_PRIME = 2**61 - 1
_random = random.SystemRandom()


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangular part of a tensor: first index and extent in each dimension, none for a tensor without one."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Span(NamedTuple):
    """A run of elements from ``first`` up to, not including, ``end``."""

    first: int
    end: int

    def overlaps(self, other: Span) -> bool:
        """True if the spans have an element in common."""
        return self.first < other.end and other.first < self.end


def intersection(first: Box, second: Box) -> Box | None:
    """The elements that two boxes of one tensor have in common; None if there are none."""
    offset: list[int] = []
    shape: list[int] = []
    for a, m, b, n in zip(first.offset, first.shape, second.offset, second.shape, strict=True):
        start, end = max(a, b), min(a + m, b + n)
        if start >= end:
            return None
        offset.append(start)
        shape.append(end - start)
    return Box(offset=tuple(offset), shape=tuple(shape))


def contains(outer: Box, inner: Box) -> bool:
    """True if the inner box lies in the outer one; False for boxes with different numbers of dimensions."""
    return len(outer.shape) == len(inner.shape) and all(
        a <= b and b + n <= a + m
        for a, m, b, n in zip(outer.offset, outer.shape, inner.offset, inner.shape, strict=True)
    )


def are_disjoint(boxes: Iterable[Box]) -> bool:
    """True if no two boxes of one tensor overlap.  Empty boxes overlap nothing."""
    groups = [[box for box in boxes if box.numel]]
    while groups:
        group = groups.pop()
        for dim in range(len(group[0].shape) if len(group) > 1 else 0):
            parts = _cut(group, dim)
            if len(parts) > 1:
                groups += parts
                break
        else:
            if not _sweep(group):
                return False
    return True


def _cut(boxes: Sequence[Box], dim: int) -> list[list[Box]]:
    """Divides boxes where a plane across the dimension meets none of them; thousands of experts take no time."""
    parts: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box.offset[dim]):
        if box.offset[dim] >= end:
            parts.append([])
        parts[-1].append(box)
        end = max(end, box.offset[dim] + box.shape[dim])
    return parts


def _sweep(boxes: Sequence[Box]) -> bool:
    """``are_disjoint`` for boxes that no plane divides, which no real model has many of; none is empty."""
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offset):
        active = [other for other in active if not box.offset or other.offset[0] + other.shape[0] > box.offset[0]]
        if any(intersection(box, other) is not None for other in active):
            return False
        active.append(box)
    return True


def tiles(boxes: Iterable[Box], whole: Box) -> bool:
    """True if the boxes are the whole box exactly once.  Its time is linear in their number, whatever a message says.

    The extent of a box from ``a`` to ``b`` is ``f(b) - f(a)`` here, with a random ``f`` for each dimension.  If boxes
    tile the whole one, their volumes add up to its volume for every ``f``.  If not, they do so by chance alone, with a
    probability below 2**-57, which no sender can raise: it does not know ``f`` (lemma of Schwartz and Zippel).
    """
    dims = range(len(whole.shape))
    places: list[dict[int, int]] = [{} for _ in dims]
    rest = 0
    for box, sign in itertools.chain([(whole, 1)], ((box, -1) for box in boxes)):
        if len(box.shape) != len(dims) or len(box.offset) != len(dims):
            return False
        if any(extent < 0 for extent in box.shape):  # its volume would cancel what another box covers too much
            return False
        volume = sign
        for dim in dims:
            f, first = places[dim], box.offset[dim]
            end = first + box.shape[dim]
            for place in (first, end):
                if place not in f:
                    f[place] = _random.getrandbits(60)
            volume = volume * (f[end] - f[first]) % _PRIME
        rest += volume
    return rest % _PRIME == 0


def split(box: Box, max_elements: int) -> Iterator[Box]:
    """Yields boxes of at most ``max_elements`` (at least 1) that make up the box, in row-major order."""
    if box.numel <= max_elements:
        yield box
        return
    dim = next(dim for dim, extent in enumerate(box.shape) if extent > 1)
    step = max(max_elements * box.shape[dim] // box.numel, 1)
    for start in range(0, box.shape[dim], step):
        offset, shape = list(box.offset), list(box.shape)
        offset[dim] += start
        shape[dim] = min(step, box.shape[dim] - start)
        yield from split(Box(offset=tuple(offset), shape=tuple(shape)), max_elements)


def slices(box: Box, origin: tuple[int, ...]) -> tuple[slice, ...]:
    """The box as an index into a tensor whose first element is at ``origin``."""
    return tuple(
        slice(offset - zero, offset - zero + extent)
        for offset, extent, zero in zip(box.offset, box.shape, origin[: len(box.shape)], strict=True)
    )


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def is_one_run(shape: tuple[int, ...], within: tuple[int, ...]) -> bool:
    """True if a box of this shape lies in one run of a contiguous tensor of the other shape."""
    ones = next((dim for dim, extent in enumerate(shape) if extent != 1), len(shape))
    return shape[ones + 1 :] == within[ones + 1 :]


def span_of(offset: int, shape: Sequence[int], stride: Sequence[int]) -> Span:
    """The shortest span that covers a strided region without negative strides; empty for an empty region."""
    if math.prod(shape) == 0:
        return Span(offset, offset)
    return Span(offset, offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)))


def box_of_view(
    full: Sequence[int], offset: int, shape: Sequence[int], stride: Sequence[int]
) -> tuple[Box, tuple[int | None, ...]] | None:
    """Finds the box of a contiguous tensor that a strided view covers.

    Returns:
        The box, and for each dimension of the tensor the dimension of the view that runs along it (None where the
        extent is 1).  None if the view is no box.
    """
    along: list[int | None] = [None] * len(full)
    if math.prod(full) == 0:
        return Box(offset=(0,) * len(full), shape=tuple(full)), tuple(along)
    strides = contiguous_strides(full)
    extent = [1] * len(full)
    for dim, (size, step) in enumerate(zip(shape, stride, strict=True)):
        if size == 1:
            continue
        fits = [k for k in range(len(full)) if along[k] is None and full[k] > 1 and strides[k] == step]
        if not fits:
            return None
        along[fits[0]] = dim
        extent[fits[0]] = size
    start: list[int] = []
    for step in strides:
        start.append(offset // step)
        offset -= start[-1] * step
    if offset or any(first + size > whole for first, size, whole in zip(start, extent, full, strict=True)):
        return None
    return Box(offset=tuple(start), shape=tuple(extent)), tuple(along)
