"""Copies buckets whose parts lie in the buffers of several trainer ranks, or in messages from them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from weightcast.digest.bucket_sums import piece_of
from weightcast.digest.copies import Flat, bits, copy_all
from weightcast.digest.definition import partial_sums
from weightcast.digest.pieces import Piece, Transfer
from weightcast.digest.templates import Placed, StandIns, Template, flat_stand_in, form_of
from weightcast.digest.transfers import RepeatedTransfers, can_transfer, transfers_on
from weightcast.receiver.bucket_copier import target_of, written_by
from weightcast.receiver.scattered_plan import (
    ExchangePlan,
    Parts,
    ScatteredPlan,
    ShareCopy,
    ShareRoutes,
    Source,
    plan_exchange,
    plan_mapped,
    plan_scattered,
    wanted_of,
)
from weightcast.receiver.staging import Staging
from weightcast.wire.bucket_sources import MappedPart
from weightcast.wire.held import HeldPart
from weightcast.wire.layout import BucketLayout, TensorSlot, TensorSpec
from weightcast.wire.pieces import Wanted
from weightcast.wire.routes import Route

_MAX_LAUNCHES = 1 << 12
_Rest = list[tuple[int, ShareCopy]]


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """The launch of some buffers' copies, for any place of the buffers and of the parameters.

    Attributes:
        copies: The copies out of each buffer.
        sizes: Bytes of each buffer.
        parameters: Names of the parameters that are written.
        form: ``form_of`` these parameters.
        rest: Copies that are no transfers.
    """

    copies: Sequence[Sequence[ShareCopy]]
    sizes: Sequence[int]
    device: torch.device
    parameters: Sequence[str]
    form: object
    template: Template
    rest: _Rest


class ScatteredCopier:
    """Copies the own share of such buckets, in update after update.

    Attributes:
        read_bytes: Bytes that were read in this update.
        received_bytes: Bytes of the messages of this update.
        wholes: The tensors that were put together for the model's own loader in this update, and their sums.
    """

    def __init__(
        self, expected: Mapping[str, TensorSpec], routes: Mapping[str, Sequence[Route]], computed: Collection[str]
    ) -> None:
        self._expected = expected
        self._routes = ShareRoutes.of(routes, computed)
        self._num_routes = sum(map(len, routes.values()))
        self._plans: dict[int, ScatteredPlan] = {}
        self._mapped: dict[int, ScatteredPlan] = {}
        self._exchanges: dict[tuple[int, bool], ExchangePlan] = {}
        self._transfers = RepeatedTransfers()
        self._rests: dict[object, _Rest] = {}  # copies that are no transfers
        self._prepared: dict[tuple[int, int], _Prepared] = {}
        self._sums: torch.Tensor | None = None
        self._all_summed = True
        self.read_bytes = self.received_bytes = 0
        self.wholes: list[tuple[HeldPart, int]] = []

    def begin(self) -> None:
        """Forgets what an earlier update left."""
        self._sums, self._all_summed = None, True
        self.read_bytes = self.received_bytes = 0
        self.wholes.clear()

    @property
    def sums(self) -> torch.Tensor | None:
        """Digest sum of what was copied for each route in this update, int64, if all of it was summed on the way."""
        return self._sums if self._all_summed else None

    @cached_property
    def wanted(self) -> Wanted:
        """The boxes of the source tensors that this rank must get."""
        return wanted_of(self._expected, self._routes)

    def plan(self, layout: BucketLayout, parts: Parts) -> ScatteredPlan:
        """The copies out of all trainer ranks' buckets; raises ``Refused`` unless parts are the bucket exactly once."""
        plan = self._plans.get(layout.index)
        if plan is None or plan.layout != layout or plan.parts != parts:
            plan = self._plans[layout.index] = plan_scattered(layout, parts, self._routes)
            self._forget()
        return plan

    def plan_exchange(self, layout: BucketLayout, parts: Parts, *, read: bool = False) -> ExchangePlan:
        """The messages with this rank's share of a bucket; ``read`` as in ``plan_message``, errors as in ``plan``."""
        plan = self._exchanges.get((layout.index, read))
        if plan is None or plan.copies.layout != layout or plan.copies.parts != parts:
            plan = plan_exchange(layout, parts, self.wanted, self._routes, read=read)
            self._exchanges[layout.index, read] = plan
            self._forget()
        return plan

    def plan_mapped(
        self, layout: BucketLayout, parts: tuple[MappedPart, ...], memories: Sequence[torch.Tensor]
    ) -> ScatteredPlan:
        """The copies out of trainer ranks' own memory, flat uint8; errors are those of ``plan_mapped``."""
        plan = self._mapped.get(layout.index)
        sizes = [memory.numel() for memory in memories]
        if plan is None or plan.layout != layout or plan.parts != parts or len(plan.buffers) != len(sizes):
            plan = plan_mapped(layout, parts, sizes, self._routes)
            self._mapped[layout.index] = plan
            self._forget()
        return plan

    def prepare(self, plan: ScatteredPlan, sizes: Sequence[int], device: torch.device, staging: Staging) -> None:
        """Works out the launch of a plan whose buffers will all lie on one device.

        ``sizes`` are the least that the buffers will have, in bytes.
        """
        numbers = [number for number, copies in enumerate(plan.buffers) if copies]
        if numbers and transfers_on(device):
            copies, sizes = [plan.buffers[number] for number in numbers], [sizes[number] for number in numbers]
            self._prepare((plan.layout.index, numbers[0]), device, copies, sizes, staging)

    def copy(
        self,
        buffers: Sequence[torch.Tensor],
        plan: ScatteredPlan,
        staging: Staging,
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
            some = [(buffers[number], plan.buffers[number], number in far) for number in numbers]
            if transfers_on(device):
                self._transfer((plan.layout.index, numbers[0]), device, some, staging, summed=summed)
                continue
            self._all_summed = False
            for data, copies, _ in some:
                _copy_plainly(data, copies, staging)
        self.read_bytes += plan.read_bytes

    def put_together(
        self, slot: TensorSlot, sources: Sequence[Source], buffers: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """A slot's rows in memory of their own, out of the parts in several buffers; also sums them."""
        dtype = slot.spec.torch_dtype
        found = torch.empty(slot.shape, dtype=dtype, device=buffers[0].device)
        for source in sources:
            box = source.box
            origin = (slot.first_row, *(0 for _ in box.shape[1:]))[: len(box.shape)]
            index = tuple(
                slice(start - first, start - first + extent)
                for start, extent, first in zip(box.offset, box.shape, origin, strict=True)
            )
            flat = Flat(buffers[source.buffer])
            found[index].copy_(flat.region(dtype, box.shape, source.stride, source.offset, as_bits=False))
        [total] = partial_sums([piece_of(slot, found, slot.first_row)]).tolist()
        shape = slot.spec.shape
        first = (slot.first_row, *(0 for _ in shape[1:])) if shape else ()
        rows = (slot.num_rows, *shape[1:]) if shape else ()
        self.wholes.append((HeldPart(spec=slot.spec, box_offset=first, box_shape=rows), total))
        return found

    def _transfer(
        self,
        place: tuple[int, int],
        device: torch.device,
        buffers: Sequence[tuple[torch.Tensor, Sequence[ShareCopy], bool]],
        staging: Staging,
        *,
        summed: bool,
    ) -> None:
        """One launch for all copies out of a device, except those that cast or that go to another device."""
        targets: object = staging.number
        if not staging.staged:  # live parameters may move at any time, those of the second set do not
            names = _parameters_of([copies for _, copies, _ in buffers])
            targets = targets, tuple(staging.target(name).data_ptr() for name in names)
        where = *place, tuple(data.data_ptr() for data, _, _ in buffers), targets
        if where not in self._rests and len(self._rests) >= _MAX_LAUNCHES:
            self._forget()

        def make() -> list[Transfer] | Placed:
            copies = [some for _, some, _ in buffers]
            prepared = None
            if not any(far for _, _, far in buffers):  # copy engines may bring those
                sizes = [data.numel() for data, _, _ in buffers]
                prepared = self._prepare(place, device, copies, sizes, staging)
            if prepared is None:
                flats = [Flat(data) for data, _, _ in buffers]
                found, _, self._rests[where] = _transfers_of(
                    copies, flats, staging.target, [far for _, _, far in buffers]
                )
                return found
            self._rests[where] = prepared.rest
            memories = *(data for data, _, _ in buffers), *map(staging.target, prepared.parameters)
            return Placed(prepared.template, list(map(torch.Tensor.data_ptr, memories)))

        sums = self._transfers.run(where, None, device, self._num_routes, make, summed=summed)
        rest = self._rests[where]
        for number, share in rest:
            _copy_plainly(buffers[number][0], [share], staging)
        if not summed or rest or (self._sums is not None and self._sums.device != sums.device):
            self._all_summed = False
            return
        self._sums = sums if self._sums is None else self._sums + sums

    def _prepare(
        self,
        place: tuple[int, int],
        device: torch.device,
        copies: Sequence[Sequence[ShareCopy]],
        sizes: Sequence[int],
        staging: Staging,
    ) -> _Prepared | None:
        """The launch wherever all lies; None if a parameter is on another device than the buffers.

        ``sizes`` are those of the buffers, in bytes.
        """
        known = self._prepared.get(place)
        same = known is not None and len(known.copies) == len(copies) and all(map(operator.is_, known.copies, copies))
        names = known.parameters if same and known is not None else tuple(_parameters_of(copies))
        targets = {name: staging.target(name) for name in names}
        form = form_of(list(targets.values()))
        fits = known is not None and same and known.device == device and known.form == form
        if known is not None and fits and all(map(operator.le, known.sizes, sizes)):
            return known
        if any(target.device != device for target in targets.values()):
            return None
        made = StandIns()
        stand_ins = {name: made.of(target) for name, target in targets.items()}
        flats = [Flat(flat_stand_in(size)) for size in sizes]
        transfers, ends, rest = _transfers_of(copies, flats, stand_ins.__getitem__)
        written = {name: len(copies) + number for number, name in enumerate(targets)}
        memories = [(buffer, written[name]) for buffer, name in ends]
        template = Template(transfers, memories, device)
        prepared = self._prepared[place] = _Prepared(copies, sizes, device, names, form, template, rest)
        return prepared

    def _forget(self) -> None:
        """Forgets launches; a table that is made anew has copies from other places."""
        self._transfers = RepeatedTransfers()
        self._rests.clear()


def _parameters_of(copies: Sequence[Sequence[ShareCopy]]) -> dict[str, None]:
    return dict.fromkeys(share.copy.parameter for some in copies for share in some)


def _transfers_of(
    buffers: Sequence[Sequence[ShareCopy]],
    flats: Sequence[Flat],
    target: Callable[[str], torch.Tensor],
    far: Sequence[bool] = (),
) -> tuple[list[Transfer], list[tuple[int, str]], _Rest]:
    """The transfers out of some buffers, with the number of the buffer and the parameter of each; and what is none."""
    found: list[Transfer] = []
    ends: list[tuple[int, str]] = []
    rest: _Rest = []
    for number, (copies, flat) in enumerate(zip(buffers, flats, strict=True)):
        is_far = bool(far) and far[number]
        for share in copies:
            copy, spec = share.copy, share.slot.spec
            part = flat.region(spec.torch_dtype, copy.shape, copy.source_stride, copy.source_offset, as_bits=False)
            piece = Piece(tensor=part, full_shape=spec.shape, box=share.box if spec.shape else None)
            written = written_by(copy, target(copy.parameter))
            transfer = Transfer(piece=piece, target=written, total=share.route, far=is_far)
            if can_transfer(transfer):
                found.append(transfer)
                ends.append((number, copy.parameter))
            else:
                rest.append((number, share))
    return found, ends, rest


def _copy_plainly(data: torch.Tensor, copies: Sequence[ShareCopy], staging: Staging) -> None:
    flat, targets, sources = Flat(data), list[torch.Tensor](), list[torch.Tensor]()
    for share in copies:
        copy, dtype = share.copy, share.slot.spec.torch_dtype
        target = target_of(copy, staging)
        same = target.dtype == dtype
        targets.append(bits(target) if same else target)
        sources.append(flat.region(dtype, copy.shape, copy.source_stride, copy.source_offset, as_bits=same))
    copy_all(targets, sources)
