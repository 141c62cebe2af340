"""Copies buckets whose parts lie in the buffers of several trainer ranks, or in messages from them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from weightcast.digest.bucket_sums import piece_of
from weightcast.digest.copies import Flat
from weightcast.digest.definition import partial_sums
from weightcast.digest.pieces import TensorPiece, Transfer
from weightcast.digest.templates import Placed, StandIns, Template, flat_stand_in
from weightcast.digest.transfers import PlacedLaunches, can_transfer, transfers_on
from weightcast.receiver.bucket_copier import copy_plainly, written_by
from weightcast.receiver.scattered_plan import (
    BufferBox,
    BufferParts,
    ExchangePlan,
    LoadPlan,
    ScatteredPlan,
    ShareCopy,
    ShareRoutes,
    plan_exchange,
    plan_mapped,
    plan_scattered,
    wanted_of,
)
from weightcast.receiver.staging import StagingSet
from weightcast.runtime.tensor_places import TensorPlaces
from weightcast.wire.box import slices
from weightcast.wire.bucket_sources import MappedPart
from weightcast.wire.held import HeldPart
from weightcast.wire.layout import BucketLayout, TensorSlot, TensorSpec
from weightcast.wire.pieces import Wanted
from weightcast.wire.routes import Route

_PlainShareCopies = list[tuple[int, ShareCopy]]
_Numbered = Sequence[tuple[int, torch.Tensor]]


@dataclass(slots=True, eq=False)
class _ScatteredLaunches:
    """The launches of the copies out of some buffers, for any place of the buffers and of the parameters.

    Attributes:
        sizes: Bytes of each buffer.
        parameters: Names of the parameters that are written.
        form: Form of these parameters.
        template: None if copy engines may bring some of the buffers, whose transfers are made for each place.
        rest: Copies that are no transfers.
    """

    sizes: Sequence[int]
    parameters: Sequence[str]
    form: TensorPlaces
    template: Template | None
    launches: PlacedLaunches
    rest: _PlainShareCopies


class ScatteredCopier:
    """Copies the own share of such buckets, in update after update.

    Attributes:
        wholes: The tensors that were put together for the model's own loader in this update, and their sums.
    """

    def __init__(
        self, expected: Mapping[str, TensorSpec], routes: Mapping[str, Sequence[Route]], computed: Collection[str]
    ) -> None:
        self._expected = expected
        self._routes = ShareRoutes.of(routes, computed)
        self._num_routes = sum(map(len, routes.values()))
        self._plan = LoadPlan()
        self._sums: torch.Tensor | None = None
        self._all_summed = True
        self.wholes: list[tuple[HeldPart, int]] = []

    def use(self, plan: LoadPlan) -> None:
        """Takes the plan that has everything about the buckets to come."""
        self._plan = plan

    def begin(self) -> None:
        """Forgets what an earlier update left."""
        self._sums, self._all_summed = None, True
        self.wholes.clear()

    @property
    def sums(self) -> torch.Tensor | None:
        """Digest sum of what was copied for each route in this update, int64, if all of it was summed on the way."""
        return self._sums if self._all_summed else None

    @cached_property
    def wanted(self) -> Wanted:
        """The boxes of the source tensors that this rank must get."""
        return wanted_of(self._expected, self._routes)

    def plan(self, layout: BucketLayout, parts: BufferParts) -> ScatteredPlan:
        """The copies out of all trainer ranks' buckets; raises ``Refused`` unless parts are the bucket exactly once."""
        plan = self._plan.scattered.get(("buffers", layout.index))
        if plan is None or plan.layout != layout or plan.parts != parts:
            plan = self._plan.scattered["buffers", layout.index] = plan_scattered(layout, parts, self._routes)
        elif not all(map(operator.is_, plan.parts, parts)):  # the next comparison looks at no part
            plan = self._plan.scattered["buffers", layout.index] = replace(plan, parts=parts)
        return plan

    def plan_exchange(
        self, layout: BucketLayout, parts: BufferParts, *, near: tuple[int, ...] = (), read: bool = False
    ) -> ExchangePlan:
        """The messages with this rank's share of a bucket; the arguments are those of ``plan_exchange``."""
        key = read, near, layout.index
        plan = self._plan.exchanges.get(key)
        if plan is None or plan.copies.layout != layout or plan.copies.parts != parts:
            plan = plan_exchange(layout, parts, self.wanted, self._routes, near=near, read=read)
        elif not all(map(operator.is_, plan.copies.parts, parts)):
            plan = replace(plan, copies=replace(plan.copies, parts=parts))
        self._plan.exchanges[key] = plan
        return plan

    def plan_mapped(
        self, layout: BucketLayout, parts: tuple[MappedPart, ...], memories: Sequence[torch.Tensor]
    ) -> ScatteredPlan:
        """The copies out of trainer ranks' own memory, flat uint8; errors are those of ``plan_mapped``."""
        plan = self._plan.scattered.get(("mapped", layout.index))
        sizes = [memory.numel() for memory in memories]
        if plan is None or plan.layout != layout or plan.parts != parts or len(plan.buffers) != len(sizes):
            plan = plan_mapped(layout, parts, sizes, self._routes)
            self._plan.scattered["mapped", layout.index] = plan
        return plan

    def prepare(self, plan: ScatteredPlan, sizes: Sequence[int], device: torch.device, staging: StagingSet) -> None:
        """Works out the launch of a plan whose buffers will all lie on one device.

        ``sizes`` are the least that the buffers will have, in bytes.
        """
        numbers = tuple(number for number, copies in enumerate(plan.buffers) if copies)
        if numbers and transfers_on(device):
            self._prepare(plan, numbers, device, [sizes[number] for number in numbers], staging)

    def place(self, buffers: Sequence[torch.Tensor], plan: ScatteredPlan, staging: StagingSet) -> None:
        """Works out the launch for buffers that lie here, all on one device, into either set of weights."""
        numbers = tuple(number for number, copies in enumerate(plan.buffers) if copies)
        data = [buffers[number] for number in numbers]
        if not data or not staging.staged or not transfers_on(data[0].device):
            return
        prepared = self._prepare(plan, numbers, data[0].device, list(map(torch.Tensor.numel, data)), staging)
        addresses = tuple(map(torch.Tensor.data_ptr, data))
        for number, _, targets in staging.sets():
            prepared.launches.prepare((addresses, number), partial(_placed, prepared, addresses, targets))

    def copy(
        self,
        buffers: Sequence[torch.Tensor],
        plan: ScatteredPlan,
        staging: StagingSet,
        *,
        far: Collection[int] = (),
        summed: bool = True,
    ) -> None:
        """Copies out of all buffers, flat uint8, into the written set.

        Args:
            far: Numbers of buffers that lie on another GPU and are mapped for the one that copies.
            summed: False if nobody needs ``sums``.
        """
        by_device: dict[torch.device, list[int]] = {}
        for number, (data, copies) in enumerate(zip(buffers, plan.buffers, strict=True)):
            if copies:
                by_device.setdefault(data.device, []).append(number)
        for device, numbers in by_device.items():
            if transfers_on(device):
                some = [(number, buffers[number]) for number in numbers]
                self._transfer(plan, device, some, staging, far=frozenset(far).intersection(numbers), summed=summed)
                continue
            self._all_summed = False
            for number in numbers:
                shares = plan.buffers[number]
                copy_plainly(buffers[number], [(share.slot, share.dtype, share.copy) for share in shares], staging)

    def put_together(
        self, slot: TensorSlot, sources: Sequence[BufferBox], buffers: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """A slot's rows in memory of their own, out of the parts in several buffers; also sums them."""
        found = torch.empty(slot.shape, dtype=slot.spec.torch_dtype, device=buffers[0].device)
        for source in sources:
            flat, shape = Flat(buffers[source.buffer]), source.box.shape
            part = flat.region(source.dtype, shape, source.stride, source.offset, as_bits=False)
            found[slices(source.box, slot.box.offset)].copy_(part)
        [total] = partial_sums([piece_of(slot, found, slot.first_row)]).tolist()
        self.wholes.append((HeldPart(spec=slot.spec, box_offset=slot.box.offset, box_shape=slot.shape), total))
        return found

    def _transfer(
        self,
        plan: ScatteredPlan,
        device: torch.device,
        buffers: _Numbered,
        staging: StagingSet,
        *,
        far: frozenset[int],
        summed: bool,
    ) -> None:
        """One launch for all copies out of a device, except those that go to another device or to another dtype."""
        numbers, data = zip(*buffers, strict=True)
        found = plan.prepared.get((numbers, device, far))
        addresses = tuple(map(torch.Tensor.data_ptr, data))
        targets: object = staging.number
        if not staging.staged:  # live parameters may move at any time, those of the second set do not
            names = found.parameters if isinstance(found, _ScatteredLaunches) else _parameters_of(plan, numbers)
            targets = targets, tuple(map(torch.Tensor.data_ptr, map(staging.targets.__getitem__, names)))
        place = addresses, targets
        if not isinstance(found, _ScatteredLaunches) or place not in found.launches:
            found = self._prepare(plan, numbers, device, list(map(torch.Tensor.numel, data)), staging, far)
        prepared = found

        def transfers() -> list[Transfer] | Placed:
            if prepared.template is not None:
                return _placed(prepared, addresses, staging.targets)
            found, _, prepared.rest = _transfers_of(
                plan, numbers, list(map(Flat, data)), staging.targets.__getitem__, far
            )
            return found

        sums = prepared.launches.run(place, transfers, summed=summed)
        for number, share in prepared.rest:
            copy_plainly(data[numbers.index(number)], [(share.slot, share.dtype, share.copy)], staging)
        if not summed or prepared.rest or (self._sums is not None and self._sums.device != sums.device):
            self._all_summed = False
            return
        self._sums = sums if self._sums is None else self._sums + sums

    def _prepare(
        self,
        plan: ScatteredPlan,
        numbers: tuple[int, ...],
        device: torch.device,
        sizes: Sequence[int],
        staging: StagingSet,
        far: frozenset[int] = frozenset(),
    ) -> _ScatteredLaunches:
        """The launches of the copies out of these buffers, wherever all lies; ``sizes`` are theirs, in bytes."""
        known = plan.prepared.get((numbers, device, far))
        names = known.parameters if isinstance(known, _ScatteredLaunches) else _parameters_of(plan, numbers)
        found = list(map(staging.targets.__getitem__, names))
        if (
            isinstance(known, _ScatteredLaunches)
            and known.form.fits(found)
            and all(map(operator.le, known.sizes, sizes))
        ):
            return known
        targets = dict(zip(names, found, strict=True))
        template, rest = None, _PlainShareCopies()
        if not far:  # copy engines may bring what is far
            made = StandIns()
            near = {name: made.of(target) if target.device == device else target for name, target in targets.items()}
            flats = [Flat(flat_stand_in(size)) for size in sizes]
            transfers, ends, rest = _transfers_of(plan, numbers, flats, near.__getitem__)
            written = {name: len(numbers) + number for number, name in enumerate(targets)}
            places = {number: place for place, number in enumerate(numbers)}
            memories = [(places[buffer], written[name]) for buffer, name in ends]
            template = Template(transfers, memories, device)
        launches = PlacedLaunches(device, self._num_routes)
        prepared = _ScatteredLaunches(sizes, names, TensorPlaces(found), template, launches, rest)
        plan.prepared[numbers, device, far] = prepared
        return prepared


def _placed(prepared: _ScatteredLaunches, addresses: Sequence[int], targets: Mapping[str, torch.Tensor]) -> Placed:
    assert prepared.template is not None
    written = map(targets.__getitem__, prepared.parameters)
    return Placed(prepared.template, [*addresses, *map(torch.Tensor.data_ptr, written)])


def _parameters_of(plan: ScatteredPlan, numbers: Sequence[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(share.copy.parameter for number in numbers for share in plan.buffers[number]))


def _transfers_of(
    plan: ScatteredPlan,
    numbers: Sequence[int],
    flats: Sequence[Flat],
    target: Callable[[str], torch.Tensor],
    far: Collection[int] = (),
) -> tuple[list[Transfer], list[tuple[int, str]], _PlainShareCopies]:
    """The transfers out of some buffers, with the number of the buffer and the parameter of each; and what is none."""
    found: list[Transfer] = []
    ends: list[tuple[int, str]] = []
    rest: _PlainShareCopies = []
    for number, flat in zip(numbers, flats, strict=True):
        is_far = number in far
        for share in plan.buffers[number]:
            copy, spec = share.copy, share.slot.spec
            part = flat.region(share.dtype, copy.shape, copy.source_stride, copy.source_offset, as_bits=False)
            piece = TensorPiece(tensor=part, full_shape=spec.shape, box=share.box if spec.shape else None)
            written = written_by(copy, target(copy.parameter))
            casts = share.dtype != spec.torch_dtype
            transfer = Transfer(piece=piece, target=written, total=share.route, far=is_far, casts=casts)
            if can_transfer(transfer):
                found.append(transfer)
                ends.append((number, copy.parameter))
            else:
                rest.append((number, share))
    return found, ends, rest
