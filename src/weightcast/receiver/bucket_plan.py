"""The copies that a bucket's layout asks for, worked out from the routes.  Numbers only: no memory is touched."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from weightcast.wire.box import contiguous_strides
from weightcast.wire.layout import BucketLayout, TensorSlot
from weightcast.wire.routes import Route


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy out of a bucket into a parameter, in elements.

    Attributes:
        offset: Distance from the parameter's first element.
        source_offset: Distance from the bucket's first byte, in elements of the slot's dtype.
    """

    parameter: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    source_stride: tuple[int, ...]
    source_offset: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The copies of one bucket.  It holds no views, which would keep the memory of a sleeping engine alive.

    Attributes:
        rows: Number of rows of each tensor by name, if every slot is a whole tensor that is copied or ignored;
            else empty.
        prepared: The programs of a copier, which go with the plan.
    """

    layout: BucketLayout
    table: Sequence[tuple[TensorSlot, Sequence[Copy]]]
    parameters: tuple[str, ...]
    rows: Mapping[str, int]
    prepared: dict[Hashable, object] = field(default_factory=dict[Hashable, object], compare=False, repr=False)


def plan_bucket(layout: BucketLayout, routes: Mapping[str, Sequence[Route]], computed: Collection[str]) -> BucketPlan:
    """Works out the copies of a bucket; ``computed`` names the sources that stay with the model's own loader."""
    table = [
        (slot, [copy for route in routes.get(slot.spec.name, ()) if (copy := _copy_of(route, slot))])
        for slot in layout.slots
    ]
    rows = {slot.spec.name: slot.num_rows for slot in layout.slots if slot.whole}
    if len(rows) != len(table) or any(name in computed for name in rows):
        rows = {}
    return BucketPlan(
        layout=layout,
        table=table,
        parameters=tuple(dict.fromkeys(copy.parameter for _, copies in table for copy in copies)),
        rows=rows,
    )


def _copy_of(route: Route, slot: TensorSlot) -> Copy | None:
    """The part of a route that lies in the slot's rows; None if none does."""
    region, stride = route.region, contiguous_strides(slot.shape)
    start = slot.offset_bytes // slot.spec.torch_dtype.itemsize
    if not slot.spec.shape:
        return Copy(route.parameter, region.shape, region.stride, region.offset, stride, start)
    first = max(route.box_offset[0], slot.first_row)
    last = min(route.box_offset[0] + route.box_shape[0], slot.first_row + slot.num_rows)
    if last <= first:
        return None
    begin = (first - slot.first_row, *route.box_offset[1:])
    return Copy(
        parameter=route.parameter,
        shape=(last - first, *route.box_shape[1:]),
        stride=region.stride,
        offset=region.offset + (first - route.box_offset[0]) * region.stride[0],
        source_stride=stride,
        source_offset=start + sum(at * step for at, step in zip(begin, stride, strict=True)),
    )
