"""Copies the parts of a bucket that this rank holds into it, and sums them for the digest.

The places of parts in memory are worked out once and reused as long as the model's tensors lie alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from weightcast.digest.copies import Flat, bits, copy_all
from weightcast.digest.definition import partial_sums
from weightcast.digest.pieces import Piece, Transfer
from weightcast.digest.source_sums import Taker
from weightcast.digest.transfers import RepeatedSums, RepeatedTransfers, can_transfer, transfers_on
from weightcast.errors import ConfigError
from weightcast.exporters.held_parts import HeldParts, InMemory, Seen, region, slices, to_sum
from weightcast.runtime.scratch import Scratch
from weightcast.wire.box import Box, split
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout, TensorSlot

# A shard that is cast before it is sent is cast in blocks of this many bytes to be summed.
_CAST_BYTES = 16 << 20


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


@dataclass(frozen=True, slots=True)
class _View:
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

    def piece(self, memory: torch.Tensor) -> Piece:
        return Piece(tensor=self.of(memory), full_shape=self.full_shape, box=self.box if self.full_shape else None)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy out of this rank's memory into a bucket; ``own`` is the number of the part."""

    view: _View
    dtype: torch.dtype
    target_stride: tuple[int, ...]
    target_offset: int
    own: int

    def transfer(self, source: torch.Tensor, flat: Flat) -> Transfer:
        """The copy, summed on its way."""
        target = flat.region(self.dtype, self.view.shape, self.target_stride, self.target_offset, as_bits=False)
        return Transfer(piece=self.view.piece(source), target=target, total=self.own)


@dataclass(frozen=True, slots=True, eq=False)
class _CopySteps:
    """Remembered steps that copy this rank's parts, valid while ``Seen.layout`` of the sources is ``layout``.

    ``rest`` has the computed parts, which are written anew each time.  ``lent`` names the zero-copy tensors.
    """

    sources: list[int]
    layout: object
    summed: list[_Copy]
    copies: list[_Copy]
    rest: list[OwnPart]
    lent: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class _SumSteps:
    """Remembered steps that sum this rank's parts where they lie, with the places of the sums, by device.

    ``rest`` is read anew each time: parts that are cast before they are sent, or memory that a value is computed from.
    """

    sources: list[int]
    layout: object
    views: Mapping[torch.device, list[_View]]
    places: Mapping[torch.device, torch.Tensor]
    rest: list[OwnPart]


@dataclass(frozen=True, slots=True, eq=False)
class _Lying:
    """Remembered places of parts that others read where they lie.  ``views``: number of the slot, and memory."""

    served: Sequence[tuple[int, Box]]
    sources: list[int]
    layout: object
    views: list[tuple[int, _View]]


class OwnMemory:
    """The parts that others read where this rank keeps them.  ``stamp`` stays equal while none of them moves."""

    def __init__(self, lying: _Lying, found: Seen) -> None:
        self.stamp = lying, found.addresses
        self._lying = lying
        self._found = found

    def views(self) -> list[tuple[int, Box, torch.Tensor]]:
        """Number of the slot, box and memory of each part."""
        memory = dict(zip(self._lying.sources, self._found.tensors, strict=True))
        return [(number, view.box, view.of(memory[view.source])) for number, view in self._lying.views]


class OwnParts:
    """The parts of one bucket that this rank holds.  All buckets of an exporter share ``transfers`` and ``sums``."""

    def __init__(
        self,
        layout: BucketLayout,
        parts: Sequence[OwnPart],
        held: HeldParts,
        transfers: RepeatedTransfers,
        sums: RepeatedSums,
    ) -> None:
        self._layout = layout
        self._parts = parts
        self._held = held
        self._transfers = transfers
        self._sums = sums
        self._places = torch.tensor([own.place for own in parts if own.place is not None], dtype=torch.int64)
        self._one_each = [own.number for own in parts] == list(range(len(layout.slots)))
        self._seen: tuple[list[int], Seen | None] = [], None  # while one bucket is filled
        self._copying: _CopySteps | None = None
        self._summing: _SumSteps | None = None
        self._lying: _Lying | None = None

    def __bool__(self) -> bool:
        return bool(self._parts)

    def copy_into(self, bucket: Bucket, taker: Taker | None) -> torch.Tensor | None:
        """Copies the parts into the bucket.  Computed values are summed there.

        Returns:
            The sums of the slots, if all parts were summed on the way; ``taker`` has them too then.
        """
        self._seen = [], None
        steps, found = self._copying, None
        if steps is not None and steps.lent == frozenset(bucket.lent):
            found = self._held.look_at(steps.sources)
        if steps is None or found is None or found.layout != steps.layout:
            steps, found = self._plan_copies(bucket)
            self._copying = steps
        # Of some slots there would be no sum: then all parts are summed where they lie.
        summed = taker is not None and not steps.lent and not steps.copies and not steps.rest
        sums = self._copy_and_sum(steps, found, bucket, summed=summed) if steps.summed else None
        if sums is not None and summed:
            assert taker is not None
            taker.add(self._places, sums)
            return self._by_slot(sums)
        self._seen = (steps.sources, found) if taker is not None else ([], None)
        _copy_plainly(steps, found, bucket)
        for own in steps.rest:
            target = region(bucket, own.slot, own.box)
            self._held.find(own.slot.spec.name, own.box).write(own.box, target)
            if taker is not None and own.computed and own.place is not None:
                taker.add(torch.tensor([own.place]), partial_sums([to_sum(own.slot, own.box, target)]))
        return None

    def sum_in_place(self, taker: Taker, *, summed_on_the_way: bool) -> None:
        """Sums the parts where they lie; ``summed_on_the_way`` if all values were summed while they were copied."""
        if summed_on_the_way:
            return
        (known, found), self._seen = self._seen, ([], None)
        steps = self._summing
        if steps is not None and (found is None or known != steps.sources):
            found = self._held.look_at(steps.sources)
        if steps is None or found is None or found.layout != steps.layout:
            steps, found = self._plan_sums()
            self._summing = steps
        if steps.views:
            self._sum_views(steps, found, taker)
        scratch = Scratch()
        for own in steps.rest:
            self._sum_one(own, taker, scratch)

    def lying(self, served: Sequence[tuple[int, Box]]) -> OwnMemory:
        """Places of the parts that others read, given as number of the slot and box.

        Raises:
            ConfigError: A part does not lie in memory as it travels.
        """
        known = self._lying
        found = self._held.look_at(known.sources) if known is not None else None
        if known is None or found is None or known.served != served or known.layout != found.layout:
            views = [(number, self._served_view(self._layout.slots[number], number, box)) for number, box in served]
            sources = list(dict.fromkeys(view.source for _, view in views))
            found = self._held.look_at(sources)
            known = self._lying = _Lying(served, sources, found.layout, views)
        return OwnMemory(known, found)

    def _served_view(self, slot: TensorSlot, number: int, box: Box) -> _View:
        found = self._view_of(OwnPart(slot=slot, number=number, box=box, place=None, origin=None, computed=False))
        if found is None or found[1].dtype != slot.spec.torch_dtype:
            why = "its values are computed when they are sent" if found is None else f"it is kept in {found[1].dtype}"
            raise ConfigError(
                f"{slot.spec.name} cannot be read where it lies: {why}, and it travels in {slot.spec.dtype}",
                hint="leave keep_mapped out, or send the dtype that the trainer keeps",
            )
        return found[0]

    def _by_slot(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums of slots from those of own parts."""
        count = len(self._layout.slots)
        if self._one_each:
            return sums
        numbers = torch.tensor([own.number for own in self._parts], device=sums.device)
        return torch.zeros(count, dtype=sums.dtype, device=sums.device).index_add_(0, numbers, sums)

    def _copy_and_sum(self, steps: _CopySteps, found: Seen, bucket: Bucket, *, summed: bool) -> torch.Tensor:
        """Copies parts and sums each on the way: int64 ``[own parts]``."""

        def transfers() -> list[Transfer]:
            flat, memory = Flat(bucket.data), dict(zip(steps.sources, found.tensors, strict=True))
            return [copy.transfer(memory[copy.view.source], flat) for copy in steps.summed]

        place = self._layout.index, bucket.data.data_ptr()
        # ``steps`` is in the key because the same memory may be read otherwise than before.
        what = self._layout, found.addresses, steps
        return self._transfers.run(place, what, bucket.data.device, len(self._parts), transfers, summed=summed)

    def _plan_copies(self, bucket: Bucket) -> tuple[_CopySteps, Seen]:
        lent = frozenset(bucket.lent)
        views: list[tuple[int, OwnPart, _View, torch.Tensor]] = []
        rest: list[OwnPart] = []
        for number, own in enumerate(self._parts):
            if own.slot.spec.name in lent:
                continue
            found = self._view_of(own)
            if found is None:
                rest.append(own)
            else:
                views.append((number, own, *found))
        sources = list(dict.fromkeys(view.source for _, _, view, _ in views))
        seen = self._held.look_at(sources)
        steps = _CopySteps(sources, seen.layout, [], [], rest, lent)
        flat = Flat(bucket.data)
        for number, own, view, whole in views:
            target = region(bucket, own.slot, own.box)
            copy = _Copy(
                view=view,
                dtype=target.dtype,
                target_stride=target.stride(),
                target_offset=(target.data_ptr() - bucket.data.data_ptr()) // target.element_size(),
                own=number,
            )
            fits = transfers_on(bucket.data.device) and can_transfer(copy.transfer(whole, flat))
            (steps.summed if fits else steps.copies).append(copy)
        return steps, seen

    def _view_of(self, own: OwnPart) -> tuple[_View, torch.Tensor] | None:
        """Place of a part in a tensor that ``Look`` knows, and that tensor; None if it is computed or unknown."""
        held = self._held.find(own.slot.spec.name, own.box)
        look = self._held.look
        if look is None or not isinstance(held, InMemory) or held.source is None:
            return None
        whole = look([held.source]).tensors[0]
        part = held.memory[slices(own.box, held.box.offset)]
        view = _View(
            source=held.source,
            shape=tuple(part.shape),
            stride=part.stride(),
            offset=int(part.storage_offset()) - int(whole.storage_offset()),
            full_shape=own.slot.spec.shape,
            box=own.box,
        )
        return view, whole

    def _plan_sums(self) -> tuple[_SumSteps, Seen]:
        views: dict[torch.device, list[_View]] = {}
        places: dict[torch.device, list[int]] = {}
        rest: list[OwnPart] = []
        for own in self._parts:
            if own.computed:
                if own.origin is not None:
                    rest.append(own)
                continue
            found = self._view_of(own)
            if found is None or found[1].dtype != own.slot.spec.torch_dtype:
                rest.append(own)
                continue
            assert own.place is not None
            view, whole = found
            views.setdefault(whole.device, []).append(view)
            places.setdefault(whole.device, []).append(own.place)
        sources = list(dict.fromkeys(view.source for some in views.values() for view in some))
        seen = self._held.look_at(sources)
        tensors = {device: torch.tensor(some) for device, some in places.items()}
        return _SumSteps(sources, seen.layout, views, tensors, rest), seen

    def _sum_views(self, steps: _SumSteps, found: Seen, taker: Taker) -> None:
        for device, views in steps.views.items():

            def pieces(views: list[_View] = views) -> list[Piece]:
                memory = dict(zip(steps.sources, found.tensors, strict=True))
                return [view.piece(memory[view.source]) for view in views]

            sums = self._sums.sums((self._layout.index, device), (found.addresses, steps), device, pieces)
            taker.add(steps.places[device], sums)

    def _sum_one(self, own: OwnPart, taker: Taker, scratch: Scratch) -> None:
        held = self._held.find(own.slot.spec.name, own.box)
        memory = held.memory
        if own.origin is not None:
            part = held.origin.detach()[slices(own.box, held.box.offset)]
            taker.add(torch.tensor([own.origin]), partial_sums([to_sum(own.slot, own.box, part)]))
        if own.place is None or own.computed or memory is None:
            return
        part, dtype = memory.detach()[slices(own.box, held.box.offset)], own.slot.spec.torch_dtype
        for box in split(own.box, max(_CAST_BYTES // dtype.itemsize, 1)):
            values = scratch.cast(part[slices(box, own.box.offset)], dtype)
            taker.add(torch.tensor([own.place]), partial_sums([to_sum(own.slot, box, values)]))


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
