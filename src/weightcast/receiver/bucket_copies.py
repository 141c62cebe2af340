"""The copies of a bucket, whole or with its parts in several places, and all that goes with a plan.  Numbers only.

A rank's routes say which boxes of the source tensors it keeps.  Boxes of these tensors lie somewhere: in one buffer, in
those of several trainer ranks, or in the messages that they sent.  The copies are the routes, cut to these boxes.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from weightcast.errors import Refused
from weightcast.wire.box import Box, contiguous_strides, intersection, span_of, tiles
from weightcast.wire.bucket_sources import BucketPart, MappedPart
from weightcast.wire.casts import is_copied_cast
from weightcast.wire.layout import DTYPES, BucketLayout, TensorSlot, TensorSpec
from weightcast.wire.pieces import PieceMessage, Wanted, WantedBox, plan_message
from weightcast.wire.plans import UpdateTables
from weightcast.wire.routes import Region, Route

BufferParts = tuple[tuple[BucketPart, ...], ...]


@dataclass(frozen=True, slots=True)
class BufferBox:
    """A box of a slot's tensor, and where it lies.

    Attributes:
        dtype: Dtype of its elements there; where that is not the slot's, they are cast.
        offset: First element, from the buffer's first byte, in elements of that dtype.
        stride: Strides, in elements.
        wanted: The box that this one was asked for as a part of; None if every route may read it.
    """

    buffer: int
    box: Box
    dtype: torch.dtype
    offset: int
    stride: tuple[int, ...]
    wanted: Box | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy out of a buffer into a parameter, in elements.

    Attributes:
        parameter: None for what is summed and not copied.
        offset: Distance from the parameter's first element.
        source_offset: Distance from the buffer's first byte, in elements of the dtype there.
    """

    parameter: str | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    source_stride: tuple[int, ...]
    source_offset: int


@dataclass(frozen=True, slots=True)
class ShareCopy:
    """A copy of one box of a slot's tensor from memory of this dtype; ``total`` is the number of its sum."""

    slot: TensorSlot
    dtype: torch.dtype
    copy: Copy
    box: Box
    total: int


@dataclass(frozen=True, slots=True)
class ShareRoutes:
    """A rank's routes, and the numbers of its sums: of the routes first, then of what is summed as it arrives.

    Attributes:
        computed: The parts that the model's own loader reads of the sources that it computes with, by name.
        firsts: Number of the first route of each source.
        arriving: Number and box of each sum that is taken as a source arrives: of the computed parts, in order, and of
            sources that are compared whole.
        compared: Number of the sum of each source that is compared whole.
    """

    by_source: Mapping[str, Sequence[Route]]
    computed: Mapping[str, Sequence[Box]]
    firsts: Mapping[str, int]
    arriving: Mapping[str, Sequence[tuple[int, Box]]]
    compared: Mapping[str, int]
    num_routes: int
    num_sums: int

    @staticmethod
    def of(
        by_source: Mapping[str, Sequence[Route]],
        computed: Mapping[str, Sequence[Box]],
        compared: Collection[TensorSpec] = (),
    ) -> ShareRoutes:
        """Numbers the sums."""
        firsts: dict[str, int] = {}
        num_routes = 0
        for name, routes in by_source.items():
            firsts[name] = num_routes
            num_routes += len(routes)
        count, arriving, wholes = num_routes, dict[str, list[tuple[int, Box]]](), dict[str, int]()
        for name, boxes in computed.items():
            arriving[name] = list(enumerate(boxes, count))
            count += len(boxes)
        for spec in compared:
            wholes[spec.name] = count
            whole = Box(offset=(0,) * len(spec.shape), shape=spec.shape)
            arriving.setdefault(spec.name, []).append((count, whole))
            count += 1
        return ShareRoutes(by_source, computed, firsts, arriving, wholes, num_routes, count)


@dataclass(frozen=True, slots=True)
class BucketCopies:
    """The copies of one bucket.

    Attributes:
        buffers: The copies out of each buffer.
        wholes: Sources of each slot that the model's own loader takes whole, by the slot's number.
        compared: As that of ``ShareRoutes``, the names of those in the bucket.
        read_bytes: Bytes that are read out of each buffer.
        parameters: Names of the parameters that are written.
        prepared: The programs of a copier, which go with the plan.
    """

    layout: BucketLayout
    parts: BufferParts | tuple[MappedPart, ...]
    buffers: Sequence[Sequence[ShareCopy]]
    wholes: Mapping[int, Sequence[BufferBox]]
    compared: Sequence[str]
    read_bytes: Sequence[int]
    parameters: tuple[str, ...] = field(init=False, compare=False, repr=False)
    prepared: dict[Hashable, object] = field(default_factory=dict[Hashable, object], compare=False, repr=False)

    def __post_init__(self) -> None:
        written = dict.fromkeys(share.copy.parameter for copies in self.buffers for share in copies)
        object.__setattr__(self, "parameters", tuple(name for name in written if name is not None))


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """The messages that bring one bucket, and the copies out of them.

    Attributes:
        starts: First byte of each message in the receive buffer.
        size_bytes: Size of the receive buffer.
        copies: The copies; the receive buffer is the first one, or the only one.
    """

    messages: Sequence[PieceMessage]
    starts: Sequence[int]
    size_bytes: int
    copies: BucketCopies


def wanted_of(expected: Mapping[str, TensorSpec], routes: ShareRoutes) -> Wanted:
    """The boxes that a rank must get: each that it keeps, and the whole of a tensor that its loader computes with."""
    found: Wanted = {}
    for name, spec in expected.items():
        if name in routes.computed:
            found[name] = (WantedBox(offset=(0,) * len(spec.shape), shape=spec.shape),)
        elif routes.by_source.get(name):
            boxes = dict.fromkeys(route.box for route in routes.by_source[name])
            found[name] = tuple(WantedBox(offset=box.offset, shape=box.shape) for box in boxes)
    return found


def plan_whole(layout: BucketLayout, routes: ShareRoutes) -> BucketCopies:
    """Works out the copies out of one buffer with the whole bucket."""
    sources: dict[int, list[BufferBox]] = {}
    for number, slot in enumerate(layout.slots):
        dtype = slot.spec.torch_dtype
        first = slot.offset_bytes // dtype.itemsize
        sources[number] = [BufferBox(0, slot.box, dtype, first, contiguous_strides(slot.shape))]
    return _plan_copies(layout, (), sources, 1, routes)


def plan_scattered(layout: BucketLayout, parts: BufferParts, routes: ShareRoutes) -> BucketCopies:
    """Works out the copies out of several trainer ranks' buckets, in which each part lies at its place.

    Raises:
        Refused: The parts are not every slot exactly once; the text names one tensor.
    """
    _check_parts(layout, parts)
    sources: dict[int, list[BufferBox]] = {}
    for buffer, own in enumerate(parts):
        for part in own:
            sources.setdefault(part.slot, []).append(_in_bucket(layout, part, buffer))
    return _plan_copies(layout, parts, sources, len(parts), routes)


def plan_exchange(
    layout: BucketLayout,
    parts: BufferParts,
    wanted: Wanted,
    routes: ShareRoutes,
    *,
    near: Sequence[int] = (),
    read: bool = False,
) -> ExchangePlan:
    """Works out the messages that bring this rank's share of a bucket, and the copies out of them.

    The parts of the trainer ranks ``near`` are not sent but lie at their places in their buckets.  The receive buffer
    comes first, then these buckets.  ``wanted`` comes from ``wanted_of``; ``read`` is as for
    ``plan_message``.  Raises as ``plan_scattered``.
    """
    _check_parts(layout, parts)
    messages: list[PieceMessage] = []
    starts: list[int] = []
    end = 0
    sources: dict[int, list[BufferBox]] = {}
    buffers = {trainer: number for number, trainer in enumerate(near, 1)}
    for trainer, own in enumerate(parts):
        if trainer in buffers:
            for part in own:
                sources.setdefault(part.slot, []).append(_in_bucket(layout, part, buffers[trainer]))
            own = ()  # nothing of it comes in a message
        boxes = [(part.slot, part.box) for part in own]
        message = plan_message(layout, boxes, wanted, read=read)
        messages.append(message)
        starts.append(end)
        for piece in message.pieces:
            slot = layout.slots[piece.slot]
            dtype = slot.spec.torch_dtype
            first = (end + piece.offset_bytes) // dtype.itemsize
            whole = wanted[slot.spec.name][piece.wanted].box
            source = BufferBox(0, piece.box, dtype, first, contiguous_strides(piece.box.shape), whole)
            sources.setdefault(piece.slot, []).append(source)
        end += message.size_bytes
    copies = _plan_copies(layout, parts, sources, 1 + len(near), routes)
    return ExchangePlan(messages, starts, end, copies)


def plan_mapped(
    layout: BucketLayout, parts: tuple[MappedPart, ...], sizes: Sequence[int], routes: ShareRoutes
) -> BucketCopies:
    """Works out the copies out of trainer ranks' own memory, whose ``sizes`` are in bytes.

    Raises:
        Refused: As ``plan_scattered``; or a part lies beyond its memory, or is kept in a dtype that is not cast here.
    """
    _check_parts(layout, (parts,))
    sources: dict[int, list[BufferBox]] = {}
    for part in parts:
        spec = layout.slots[part.slot].spec
        dtype = DTYPES.get(part.dtype)
        if dtype is None or not (dtype == spec.torch_dtype or is_copied_cast(dtype, spec.torch_dtype)):
            raise Refused(f"{spec.name} travels in {spec.dtype}, and the trainer's memory has it in {part.dtype}")
        whole, odd = divmod(part.first_byte, dtype.itemsize)
        fits = part.memory < len(sizes) and len(part.stride) == len(part.shape) and not odd
        if not fits or span_of(whole, part.shape, part.stride).end * dtype.itemsize > sizes[part.memory]:
            raise Refused(f"{spec.name}: {part.box} does not lie in the memory that was announced")
        sources.setdefault(part.slot, []).append(BufferBox(part.memory, part.box, dtype, whole, part.stride))
    return _plan_copies(layout, parts, sources, len(sizes), routes)


def _in_bucket(layout: BucketLayout, part: BucketPart, buffer: int) -> BufferBox:
    """A part that lies at its place in a bucket."""
    slot = layout.slots[part.slot]
    stride = contiguous_strides(slot.shape)
    first = slot.offset_bytes // slot.spec.torch_dtype.itemsize + sum(
        (at - zero) * step for at, zero, step in zip(part.offset, slot.box.offset, stride, strict=True)
    )
    return BufferBox(buffer, part.box, slot.spec.torch_dtype, first, stride)


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


def _plan_copies(
    layout: BucketLayout,
    parts: BufferParts | tuple[MappedPart, ...],
    sources: Mapping[int, Sequence[BufferBox]],
    num_buffers: int,
    routes: ShareRoutes,
) -> BucketCopies:
    """The copies, once it is shown that together they are each element of each route, once."""
    buffers: list[list[ShareCopy]] = [[] for _ in range(num_buffers)]
    read_bytes = [0] * num_buffers
    wholes: dict[int, Sequence[BufferBox]] = {}
    compared: list[str] = []
    for number, slot in enumerate(layout.slots):
        name, found = slot.spec.name, sources.get(number, ())
        rows, computed = slot.box, slot.spec.name in routes.computed
        if name in routes.compared:
            compared.append(name)
        for total, box in routes.arriving.get(name, ()):
            for source in found:
                if (part := intersection(box, source.box)) is not None:
                    copy = Copy(None, part.shape, (), 0, source.stride, _first(part, source))
                    buffers[source.buffer].append(ShareCopy(slot, source.dtype, copy, part, total))
        if computed:
            if sum(source.box.numel for source in found) != rows.numel:
                raise Refused(f"{name}: not every element would arrive once")
            wholes[number] = found
            for source in found:
                read_bytes[source.buffer] += source.box.numel * source.dtype.itemsize
        for index, route in enumerate(routes.by_source.get(name, ())):
            copied = 0
            for source in found:
                piece = clipped(route, source.box) if computed or source.wanted in (None, route.box) else None
                if piece is not None:
                    copy = _copy_of(piece, source)
                    share = ShareCopy(slot, source.dtype, copy, piece.box, routes.firsts[name] + index)
                    buffers[source.buffer].append(share)
                    copied += piece.box.numel
                    if not computed:
                        read_bytes[source.buffer] += piece.box.numel * source.dtype.itemsize
            expected = intersection(route.box, rows)
            if copied != (expected.numel if expected is not None else 0):
                raise Refused(f"{name}: {copied} of the elements of {route.box} would be written, not each once")
    return BucketCopies(layout, parts, buffers, wholes, compared, read_bytes)


def _copy_of(piece: Route, source: BufferBox) -> Copy:
    region = piece.region
    return Copy(
        parameter=piece.parameter,
        shape=region.shape,
        stride=region.stride,
        offset=region.offset,
        source_stride=source.stride,
        source_offset=_first(piece.box, source),
    )


def _first(box: Box, source: BufferBox) -> int:
    """The first element of a box in the buffer of the source that it is a part of."""
    begin = zip(box.offset, source.box.offset, source.stride, strict=True)
    return source.offset + sum((at - zero) * step for at, zero, step in begin)


def _check_parts(layout: BucketLayout, parts: BufferParts | tuple[tuple[MappedPart, ...]]) -> None:
    """Refuses parts that are not every slot of the bucket exactly once."""
    boxes: dict[int, list[Box]] = {}
    for own in parts:
        for part in own:
            boxes.setdefault(part.slot, []).append(part.box)
    beyond = [number for number in boxes if number >= len(layout.slots)]
    if beyond:
        raise Refused(f"bucket {layout.index} has {len(layout.slots)} slots, and parts of slot {beyond[0]}")
    good: set[object] = set()  # layers are cut alike
    for number, slot in enumerate(layout.slots):
        own_boxes = tuple(boxes.get(number, ()))
        key = slot.spec.shape, slot.first_row, slot.num_rows, own_boxes
        if key not in good:
            _check_tiled(slot, own_boxes)
            good.add(key)


def _check_tiled(slot: TensorSlot, boxes: Sequence[Box]) -> None:
    if not tiles(boxes, slot.box):
        raise Refused(f"{slot.spec.name}: the trainer ranks do not have rows {slot.first_row} and on exactly once")


class LoadPlan:
    """The copies of one plan's buckets.  All that a rank remembers of them is here, and goes with the plan.

    What depends on where parameters lie is checked against their form, or kept by their addresses.

    Attributes:
        hash: Hash of the plan; empty for buckets that come without one.
        parts: As ``UpdateTables.parts``.
        rows: Layout and ``rows_of`` each bucket, by number.
        copies: Copies out of one place or several, by how the parts come and the number of the bucket.
        exchanges: Messages with parts, by whether they are read, the trainer ranks whose parts lie in memory, and the
            number of the bucket.
    """

    def __init__(self, plan: UpdateTables | None = None) -> None:
        self.hash = plan.hash if plan is not None else ""
        self.parts = plan.parts if plan is not None else ()
        self.rows: dict[int, tuple[BucketLayout, Mapping[str, int]]] = {}
        self.copies: dict[tuple[str, int], BucketCopies] = {}
        self.exchanges: dict[tuple[bool, tuple[int, ...], int], ExchangePlan] = {}

    def is_of(self, plan: UpdateTables | None) -> bool:
        """True if updates by this plan find here what they need."""
        return self.hash == (plan.hash if plan is not None else "")
