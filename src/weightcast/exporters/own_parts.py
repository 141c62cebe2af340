"""Copies the parts of a bucket that this rank holds into it, and sums them for the digest.

The places of parts in memory are worked out once and reused as long as the model's tensors lie alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from weightcast.runtime.free_memory import Scratch
from weightcast.wire.box import Box, contiguous_strides, slices, split
from weightcast.wire.bucket import Bucket
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

    Numbers only: a view would keep memory alive that the trainer wants to free between two updates.
    """

    source: int
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
    """A copy out of this rank's memory into a bucket; ``own`` is the number of the part."""

    view: _View
    dtype: torch.dtype
    target_stride: tuple[int, ...]
    target_offset: int
    own: int

    def transfer(self, source: torch.Tensor, flat: Flat) -> Transfer:
        target = flat.region(self.dtype, self.view.shape, self.target_stride, self.target_offset, as_bits=False)
        return Transfer(piece=self.view.piece(source), target=target, total=self.own)


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
class _CopySteps:
    """Remembered steps that copy this rank's parts, valid while the sources lie as in ``layout``, a ``Seen.layout``.

    ``summed`` are those of ``launches``, wherever bucket and sources lie; None if there are none.  ``rest`` has the
    computed parts, which are written anew each time, and ``computed`` their sums.
    """

    sources: list[int]
    watched: Watched
    layout: object
    summed: Template | None
    launches: PlacedLaunches
    copies: list[_Copy]
    rest: list[OwnPart]
    computed: _ComputedSums


@dataclass(frozen=True, slots=True, eq=False)
class _SumSteps:
    """Remembered steps that sum this rank's parts where they lie, with the places of the sums, by device.

    ``launches`` are these sums as one launch for each device, where that is worth it.  ``rest`` is read anew each time:
    parts that are cast before they are sent, or memory that a value is computed from.
    """

    sources: list[int]
    watched: Watched
    layout: object
    views: Mapping[torch.device, list[_View]]
    launches: Mapping[torch.device, tuple[Template, PlacedLaunches]]
    places: Mapping[torch.device, torch.Tensor]
    rest: list[OwnPart]


@dataclass(frozen=True, slots=True, eq=False)
class _Lying:
    """Remembered places of parts that others read where they lie.  ``views``: number of the slot, and memory."""

    served: Sequence[tuple[int, Box]]
    sources: list[int]
    watched: Watched
    layout: object
    views: list[tuple[int, _View]]


class OwnMemory:
    """The parts that others read where this rank keeps them.  ``stamp`` stays equal while none of them moves."""

    def __init__(self, lying: _Lying, found: Seen) -> None:
        self.stamp = lying, found.place
        self._lying = lying
        self._found = found

    def views(self) -> list[tuple[int, Box, torch.Tensor]]:
        """Number of the slot, box and memory of each part."""
        memory = dict(zip(self._lying.sources, self._found.tensors, strict=True))
        return [(number, view.box, view.of(memory[view.source])) for number, view in self._lying.views]


class OwnParts:
    """The parts of one bucket that this rank holds, and all that is remembered of them: it goes with the bucket."""

    def __init__(self, layout: BucketLayout, parts: Sequence[OwnPart], held: HeldParts) -> None:
        self._layout = layout
        self._parts = parts
        self._held = held
        self._places = torch.tensor([own.place for own in parts if own.place is not None], dtype=torch.int64)
        whole = sum(own.box.numel for own in parts) == sum(slot.box.numel for slot in layout.slots)
        # Computed values are not among the sums in place: nothing has looked at them then.
        seen = whole and not any(own.computed for own in parts)
        self._looks = seen and all(slot.spec.torch_dtype in _LOOKED_AT for slot in layout.slots)
        self._one_each = [own.number for own in parts] == list(range(len(layout.slots)))
        self._seen: tuple[list[int], Seen | None] = [], None  # while one bucket is filled
        self._copying: _CopySteps | None = None
        self._summing: _SumSteps | None = None
        self._lying: _Lying | None = None

    def __bool__(self) -> bool:
        return bool(self._parts)

    def prepare(
        self,
        device: torch.device,
        *,
        copies: bool,
        sums: bool,
        data: torch.Tensor | None = None,
    ) -> None:
        """Works out what ``copy_into`` and ``sum_in_place`` need to know, without reading the parts.

        Args:
            device: Device of the bucket.
            copies: True if parts will be copied into a bucket, else they are read where they lie.
            sums: True if parts will be summed.
            data: The buffer that they will be copied into; None if that is not there yet.
        """
        if not self._parts:
            return
        summed = False
        if copies:
            steps, found = self._copy_steps(device)
            if steps.summed is not None and data is not None:
                steps.launches.prepare(*_placing(steps.summed, found, data.data_ptr()))
            if steps.rest and data is not None:
                bucket = Bucket(self._layout, data)
                self._held.prepare_all(bucket, steps.rest, lambda: self._writes(steps.rest, bucket))
            summed = not steps.copies and not steps.rest
        if sums and not summed:
            steps, found = self._sum_steps()
            for template, launches in steps.launches.values():
                launches.prepare(*_placing(template, found))

    def copy_into(self, bucket: Bucket, taker: Taker | None) -> torch.Tensor | None:
        """Copies the parts into the bucket.  Computed values are summed there.

        Returns:
            The sums of the slots, if all parts were summed on the way; ``taker`` has them too then.
        """
        self._seen = [], None
        steps, found = self._copy_steps(bucket.data.device)
        # Of some slots there would be no sum: then all parts are summed where they lie.
        summed = taker is not None and not steps.copies and not steps.rest
        sums = None
        if steps.summed is not None:
            sums = self._copy_and_sum(steps, steps.summed, found, bucket, summed=summed)
        if sums is not None and summed:
            assert taker is not None
            taker.add(self._places, sums)
            self._saw(steps.launches, taker)
            return self._by_slot(sums)
        self._seen = (steps.sources, found) if taker is not None else ([], None)
        _copy_plainly(steps, found, bucket)
        if steps.rest:
            self._held.write_all(bucket, steps.rest, lambda: self._writes(steps.rest, bucket))
        if taker is not None:
            steps.computed.take(bucket, taker)
        return None

    def _writes(self, parts: Sequence[OwnPart], bucket: Bucket) -> list[Write]:
        return [
            (self._held.find(own.slot.spec.name, own.box), own.box, region(bucket, own.slot, own.box)) for own in parts
        ]

    def sum_in_place(self, taker: Taker, *, summed_on_the_way: bool) -> None:
        """Sums the parts where they lie; ``summed_on_the_way`` if all values were summed while they were copied."""
        if summed_on_the_way:
            return
        (known, found), self._seen = self._seen, ([], None)
        steps, found = self._sum_steps(known, found)
        if steps.views:
            self._sum_views(steps, found, taker)
        scratch = Scratch()
        cast = [own for own in steps.rest if not own.computed]
        for own in steps.rest:
            if own.computed:
                self._sum_origin(own, taker)
        for device, parts in self._cast_parts(cast):
            self._sum_cast(parts, device, taker, scratch)

    def _copy_steps(self, device: torch.device) -> tuple[_CopySteps, Seen]:
        """The steps of ``copy_into``, as long as they fit the parts as they lie now."""
        steps, found = self._copying, None
        if steps is not None:
            found = steps.watched.now()
        if steps is None or found is None or found.layout is not steps.layout:
            steps, found = self._plan_copies(device)
            self._copying = steps
        return steps, found

    def _sum_steps(self, known: list[int] | None = None, found: Seen | None = None) -> tuple[_SumSteps, Seen]:
        """Those of ``sum_in_place``; ``found`` is what was seen just now of the sources ``known``, if anything."""
        steps = self._summing
        if steps is not None and (found is None or known is not steps.sources):
            found = steps.watched.now()
        if steps is None or found is None or found.layout is not steps.layout:
            steps, found = self._plan_sums()
            self._summing = steps
        return steps, found

    def lying(self, served: Sequence[tuple[int, Box]]) -> OwnMemory:
        """Places of parts that others read, by number of the slot and box; ``ConfigError`` if one lies otherwise."""
        known = self._lying
        found = known.watched.now() if known is not None else None
        if known is None or found is None or known.served != served or known.layout is not found.layout:
            views = self._served_views(served)
            sources, watched = self._watch(list(dict.fromkeys(view.source for _, view in views)))
            found = watched.now()
            known = self._lying = _Lying(served, sources, watched, found.layout, views)
        return OwnMemory(known, found)

    def _served_views(self, served: Sequence[tuple[int, Box]]) -> list[tuple[int, _View]]:
        """Number of the slot and view of each part."""
        parts = [
            OwnPart(slot=self._layout.slots[number], number=number, box=box, place=None, origin=None, computed=False)
            for number, box in served
        ]
        views: list[tuple[int, _View]] = []
        for part, found in zip(parts, self._views_of(parts), strict=True):
            spec = part.slot.spec
            if found is None or found[1].dtype != spec.torch_dtype:
                why = (
                    "its values are computed when they are sent" if found is None else f"it is kept in {found[1].dtype}"
                )
                raise ConfigError(
                    f"{spec.name} cannot be read in place: {why}, and it travels in {spec.dtype}",
                    hint="leave keep_mapped out, or send the dtype that the trainer keeps",
                )
            views.append((part.number, found[0]))
        return views

    def _by_slot(self, sums: torch.Tensor) -> torch.Tensor:
        count = len(self._layout.slots)
        if self._one_each:
            return sums
        numbers = torch.tensor([own.number for own in self._parts], device=sums.device)
        return torch.zeros(count, dtype=sums.dtype, device=sums.device).index_add_(0, numbers, sums)

    def _copy_and_sum(
        self, steps: _CopySteps, template: Template, found: Seen, bucket: Bucket, *, summed: bool
    ) -> torch.Tensor:
        """Copies parts and sums each on the way: int64 ``[own parts]``."""
        return steps.launches.run(*_placing(template, found, bucket.data.data_ptr()), summed=summed)

    def _plan_copies(self, device: torch.device) -> tuple[_CopySteps, Seen]:
        """The steps that copy the parts into a bucket on a device, wherever it lies."""
        views: list[tuple[int, OwnPart, _View, torch.Tensor]] = []
        rest: list[OwnPart] = []
        parts = list(enumerate(self._parts))
        for (number, own), found in zip(parts, self._views_of([own for _, own in parts]), strict=True):
            if found is None:
                rest.append(own)
            else:
                views.append((number, own, *found))
        wholes = {view.source: whole for _, _, view, whole in views}
        made = StandIns()
        stand_ins = {
            source: made.of(whole) for source, whole in wholes.items() if whole.device == device and can_stand_in(whole)
        }
        numbers = {source: 1 + number for number, source in enumerate(wholes)}
        flat = Flat(flat_stand_in(self._layout.size_bytes))
        launches = transfers_on(device)
        copies: list[_Copy] = []
        transfers: list[Transfer] = []
        memories: list[tuple[int, int]] = []
        for number, own, view, _ in views:
            dtype, steps = own.slot.spec.torch_dtype, contiguous_strides(own.slot.shape)
            first = sum((a - b) * c for a, b, c in zip(own.box.offset, own.slot.box.offset, steps, strict=True))
            copy = _Copy(view, dtype, steps, own.slot.offset_bytes // dtype.itemsize + first, number)
            source = stand_ins.get(view.source) if launches else None
            transfer = copy.transfer(source, flat) if source is not None else None
            if transfer is not None and can_transfer(transfer):
                transfers.append(transfer)
                memories.append((numbers[view.source], 0))
            else:
                copies.append(copy)
        sources, watched = self._watch(list(wholes))
        seen = watched.now()
        template = Template(transfers, memories, device) if transfers else None
        placed = PlacedLaunches(device, len(self._parts), looks=self._looks)
        computed = _ComputedSums(self._layout, [own for own in rest if own.computed and own.place is not None], device)
        return _CopySteps(sources, watched, seen.layout, template, placed, copies, rest, computed), seen

    def _watch(self, sources: list[int]) -> tuple[list[int], Watched]:
        """One and the same watch for the same sources: what is copied and then summed is looked at once."""
        for steps in (self._copying, self._summing, self._lying):
            if steps is not None and steps.sources == sources:
                return steps.sources, steps.watched
        return sources, self._held.watch(sources)

    def _views_of(self, parts: Sequence[OwnPart]) -> list[tuple[_View, torch.Tensor] | None]:
        """Place of each part in a tensor that is watched, and that tensor; None if it is computed or unknown."""
        places: list[tuple[OwnPart, int, Box, torch.Tensor] | None] = []
        for own in parts:
            held = self._held.find(own.slot.spec.name, own.box)
            known = self._held.watches and isinstance(held, InMemory) and held.source is not None
            places.append((own, held.source, held.box, held.memory) if known else None)  # type: ignore[union-attr]
        sources = list(dict.fromkeys(place[1] for place in places if place is not None))
        wholes = dict(zip(sources, self._held.watch(sources).now().tensors, strict=True)) if sources else {}
        found: list[tuple[_View, torch.Tensor] | None] = []
        for place in places:
            if place is None:
                found.append(None)
                continue
            own, source, box, memory = place
            part = memory if own.box == box else memory[slices(own.box, box.offset)]
            view = _View(
                source=source,
                shape=tuple(part.shape),
                stride=part.stride(),
                offset=int(part.storage_offset()) - int(wholes[source].storage_offset()),
                full_shape=own.slot.spec.shape,
                box=own.box,
            )
            found.append((view, wholes[source]))
        return found

    def _plan_sums(self) -> tuple[_SumSteps, Seen]:
        views: dict[torch.device, list[_View]] = {}
        places: dict[torch.device, list[int]] = {}
        rest: list[OwnPart] = []
        rest += [own for own in self._parts if own.computed and own.origin is not None]
        parts = [own for own in self._parts if not own.computed]
        for own, found in zip(parts, self._views_of(parts), strict=True):
            if found is None or found[1].dtype != own.slot.spec.torch_dtype:
                rest.append(own)
                continue
            assert own.place is not None
            view, whole = found
            views.setdefault(whole.device, []).append(view)
            places.setdefault(whole.device, []).append(own.place)
        sources, watched = self._watch(list(dict.fromkeys(view.source for some in views.values() for view in some)))
        seen = watched.now()
        tensors = {device: torch.tensor(some) for device, some in places.items()}
        wholes = dict(zip(sources, seen.tensors, strict=True))
        launches: dict[torch.device, tuple[Template, PlacedLaunches]] = {}
        for device, some in views.items():
            template = _template_of_sums(device, some, wholes)
            if template is not None:
                launches[device] = template, PlacedLaunches(device, len(some), looks=self._looks)
        return _SumSteps(sources, watched, seen.layout, views, launches, tensors, rest), seen

    def _sum_views(self, steps: _SumSteps, found: Seen, taker: Taker) -> None:
        for device, views in steps.views.items():
            if device in steps.launches:
                template, launches = steps.launches[device]
                sums = launches.run(*_placing(template, found))
                if len(steps.views) == 1 and not steps.rest:
                    self._saw(launches, taker)
            else:
                memory = dict(zip(steps.sources, found.tensors, strict=True))
                sums = partial_sums([view.piece(memory[view.source]) for view in views])
            taker.add(steps.places[device], sums)

    def _saw(self, launches: PlacedLaunches, taker: Taker) -> None:
        """Notes what a launch that summed all parts has seen."""
        if launches.small:
            taker.sums.finite = self._layout

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


def _placing(template: Template, found: Seen, *first: int) -> tuple[object, Callable[[], Placed]]:
    """Where the memories of a template lie, for ``PlacedLaunches``: those at addresses ``first``, then the parts."""
    return (*first, found.place), lambda: Placed(template, (*first, *found.addresses))


def _template_of_sums(
    device: torch.device, views: Sequence[_View], wholes: Mapping[int, torch.Tensor]
) -> Template | None:
    """The sums of some parts on a device wherever they lie; None where a launch is not worth it or cannot sum them.

    ``wholes`` has the sources of all parts, whose order is that of the template's memories.
    """
    needed = dict.fromkeys(view.source for view in views)
    if not all(can_stand_in(wholes[source]) for source in needed):
        return None
    made = StandIns()
    stand_ins = {source: made.of(wholes[source]) for source in needed}
    pieces = [view.piece(stand_ins[view.source]) for view in views]
    transfers = [Transfer(piece=piece, total=number) for number, piece in enumerate(pieces)]
    if not worth_launch(sum(piece.tensor.nbytes for piece in pieces), device) or not all(map(can_transfer, transfers)):
        return None
    for number, piece in enumerate(pieces):
        check_piece(piece, number)
    numbers = {source: number for number, source in enumerate(wholes)}
    return Template(transfers, [(numbers[view.source], NOWHERE) for view in views], device)


def _copy_plainly(steps: _CopySteps, found: Seen, bucket: Bucket) -> None:
    if not steps.copies:  # there may be tens of thousands of sources
        return
    memory = {source: (whole, bits(whole)) for source, whole in zip(steps.sources, found.tensors, strict=True)}
    flat = Flat(bucket.data)
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for copy in steps.copies:
        view = copy.view
        source, as_bits = memory[view.source]
        same = source.dtype == copy.dtype
        source = as_bits if same else source
        sources.append(source.as_strided(view.shape, view.stride, source.storage_offset() + view.offset))
        targets.append(flat.region(copy.dtype, view.shape, copy.target_stride, copy.target_offset, as_bits=same))
    copy_all(targets, sources)
