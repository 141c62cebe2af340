"""Copies buckets whose parts lie in the buffers of several trainer ranks, or in messages from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import torch

from weightcast.digest.bucket_sums import piece_of
from weightcast.digest.copies import Flat, bits, copy_all
from weightcast.digest.definition import partial_sums
from weightcast.digest.pieces import Piece, Transfer
from weightcast.digest.transfers import RepeatedTransfers, can_transfer, transfers_on
from weightcast.receiver.bucket_copier import target_of
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
        self._rests: dict[object, list[tuple[int, ShareCopy]]] = {}  # copies that are no transfers
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
            names = dict.fromkeys(share.copy.parameter for _, copies, _ in buffers for share in copies)
            targets = targets, tuple(staging.target(name).data_ptr() for name in names)
        where = *place, tuple(data.data_ptr() for data, _, _ in buffers), targets
        if where not in self._rests and len(self._rests) >= _MAX_LAUNCHES:
            self._forget()
        rest = self._rests.setdefault(where, [])

        def make() -> list[Transfer]:
            found = list[Transfer]()
            rest.clear()
            for number, (data, copies, far) in enumerate(buffers):
                flat = Flat(data)
                for share in copies:
                    transfer = _transfer_of(share, flat, staging, far=far)
                    if can_transfer(transfer):
                        found.append(transfer)
                    else:
                        rest.append((number, share))
            return found

        sums = self._transfers.run(where, None, device, self._num_routes, make, summed=summed)
        for number, share in rest:
            _copy_plainly(buffers[number][0], [share], staging)
        if not summed or rest or (self._sums is not None and self._sums.device != sums.device):
            self._all_summed = False
            return
        self._sums = sums if self._sums is None else self._sums + sums

    def _forget(self) -> None:
        """Forgets launches; a table that is made anew has copies from other places."""
        self._transfers = RepeatedTransfers()
        self._rests.clear()


def _transfer_of(share: ShareCopy, flat: Flat, staging: Staging, *, far: bool) -> Transfer:
    copy, spec = share.copy, share.slot.spec
    part = flat.region(spec.torch_dtype, copy.shape, copy.source_stride, copy.source_offset, as_bits=False)
    piece = Piece(tensor=part, full_shape=spec.shape, box=share.box if spec.shape else None)
    return Transfer(piece=piece, target=target_of(copy, staging), total=share.route, far=far)


def _copy_plainly(data: torch.Tensor, copies: Sequence[ShareCopy], staging: Staging) -> None:
    flat, targets, sources = Flat(data), list[torch.Tensor](), list[torch.Tensor]()
    for share in copies:
        copy, dtype = share.copy, share.slot.spec.torch_dtype
        target = target_of(copy, staging)
        same = target.dtype == dtype
        targets.append(bits(target) if same else target)
        sources.append(flat.region(dtype, copy.shape, copy.source_stride, copy.source_offset, as_bits=same))
    copy_all(targets, sources)
