"""The copies out of a bucket whose parts lie in the buffers of several trainer ranks.  Numbers only.

A rank's routes say which boxes of the source tensors it keeps.  Each buffer has some boxes of them.  The copies out of
one buffer are the routes, cut to the boxes of that buffer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from weightcast.errors import Refused
from weightcast.receiver.bucket_plan import BucketPlan, plan_bucket
from weightcast.wire.box import Box, are_disjoint, intersection
from weightcast.wire.layout import BucketLayout, TensorSlot
from weightcast.wire.messages import Part
from weightcast.wire.routes import Region, Route

Parts = tuple[tuple[Part, ...], ...]


@dataclass(frozen=True, slots=True)
class ScatteredPlan:
    """The copies of one bucket.

    Attributes:
        layout: The bucket's table of contents.
        parts: The parts of each buffer.
        buffers: The copies out of each buffer.
        boxes: Number of the buffer and box of each part of a slot, by the slot's number, for slots that the model's
            own loader takes whole.
        read_bytes: Bytes that this rank reads.
    """

    layout: BucketLayout
    parts: Parts
    buffers: Sequence[BucketPlan]
    boxes: Mapping[int, Sequence[tuple[int, Box]]]
    read_bytes: int


def plan_scattered(
    layout: BucketLayout, parts: Parts, routes: Mapping[str, Sequence[Route]], computed: Collection[str]
) -> ScatteredPlan:
    """Works out the copies out of several buffers.

    Args:
        layout: The bucket's table of contents.
        parts: The parts of each buffer.
        routes: Routes by source name.
        computed: Names of the sources that stay with the model's own loader.

    Raises:
        Refused: The parts are not every slot exactly once; the text names one tensor.
    """
    boxes: dict[int, list[tuple[int, Box]]] = {}
    for buffer, own in enumerate(parts):
        for part in own:
            boxes.setdefault(part.slot, []).append((buffer, Box(offset=part.offset, shape=part.shape)))
    beyond = [number for number in boxes if number >= len(layout.slots)]
    if beyond:
        raise Refused(f"bucket {layout.index} has {len(layout.slots)} slots, and parts of slot {beyond[0]}")
    for number, slot in enumerate(layout.slots):
        _check_tiled(slot, [box for _, box in boxes.get(number, ())])
    cut: list[dict[str, list[Route]]] = [{} for _ in parts]
    for number, slot in enumerate(layout.slots):
        for route in routes.get(slot.spec.name, ()):
            for buffer, box in boxes.get(number, ()):
                piece = clipped(route, box)
                if piece is not None:
                    cut[buffer].setdefault(slot.spec.name, []).append(piece)
    plans = [plan_bucket(layout, own, ()) for own in cut]
    whole = {number: boxes.get(number, []) for number, slot in enumerate(layout.slots) if slot.spec.name in computed}
    read = sum(
        math.prod(copy.shape) * slot.spec.torch_dtype.itemsize
        for plan in plans
        for slot, copies in plan.table
        for copy in copies
    )
    read += sum(layout.slots[number].size_bytes for number in whole)
    return ScatteredPlan(layout, parts, plans, whole, read)


def clipped(route: Route, box: Box) -> Route | None:
    """The part of a route that lies in a box of the source; None if none does."""
    common = intersection(route.box, box)
    if common is None:
        return None
    region = route.region
    first = sum(
        (start - begin) * step
        for start, begin, step in zip(common.offset, route.box_offset, region.stride, strict=True)
    )
    return msgspec.structs.replace(
        route,
        box_offset=common.offset,
        box_shape=common.shape,
        region=Region(offset=region.offset + first, shape=common.shape, stride=region.stride),
    )


def _check_tiled(slot: TensorSlot, boxes: Sequence[Box]) -> None:
    shape = slot.spec.shape
    rows = Box(offset=(slot.first_row, *(0 for _ in shape[1:])) if shape else (), shape=slot.shape)
    fits = all(len(box.shape) == len(box.offset) == len(rows.shape) for box in boxes)
    inside = fits and all(not box.numel or intersection(box, rows) == box for box in boxes)
    if not inside or sum(box.numel for box in boxes) != rows.numel or not are_disjoint(boxes):
        raise Refused(f"{slot.spec.name}: the buffers do not have rows {slot.first_row} and on exactly once")
