"""Boxes of a trainer's tensors that are boxes of the tensors that travel, their dimensions perhaps in another order.

What a table of names and layouts comes down to, and all that gathering needs of it: which part of which stored tensor
is which part of which travelling one.  Views only.  Knows no names' meaning, no family and no mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from weightcast.errors import ConfigError
from weightcast.wire.digest import Box

NEW = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A box of a stored tensor that is a box of a travelling one.

    Attributes:
        source: Number of the stored tensor.
        box: Where in the stored tensor.
        dims: For each dimension of the travelling tensor, which of the stored tensor's it is, or ``NEW``: one that the
            stored tensor does not have, of extent 1.  Stored dimensions that are not listed have extent 1 in ``box``
            and disappear.
        at: Where in the travelling tensor the box begins.
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
        """What of a box of the stored tensor travels through this segment, as a box of the travelling tensor."""
        # A part may be empty: a tensor without elements has one.
        common = held if held == self.box else intersection(held, self.box)
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
        """Where a box of the travelling tensor, inside this segment, lies in the stored tensor."""
        offset, shape = list(self.box.offset), [1] * len(self.box.shape)
        for start, extent, at, dim in zip(box.offset, box.shape, self.at, self.dims, strict=True):
            if dim != NEW:
                offset[dim] += start - at
                shape[dim] = extent
        return Box(offset=tuple(offset), shape=tuple(shape))

    def view(self, part: torch.Tensor) -> torch.Tensor:
        """A stored part, a box of this segment, with the travelling tensor's dimensions.  No copy."""
        kept = [dim for dim in self.dims if dim != NEW]
        gone = [dim for dim in range(part.dim()) if dim not in kept]
        view = part.permute((*kept, *gone))
        for _ in gone:
            view = view.squeeze(-1)
        for place, dim in enumerate(self.dims):
            view = view.unsqueeze(place) if dim == NEW else view
        return view

    @staticmethod
    def whole(source: int, shape: tuple[int, ...]) -> Segment:
        """A stored tensor that travels as it is."""
        origin = (0,) * len(shape)
        return Segment(source=source, box=Box(offset=origin, shape=shape), dims=tuple(range(len(shape))), at=origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arranged:
    """A travelling tensor and where its values are.

    Attributes:
        name: As engines know it.
        shape: Whole and unsharded.
        segments: Disjoint, and together the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    segments: tuple[Segment, ...]


def check_used_once(stored: Sequence[tuple[str, tuple[int, ...]]], arranged: Iterable[Arranged]) -> None:
    """Refuse an arrangement that does not use every element of every stored tensor exactly once.

    Args:
        stored: Name and shape of the trainer's tensors.
        arranged: What travels.

    Raises:
        ConfigError: Elements are left out, used twice, or a travelling tensor has gaps; the text names one tensor.
    """
    used: dict[int, list[Box]] = {}
    for tensor in arranged:
        _check_tiled(tensor.name, tensor.shape, [Box(offset=s.at, shape=s.shape) for s in tensor.segments])
        for segment in tensor.segments:
            used.setdefault(segment.source, []).append(segment.box)
    for number, (name, shape) in enumerate(stored):
        _check_tiled(name, shape, used.get(number, []))


def _check_tiled(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Boxes inside the shape, disjoint, and of its volume."""
    inside = all(
        start >= 0 and start + length <= extent
        for box in boxes
        for start, length, extent in zip(box.offset, box.shape, shape, strict=True)
    )
    volume = sum(math.prod(box.shape) for box in boxes)
    if not inside or volume != math.prod(shape) or not _are_apart(boxes):
        raise ConfigError(
            f"{name} {list(shape)}: the table of names uses {volume} of its {math.prod(shape)} elements, "
            "or some twice or beyond its end"
        )


def _are_apart(boxes: Sequence[Box]) -> bool:
    """True if no two boxes overlap; by sweeping the first dimension, so that thousands of experts take no time."""
    if len(boxes) < 2:
        return True
    ordered = sorted((box for box in boxes if math.prod(box.shape)), key=lambda box: box.offset)
    active: list[Box] = []
    for box in ordered:
        active = [other for other in active if not box.offset or other.offset[0] + other.shape[0] > box.offset[0]]
        if any(intersection(box, other) is not None for other in active):
            return False
        active.append(box)
    return True


def intersection(first: Box, second: Box) -> Box | None:
    """What two boxes of one tensor have in common; None if that is nothing."""
    offset: list[int] = []
    shape: list[int] = []
    for a, m, b, n in zip(first.offset, first.shape, second.offset, second.shape, strict=True):
        start, end = max(a, b), min(a + m, b + n)
        if start >= end:
            return None
        offset.append(start)
        shape.append(end - start)
    return Box(offset=tuple(offset), shape=tuple(shape))
