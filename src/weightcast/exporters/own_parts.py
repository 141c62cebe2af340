"""Copies the parts of a bucket that this rank holds into it, and sums them for the digest.

The places of parts in memory are worked out once and reused as long as the model's tensors lie alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weightcast.digest.copies import Flat, bits, copy_all
from weightcast.digest.definition import partial_sums
from weightcast.digest.pieces import TensorPiece, Transfer, check_piece
from weightcast.digest.source_sums import Taker
from weightcast.digest.templates import NOWHERE, Placed, StandIns, Template, can_stand_in, flat_stand_in
from weightcast.digest.transfers import PlacedLaunches, can_transfer, transfers_on, worth_launch
from weightcast.errors import ConfigError
from weightcast.exporters.held_parts import HeldParts, InMemory, Seen, Watched, Write, region, to_sum
from weightcast.protocols import Lying
from weightcast.runtime.free_memory import Scratch
from weightcast.wire.box import Box, contiguous_strides, slices, split
from weightcast.wire.bucket import Bucket
from weightcast.wire.casts import is_copied_cast
from weightcast.wire.layout import BucketLayout, TensorSlot

# A shard that is cast before it is sent is cast in blocks of this many bytes to be summed.
_CAST_BYTES = 16 << 20

# What ``PlacedLaunches.small`` says enough of.
_LOOKED_AT = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class OwnPart:
    """A part of one slot that this rank holds.

    Attributes:
        number: Number of the slot in its bucket.
        box: Place of the part in the whole tensor.
        place: Place of its sum among this rank's sums of the bucket; None if this rank sums none of the values.
        origin: Place of the sum of ``Held.origin``; None if that is not summed.
    """

    slot: TensorSlot
    number: int
    box: Box
    place: int | None
    origin: int | None
    computed: bool


class _View(NamedTuple):  # made faster than a frozen class, and there may be tens of thousands
    """A part of this rank's memory, in elements: a box of the tensor in one slot.

    Numbers only: a view would keep memory alive that the trainer wants to free between two updates.  ``own`` is the
    number of the part; dtype and device are those of the memory.
    """

    own: int
    source: int
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    full_shape: tuple[int, ...]
    box: Box

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.detach().as_strided(self.shape, self.stride, int(memory.storage_offset()) + self.offset)

    def piece(self, memory: torch.Tensor) -> TensorPiece:
        return TensorPiece(
            tensor=self.of(memory), full_shape=self.full_shape, box=self.box if self.full_shape else None
        )


class _Copy(NamedTuple):
    """A copy out of this rank's memory into a bucket."""

    view: _View
    dtype: torch.dtype
    target_stride: tuple[int, ...]
    target_offset: int

    def transfer(self, source: torch.Tensor, flat: Flat) -> Transfer:
        target = flat.region(self.dtype, self.view.shape, self.target_stride, self.target_offset, as_bits=False)
        casts = is_copied_cast(self.view.dtype, self.dtype)
        return Transfer(piece=self.view.piece(source), target=target, total=self.view.own, casts=casts)


class _ComputedSums:
    """The sums of computed values, where they have been written into a bucket."""

    def __init__(self, layout: BucketLayout, parts: Sequence[OwnPart], device: torch.device) -> None:
        self._parts = parts
        self._places = torch.tensor([own.place for own in parts], dtype=torch.int64)
        pieces = self._pieces(Bucket(layout, flat_stand_in(layout.size_bytes)))
        transfers = [Transfer(piece=piece, total=number) for number, piece in enumerate(pieces)]
        self._template: Template | None = None
        if parts and transfers_on(device) and all(map(can_transfer, transfers)):
            self._template = Template(transfers, [(0, NOWHERE)] * len(transfers), device)
        self._launches = PlacedLaunches(device, len(parts))

    def take(self, bucket: Bucket, taker: Taker) -> None:
        template, address = self._template, bucket.data.data_ptr()
        if template is not None:
            taker.add(self._places, self._launches.run(address, lambda: Placed(template, [address])))
        elif self._parts:
            taker.add(self._places, partial_sums(self._pieces(bucket)))

    def _pieces(self, bucket: Bucket) -> list[TensorPiece]:
        return [to_sum(own.slot, own.box, region(bucket, own.slot, own.box)) for own in self._parts]


@dataclass(frozen=True, slots=True, eq=False)
class _Copies:
    """The copies of the parts into a bucket.

    ``launches`` copy and sum those of ``template``, wherever bucket and sources lie; there are none if it is None.
    """

    template: Template | None
    launches: PlacedLaunches
    plain: list[_Copy]
    computed: _ComputedSums


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """The sums of parts of one device, where they lie; ``template`` is None where a launch is not worth it.

    ``places`` are those of the sums among this rank's sums of the bucket.
    """

    views: list[_View]
    places: torch.Tensor
    template: Template | None
    launches: PlacedLaunches


@dataclass(slots=True, eq=False)
class _Steps:
    """Where the parts lie, and what reads them there: valid while the sources lie as in ``layout``, a ``Seen.layout``.

    Attributes:
        views: The parts in memory that is watched.
        rest: The others, which are found and written anew each time.
        copies: None until it is needed.
        sums: For each device; None until it is needed.
        served: Number of the slot and view of each part that others read; None until it is needed.
        summed_anew: Parts that ``sums`` does not have: they are cast before they are sent, or computed.
    """

    sources: list[int]
    watched: Watched
    layout: object
    views: list[_View]
    rest: list[OwnPart]
    copies: _Copies | None = None
    sums: list[_Sums] | None = None
    served: list[tuple[int, _View]] | None = None
    summed_anew: Sequence[OwnPart] = ()


# Steps that fit the parts as they were seen just now.
PartsSeen = tuple[_Steps, Seen]


class OwnMemory(Lying):
    """The parts that others read where this rank keeps them.  ``stamp`` stays equal while none of them moves."""

    def __init__(self, look: PartsSeen) -> None:
        self.stamp: object = (look[0], look[1].place)
        self._look = look

    def views(self) -> list[tuple[int, Box, torch.Tensor]]:
        """Number of the slot, box and memory of each part."""
        steps, found = self._look
        memory = dict(zip(steps.sources, found.tensors, strict=True))
        return [(number, view.box, view.of(memory[view.source])) for number, view in steps.served or ()]


class OwnParts:
    """The parts of one bucket that this rank holds, and all that is remembered of them: it goes with the bucket."""

    def __init__(self, layout: BucketLayout, parts: Sequence[OwnPart], held: HeldParts, device: torch.device) -> None:
        """Looks at nothing yet; ``device`` is that of the bucket."""
        self._layout = layout
        self._parts = parts
        self._held = held
        self._device = device
        self._places = torch.tensor([own.place for own in parts if own.place is not None], dtype=torch.int64)
        whole = sum(own.box.numel for own in parts) == sum(slot.box.numel for slot in layout.slots)
        # Computed values are not among the sums in place: nothing has looked at them then.
        seen = whole and not any(own.computed for own in parts)
        self._looks = seen and all(slot.spec.torch_dtype in _LOOKED_AT for slot in layout.slots)
        self._one_each = [own.number for own in parts] == list(range(len(layout.slots)))
        self._steps: _Steps | None = None

    def __bool__(self) -> bool:
        return bool(self._parts)

    def look(self) -> PartsSeen:
        """Looks where the parts lie now.  It holds until the trainer goes on."""
        steps, found = self._steps, None
        if steps is not None:
            found = steps.watched.now()
        if steps is None or found is None or found.layout is not steps.layout:
            steps, found = self._find()
            self._steps = steps
        return steps, found

    def prepare(self, *, copies: bool, sums: bool, data: torch.Tensor | None = None) -> None:
        """Works out what ``copy_into`` and ``sum_in_place`` need to know, without reading the parts.

        Args:
            copies: True if parts will be copied into a bucket, else they are read where they lie.
            sums: True if parts will be summed.
            data: The buffer that they will be copied into; None if that is not there yet.
        """
        if not self._parts:
            return
        summed, look = False, self.look()
        steps, found = look
        if copies:
            copying = self._copies(look)
            if copying.template is not None and data is not None:
                copying.launches.prepare(*_placing(copying.template, found, data.data_ptr()))
            if steps.rest and data is not None:
                bucket = Bucket(self._layout, data)
                self._held.prepare_all(bucket, steps.rest, lambda: self._writes(steps.rest, bucket))
            summed = not copying.plain and not steps.rest
        if sums and not summed:
            for one in self._sums(look):
                if one.template is not None:
                    one.launches.prepare(*_placing(one.template, found))

    def copy_into(self, bucket: Bucket, taker: Taker | None, look: PartsSeen) -> torch.Tensor | None:
        """Copies the parts into the bucket.  Computed values are summed there.

        Returns:
            The sums of the slots, if all parts were summed on the way; ``taker`` has them too then.
        """
        steps, found = look
        copying = self._copies(look)
        # Of some slots there would be no sum: then all parts are summed where they lie.
        summed = taker is not None and not copying.plain and not steps.rest
        if copying.template is not None:
            placing = _placing(copying.template, found, bucket.data.data_ptr())
            sums = copying.launches.run(*placing, summed=summed)
            if taker is not None and summed:
                taker.add(self._places, sums)
                self._saw(copying.launches, taker)
                return self._by_slot(sums)
        _copy_plainly(copying.plain, look, bucket)
        if steps.rest:
            self._held.write_all(bucket, steps.rest, lambda: self._writes(steps.rest, bucket))
        if taker is not None:
            copying.computed.take(bucket, taker)
        return None

    def _writes(self, parts: Sequence[OwnPart], bucket: Bucket) -> list[Write]:
        return [
            (self._held.find(own.slot.spec.name, own.box), own.box, region(bucket, own.slot, own.box)) for own in parts
        ]

    def sum_in_place(self, taker: Taker, look: PartsSeen) -> None:
        """Sums the parts where they lie, unless they were summed while they were copied."""
        steps, sums = look[0], self._sums(look)
        for one in sums:
            self._sum_views(one, look, taker)
        if len(sums) == 1 and not steps.summed_anew and sums[0].template is not None:
            self._saw(sums[0].launches, taker)
        scratch = Scratch()
        for own in steps.summed_anew:
            if own.computed:
                self._sum_origin(own, taker)
        for device, parts in self._cast_parts([own for own in steps.summed_anew if not own.computed]):
            self._sum_cast(parts, device, taker, scratch)

    def lying(self, served: Sequence[tuple[int, Box]]) -> OwnMemory:
        """Places of the parts that others read, by number of the slot and box; always the same ones.

        ``ConfigError`` says which part is not kept as it is sent.
        """
        look = self.look()
        if look[0].served is None:
            look[0].served = self._served_views(served, look[0].views)
        return OwnMemory(look)

    def _served_views(self, served: Sequence[tuple[int, Box]], views: Sequence[_View]) -> list[tuple[int, _View]]:
        """Number of the slot and view of each part."""
        known = {(self._parts[view.own].number, view.box): view for view in views}
        found: list[tuple[int, _View]] = []
        for number, box in served:
            spec, view = self._layout.slots[number].spec, known.get((number, box))
            fits = view is not None and (view.dtype == spec.torch_dtype or is_copied_cast(view.dtype, spec.torch_dtype))
            if view is None or not fits:
                why = "its values are computed when they are sent" if view is None else f"it is kept in {view.dtype}"
                raise ConfigError(
                    f"{spec.name} cannot be read in place: {why}, and it travels in {spec.dtype}",
                    hint="leave keep_mapped out, or send the dtype that the trainer keeps",
                )
            found.append((number, view))
        return found

    def _by_slot(self, sums: torch.Tensor) -> torch.Tensor:
        count = len(self._layout.slots)
        if self._one_each:
            return sums
        numbers = torch.tensor([own.number for own in self._parts], device=sums.device)
        return torch.zeros(count, dtype=sums.dtype, device=sums.device).index_add_(0, numbers, sums)

    def _find(self) -> PartsSeen:
        """Finds the place of each part in a tensor that is watched."""
        rest: list[OwnPart] = []
        places: list[tuple[int, int, Box, torch.Tensor]] = []
        for number, own in enumerate(self._parts):
            held = self._held.find(own.slot.spec.name, own.box)
            if self._held.watches and isinstance(held, InMemory) and held.source is not None:
                places.append((number, held.source, held.box, held.memory))
            else:
                rest.append(own)
        sources = list(dict.fromkeys(source for _, source, _, _ in places))
        watched = self._held.watch(sources)
        found = watched.now()
        wholes = dict(zip(sources, found.tensors, strict=True))
        views: list[_View] = []
        for number, source, box, memory in places:
            own, whole = self._parts[number], wholes[source]
            part = memory if own.box == box else memory[slices(own.box, box.offset)]
            view = _View(
                own=number,
                source=source,
                dtype=whole.dtype,
                device=whole.device,
                shape=tuple(part.shape),
                stride=part.stride(),
                offset=int(part.storage_offset()) - int(whole.storage_offset()),
                full_shape=own.slot.spec.shape,
                box=own.box,
            )
            views.append(view)
        return _Steps(sources, watched, found.layout, views, rest), found

    def _copies(self, look: PartsSeen) -> _Copies:
        steps = look[0]
        if steps.copies is None:
            steps.copies = self._plan_copies(look)
        return steps.copies

    def _plan_copies(self, look: PartsSeen) -> _Copies:
        """Plans the copies of the parts into a bucket, wherever it lies."""
        steps, device = look[0], self._device
        stand_ins = _stand_ins(look, device) if transfers_on(device) else {}
        numbers = _numbers(steps)
        flat = Flat(flat_stand_in(self._layout.size_bytes))
        plain: list[_Copy] = []
        transfers: list[Transfer] = []
        memories: list[tuple[int, int]] = []
        for view in steps.views:
            own = self._parts[view.own]
            dtype, strides = own.slot.spec.torch_dtype, contiguous_strides(own.slot.shape)
            first = sum((a - b) * c for a, b, c in zip(own.box.offset, own.slot.box.offset, strides, strict=True))
            copy = _Copy(view, dtype, strides, own.slot.offset_bytes // dtype.itemsize + first)
            source = stand_ins.get(view.source)
            transfer = copy.transfer(source, flat) if source is not None else None
            if transfer is not None and can_transfer(transfer):
                transfers.append(transfer)
                memories.append((numbers[view.source], 0))
            else:
                plain.append(copy)
        template = Template(transfers, memories, device) if transfers else None
        launches = PlacedLaunches(device, len(self._parts), looks=self._looks)
        parts = [own for own in steps.rest if own.computed and own.place is not None]
        return _Copies(template, launches, plain, _ComputedSums(self._layout, parts, device))

    def _sums(self, look: PartsSeen) -> list[_Sums]:
        steps = look[0]
        if steps.sums is None:
            steps.sums, steps.summed_anew = self._plan_sums(look)
        return steps.sums

    def _plan_sums(self, look: PartsSeen) -> tuple[list[_Sums], list[OwnPart]]:
        """Plans the sums of the parts; returns also the parts that these do not sum."""
        views: dict[torch.device, list[_View]] = {}
        anew = [own for own in self._parts if own.computed and own.origin is not None]
        anew += [own for own in look[0].rest if not own.computed]
        for view in look[0].views:
            own = self._parts[view.own]
            if own.computed:
                continue
            if view.dtype == own.slot.spec.torch_dtype or is_copied_cast(view.dtype, own.slot.spec.torch_dtype):
                views.setdefault(view.device, []).append(view)
            else:
                anew.append(own)
        sums: list[_Sums] = []
        for device, some in views.items():
            casts = [self._is_cast(view) for view in some]
            template = _template_of_sums(device, some, casts, look)
            if template is None:
                anew += [self._parts[view.own] for view, cast in zip(some, casts, strict=True) if cast]
                some = [view for view, cast in zip(some, casts, strict=True) if not cast]
            if some:
                places = torch.tensor([self._parts[view.own].place for view in some], dtype=torch.int64)
                sums.append(_Sums(some, places, template, PlacedLaunches(device, len(some), looks=self._looks)))
        return sums, anew

    def _is_cast(self, view: _View) -> bool:
        return view.dtype != self._parts[view.own].slot.spec.torch_dtype

    def _sum_views(self, one: _Sums, look: PartsSeen, taker: Taker) -> None:
        if one.template is not None:
            sums = one.launches.run(*_placing(one.template, look[1]))
        else:
            memory = dict(zip(look[0].sources, look[1].tensors, strict=True))
            sums = partial_sums([view.piece(memory[view.source]) for view in one.views])
        taker.add(one.places, sums)

    def _saw(self, launches: PlacedLaunches, taker: Taker) -> None:
        """Notes what a launch that summed all parts has seen."""
        if launches.small:
            taker.finite = True

    def _sum_origin(self, own: OwnPart, taker: Taker) -> None:
        """Sums the memory that a part's values are computed from."""
        held = self._held.find(own.slot.spec.name, own.box)
        part = held.origin.detach()[slices(own.box, held.box.offset)]
        taker.add(torch.tensor([own.origin]), partial_sums([to_sum(own.slot, own.box, part)]))

    def _cast_parts(self, parts: Sequence[OwnPart]) -> Iterator[tuple[torch.device, list[_Cast]]]:
        """Parts that are cast and summed together, some MiB at a time, with their device."""
        together: dict[torch.device, list[_Cast]] = {}
        sizes: dict[torch.device, int] = {}
        for own in parts:
            held = self._held.find(own.slot.spec.name, own.box)
            memory = held.memory
            if own.place is None or memory is None:
                continue
            part, itemsize = memory.detach()[slices(own.box, held.box.offset)], own.slot.spec.torch_dtype.itemsize
            for box in split(own.box, max(_CAST_BYTES // itemsize, 1)):
                some, size = together.get(part.device, []), sizes.get(part.device, 0)
                if some and size + box.numel * itemsize > _CAST_BYTES:
                    yield part.device, some
                    some, size = [], 0
                some.append(_Cast(own, box, part[slices(box, own.box.offset)], size))
                together[part.device], sizes[part.device] = some, size + -(-box.numel * itemsize // 16) * 16
        yield from together.items()

    def _sum_cast(self, parts: Sequence[_Cast], device: torch.device, taker: Taker, scratch: Scratch) -> None:
        flat = Flat(scratch.buffer(sum(-(-one.size_bytes // 16) * 16 for one in parts), device))
        targets = [
            flat.region(
                one.dtype,
                one.box.shape,
                contiguous_strides(one.box.shape),
                one.first_byte // one.dtype.itemsize,
                as_bits=False,
            )
            for one in parts
        ]
        copy_all(targets, [one.source for one in parts])
        pieces = [to_sum(one.own.slot, one.box, values) for one, values in zip(parts, targets, strict=True)]
        taker.add(torch.tensor([one.own.place for one in parts]), partial_sums(pieces))


class _Cast(NamedTuple):
    """A box of a part in memory, and the first byte of its cast values in a buffer."""

    own: OwnPart
    box: Box
    source: torch.Tensor
    first_byte: int

    @property
    def dtype(self) -> torch.dtype:
        return self.own.slot.spec.torch_dtype

    @property
    def size_bytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


def _placing(template: Template, found: Seen, bucket: int = 0) -> tuple[object, Callable[[], Placed]]:
    """Where the memories of a template lie, for ``PlacedLaunches``: the bucket, at this address, then the parts."""
    return (bucket, found.place), lambda: Placed(template, (bucket, *found.addresses))


def _numbers(steps: _Steps) -> dict[int, int]:
    """Number of each source among the memories of a template."""
    return {source: 1 + number for number, source in enumerate(steps.sources)}


def _stand_ins(look: PartsSeen, device: torch.device) -> dict[int, torch.Tensor]:
    """Tensors in the place of the sources on a device that can be copied as they are."""
    made, (steps, found) = StandIns(), look
    return {
        source: made.of(whole)
        for source, whole in zip(steps.sources, found.tensors, strict=True)
        if whole.device == device and can_stand_in(whole)
    }


def _template_of_sums(
    device: torch.device, views: Sequence[_View], casts: Sequence[bool], look: PartsSeen
) -> Template | None:
    """The sums of some parts on a device wherever they lie; None where a launch is not worth it or cannot sum them."""
    stand_ins, numbers = _stand_ins(look, device), _numbers(look[0])
    if not all(view.source in stand_ins for view in views):
        return None
    pieces = [view.piece(stand_ins[view.source]) for view in views]
    transfers = [
        Transfer(piece=piece, total=number, casts=cast)
        for number, (piece, cast) in enumerate(zip(pieces, casts, strict=True))
    ]
    if not worth_launch(sum(piece.tensor.nbytes for piece in pieces), device) or not all(map(can_transfer, transfers)):
        return None
    for number, piece in enumerate(pieces):
        check_piece(piece, number)
    return Template(transfers, [(numbers[view.source], NOWHERE) for view in views], device)


def _copy_plainly(copies: Sequence[_Copy], look: PartsSeen, bucket: Bucket) -> None:
    if not copies:  # there may be tens of thousands of sources
        return
    memory = {source: (whole, bits(whole)) for source, whole in zip(look[0].sources, look[1].tensors, strict=True)}
    flat = Flat(bucket.data)
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for copy in copies:
        view = copy.view
        source, as_bits = memory[view.source]
        same = source.dtype == copy.dtype
        source = as_bits if same else source
        sources.append(source.as_strided(view.shape, view.stride, source.storage_offset() + view.offset))
        targets.append(flat.region(copy.dtype, view.shape, copy.target_stride, copy.target_offset, as_bits=same))
    copy_all(targets, sources)
