"""Maps boxes of the trainer's tensors to boxes of the tensors that travel, with dimensions perhaps in another order.

Segments are views only.  The gatherer needs nothing else from a table of names and layouts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from weightcast.errors import ConfigError
from weightcast.wire.box import Box, contains, intersection, tiles

NEW = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A box of a stored tensor that is a box of a travelling one.

    Attributes:
        box: Box in the stored tensor.
        dims: For each dimension of the travelling tensor, the stored tensor's dimension, or ``NEW`` for one of extent 1
            that the stored tensor does not have.  Stored dimensions that are not listed have extent 1 in ``box`` and
            disappear.
        at: First element of the box in the travelling tensor.
    """

    source: int
    box: Box
    dims: tuple[int, ...]
    at: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the box in the travelling tensor."""
        return tuple(1 if dim == NEW else self.box.shape[dim] for dim in self.dims)

    def target_box(self, held: Box) -> Box | None:
        """Maps a box of the stored tensor to the travelling tensor, clipped to this segment; None if it is outside."""
        # A tensor without elements has one empty part, which has no intersection.
        if held == self.box or (contains(held, self.box) and self.box.numel):
            return Box(offset=self.at, shape=self.shape)
        common = intersection(held, self.box)
        if common is None:
            return None
        return Box(
            offset=tuple(
                at if dim == NEW else at + common.offset[dim] - self.box.offset[dim]
                for at, dim in zip(self.at, self.dims, strict=True)
            ),
            shape=tuple(1 if dim == NEW else common.shape[dim] for dim in self.dims),
        )

    def source_box(self, box: Box) -> Box:
        """Maps a box of the travelling tensor, inside this segment, to the stored tensor."""
        offset, shape = list(self.box.offset), [1] * len(self.box.shape)
        for start, extent, at, dim in zip(box.offset, box.shape, self.at, self.dims, strict=True):
            if dim != NEW:
                offset[dim] += start - at
                shape[dim] = extent
        return Box(offset=tuple(offset), shape=tuple(shape))

    def view(self, part: torch.Tensor, origin: tuple[int, ...], box: Box) -> torch.Tensor:
        """A box of the travelling tensor, inside this segment, in memory.  No copy.

        Args:
            part: Part of the stored tensor that contains the box.
            origin: First element of ``part`` in the stored tensor.
        """
        strides, offset, steps = part.stride(), int(part.storage_offset()), list[int]()
        for start, zero, stride in zip(self.box.offset, origin, strides, strict=True):
            offset += (start - zero) * stride
        for start, at, dim in zip(box.offset, self.at, self.dims, strict=True):
            steps.append(1 if dim == NEW else strides[dim])
            offset += (start - at) * steps[-1]
        return part.as_strided(box.shape, steps, offset)  # one view: a large model has tens of thousands

    @staticmethod
    def whole(source: int, shape: tuple[int, ...]) -> Segment:
        """The segment of a stored tensor that travels as it is."""
        origin = (0,) * len(shape)
        return Segment(source=source, box=Box(offset=origin, shape=shape), dims=tuple(range(len(shape))), at=origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arranged:
    """A travelling tensor (name that engines know, unsharded shape) and the disjoint segments that cover it."""

    name: str
    shape: tuple[int, ...]
    segments: tuple[Segment, ...]


def check_used_once(
    stored: Sequence[tuple[str, tuple[int, ...]]], arranged: Iterable[Arranged], *, left_out: Collection[str] = ()
) -> None:
    """Refuses an arrangement that does not use every element of every stored tensor exactly once.

    Args:
        left_out: Names of stored tensors that need not travel.

    Raises:
        ConfigError: Elements are left out or used twice, or a travelling tensor has gaps; the text names one tensor.
    """
    used: dict[int, list[Box]] = {}
    for tensor in arranged:
        segments = tensor.segments
        # One segment as large as the tensor, at its start, covers it: nearly always.
        if len(segments) != 1 or any(segments[0].at) or segments[0].shape != tensor.shape:
            _check_tiled(tensor.name, tensor.shape, [Box(offset=s.at, shape=s.shape) for s in segments])
        for segment in segments:
            used.setdefault(segment.source, []).append(segment.box)
    for number, (name, shape) in enumerate(stored):
        if number in used or name not in left_out:
            _check_tiled(name, shape, used.get(number, []))


def _check_tiled(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Refuses boxes that do not cover the shape exactly once."""
    if not tiles(boxes, Box(offset=(0,) * len(shape), shape=shape)):
        volume = sum(box.numel for box in boxes)
        raise ConfigError(
            f"{name} {list(shape)}: the table of names uses {volume} of its {math.prod(shape)} elements, "
            "or uses some of them twice or beyond its end"
        )
