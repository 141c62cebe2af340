"""Copies the parts of a bucket that this rank holds into it, and sums them for the digest.

The places of parts in memory are worked out once and reused as long as the model's tensors lie alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weightcast.digest.copies import Flat, copy_all
from weightcast.digest.copy_program import CopyProgram, CopyStep, View, flat_stand_in, view_of_slot
from weightcast.digest.definition import partial_sums
from weightcast.digest.source_sums import Taker
from weightcast.digest.transfers import worth_launch
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

# What ``CopyProgram.small`` says enough of.
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


class _Lies(NamedTuple):  # made faster than a frozen class, and there may be tens of thousands
    """A part that lies in this rank's memory: its number, and the box of its tensor in the memory of one source.

    Numbers only: a view would keep memory alive that the trainer wants to free between two updates.
    """

    own: int
    view: View
    device: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class _Copies:
    """The copies of the parts into a bucket, whose memory is the one after the sources.

    ``computed`` sums values where they were written there; its sums have ``places`` among this rank's.
    """

    program: CopyProgram
    computed: CopyProgram
    places: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """The sums of parts of one device, where they lie.  ``places`` are theirs among this rank's sums of the bucket."""

    program: CopyProgram
    places: torch.Tensor


@dataclass(slots=True, eq=False)
class _Steps:
    """Where the parts lie, and what reads them there: valid while the sources lie as in ``layout``, a ``Seen.layout``.

    Attributes:
        views: The parts in memory that is watched.
        rest: The others, which are found and written anew each time.
        copies: None until it is needed.
        sums: For each device; None until it is needed.
        served: Number of the slot, box and view of each part that others read; None until it is needed.
        summed_anew: Parts that ``sums`` does not have: they are cast before they are sent, or computed.
    """

    sources: list[int]
    watched: Watched
    layout: object
    views: list[_Lies]
    rest: list[OwnPart]
    copies: _Copies | None = None
    sums: list[_Sums] | None = None
    served: list[tuple[int, Box, View]] | None = None
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
        return [(number, box, view.of(found.tensors[view.memory])) for number, box, view in steps.served or ()]


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
            if data is not None:
                copying.program.prepare([*found.tensors, data], (*found.addresses, data.data_ptr()))
            if steps.rest and data is not None:
                bucket = Bucket(self._layout, data)
                self._held.prepare_all(bucket, steps.rest, lambda: self._writes(steps.rest, bucket))
            summed = copying.program.sums_all and not steps.rest
        if sums and not summed:
            for one in self._sums(look):
                one.program.prepare(found.tensors, found.addresses)

    def copy_into(self, bucket: Bucket, taker: Taker | None, look: PartsSeen) -> torch.Tensor | None:
        """Copies the parts into the bucket.  Computed values are summed there.

        Returns:
            The sums of the slots, if all parts were summed on the way; ``taker`` has them too then.
        """
        steps, found = look
        copying = self._copies(look)
        # Of some slots there would be no sum otherwise: then all parts are summed where they lie.
        summed = taker is not None and copying.program.sums_all and not steps.rest
        addresses = (*found.addresses, bucket.data.data_ptr())
        sums = copying.program.run([*found.tensors, bucket.data], addresses, summed=summed)
        if taker is not None and sums is not None:
            taker.add(self._places, sums)
            self._saw(copying.program, taker)
            return self._by_slot(sums)
        if steps.rest:
            self._held.write_all(bucket, steps.rest, lambda: self._writes(steps.rest, bucket))
        if taker is not None and len(copying.places):
            taker.add(copying.places, copying.computed.sums([bucket.data]))
        return None

    def _writes(self, parts: Sequence[OwnPart], bucket: Bucket) -> list[Write]:
        return [
            (self._held.find(own.slot.spec.name, own.box), own.box, region(bucket, own.slot, own.box)) for own in parts
        ]

    def sum_in_place(self, taker: Taker, look: PartsSeen) -> None:
        """Sums the parts where they lie, unless they were summed while they were copied."""
        steps, sums = look[0], self._sums(look)
        for one in sums:
            taker.add(one.places, one.program.sums(look[1].tensors, look[1].addresses))
        if len(sums) == 1 and not steps.summed_anew:
            self._saw(sums[0].program, taker)
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

    def _served_views(self, served: Sequence[tuple[int, Box]], views: Sequence[_Lies]) -> list[tuple[int, Box, View]]:
        """Number of the slot, box and view of each part."""
        known = {(self._parts[one.own].number, self._parts[one.own].box): one.view for one in views}
        found: list[tuple[int, Box, View]] = []
        for number, box in served:
            spec, view = self._layout.slots[number].spec, known.get((number, box))
            fits = view is not None and (view.dtype == spec.torch_dtype or is_copied_cast(view.dtype, spec.torch_dtype))
            if view is None or not fits:
                why = "its values are computed when they are sent" if view is None else f"it is kept in {view.dtype}"
                raise ConfigError(
                    f"{spec.name} cannot be read in place: {why}, and it travels in {spec.dtype}",
                    hint="leave keep_mapped out, or send the dtype that the trainer keeps",
                )
            found.append((number, box, view))
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
        numbers = {source: number for number, source in enumerate(sources)}
        views: list[_Lies] = []
        for number, source, box, memory in places:
            own, whole = self._parts[number], found.tensors[numbers[source]]
            part = memory if own.box == box else memory[slices(own.box, box.offset)]
            first = int(part.storage_offset()) - int(whole.storage_offset())
            view = View(numbers[source], whole.dtype, tuple(part.shape), part.stride(), first)
            views.append(_Lies(number, view, whole.device))
        return _Steps(sources, watched, found.layout, views, rest), found

    def _copies(self, look: PartsSeen) -> _Copies:
        steps = look[0]
        if steps.copies is None:
            steps.copies = self._plan_copies(look)
        return steps.copies

    def _plan_copies(self, look: PartsSeen) -> _Copies:
        """Plans the copies of the parts into a bucket, wherever it lies."""
        steps, found = look
        bucket, flat = len(steps.sources), flat_stand_in(self._layout.size_bytes)
        copies = [self._step(one, target=bucket, total=one.own) for one in steps.views]
        program = CopyProgram(
            copies, [*found.tensors, flat], self._device, num_sums=len(self._parts), looks=self._looks
        )
        parts = [own for own in steps.rest if own.computed and own.place is not None]
        written = [
            CopyStep(view_of_slot(own.slot, own.box), None, own.slot.spec.shape, own.box, number)
            for number, own in enumerate(parts)
        ]
        computed = CopyProgram(written, [flat], self._device, num_sums=len(parts))
        return _Copies(program, computed, torch.tensor([own.place for own in parts], dtype=torch.int64))

    def _step(self, one: _Lies, *, target: int | None, total: int) -> CopyStep:
        """The copy of a part into a bucket, or its sum."""
        own = self._parts[one.own]
        to = view_of_slot(own.slot, own.box, memory=target) if target is not None else None
        return CopyStep(one.view, to, own.slot.spec.shape, own.box, total, sent=own.slot.spec.torch_dtype)

    def _sums(self, look: PartsSeen) -> list[_Sums]:
        steps = look[0]
        if steps.sums is None:
            steps.sums, steps.summed_anew = self._plan_sums(look)
        return steps.sums

    def _plan_sums(self, look: PartsSeen) -> tuple[list[_Sums], list[OwnPart]]:
        """Plans the sums of the parts; returns also the parts that these do not sum."""
        by_device: dict[torch.device, list[_Lies]] = {}
        anew = [own for own in self._parts if own.computed and own.origin is not None]
        anew += [own for own in look[0].rest if not own.computed]
        for one in look[0].views:
            own = self._parts[one.own]
            if not own.computed:
                by_device.setdefault(one.device, []).append(one)
        sums: list[_Sums] = []
        for device, some in by_device.items():
            program = self._program_of_sums(some, device, look[1])
            if not program.sums_all:
                # torch sums values as they lie, so those that are cast are cast first.
                anew += [self._parts[one.own] for one in some if self._is_cast(one)]
                some = [one for one in some if not self._is_cast(one)]
                program = self._program_of_sums(some, device, look[1])
            if some:
                places = torch.tensor([self._parts[one.own].place for one in some], dtype=torch.int64)
                sums.append(_Sums(program, places))
        return sums, anew

    def _program_of_sums(self, views: Sequence[_Lies], device: torch.device, found: Seen) -> CopyProgram:
        steps = [self._step(one, target=None, total=number) for number, one in enumerate(views)]
        size_bytes = sum(self._parts[one.own].box.numel * one.view.dtype.itemsize for one in views)
        return CopyProgram(
            steps,
            found.tensors,
            device,
            num_sums=len(steps),
            launches=worth_launch(size_bytes, device),
            looks=self._looks,
        )

    def _is_cast(self, one: _Lies) -> bool:
        return one.view.dtype != self._parts[one.own].slot.spec.torch_dtype

    def _saw(self, program: CopyProgram, taker: Taker) -> None:
        """Notes what a launch that summed all parts has seen."""
        if program.small:
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
