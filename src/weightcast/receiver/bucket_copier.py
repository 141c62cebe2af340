"""Copies of buckets into the set of weights that is written, with the digest sums of what passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from weightcast.digest.bucket_sums import piece_of
from weightcast.digest.copies import Flat, bits, copy_all
from weightcast.digest.pieces import TensorPiece, Transfer
from weightcast.digest.templates import NOWHERE, Placed, StandIns, Template, flat_stand_in
from weightcast.digest.transfers import PlacedLaunches, can_transfer, transfers_on
from weightcast.receiver.bucket_plan import BucketPlan, Copy
from weightcast.receiver.staging import StagingSet
from weightcast.runtime.tensor_places import TensorPlaces
from weightcast.wire.bucket import Bucket
from weightcast.wire.casts import may_overflow, overflows
from weightcast.wire.layout import TensorSlot

# The dtype is that of the memory that is copied.
_PlainCopies = list[tuple[TensorSlot, torch.dtype, Copy]]


@dataclass(frozen=True, slots=True, eq=False)
class _BucketLaunches:
    """The launches of one bucket, for any place of the bucket and of the parameters, whose form is ``form``.

    ``rest`` are copies that are no transfers.
    """

    form: TensorPlaces
    template: Template
    launches: PlacedLaunches
    rest: _PlainCopies


class BucketCopier:
    """Copies the buckets of update after update.

    What does not depend on addresses is worked out once for each bucket, before an update if ``prepare`` is called; and
    a launch that comes again in the same places is kept.  All of this is kept in the bucket's plan.
    """

    def __init__(self) -> None:
        self._overflows: dict[str, list[torch.Tensor]] = {}

    def prepare(self, plan: BucketPlan, staging: StagingSet, device: torch.device) -> None:
        """Works out the launch of a bucket that will lie on this device."""
        if transfers_on(device):
            _prepare(plan, staging, device)

    def place(self, bucket: Bucket, plan: BucketPlan, staging: StagingSet) -> None:
        """Works out the launches of a bucket that lies here, into either set of weights."""
        device = bucket.data.device
        if staging.staged and transfers_on(device):
            prepared = _prepare(plan, staging, device)
            for number, _, targets in staging.sets():
                place = bucket.data.data_ptr(), number
                prepared.launches.prepare(place, partial(_placed, prepared, bucket, plan, targets))

    def begin(self) -> None:
        """Forgets the overflows of the update before."""
        self._overflows.clear()

    def overflowed(self) -> list[str]:
        """Names of tensors with finite values that became infinite in the model's dtype.  Waits for the device."""
        if not self._overflows:
            return []
        flags = [torch.stack(some).any().item() for some in self._overflows.values()]
        return [name for name, flag in zip(self._overflows, flags, strict=True) if flag]

    def copy(
        self, bucket: Bucket, plan: BucketPlan, staging: StagingSet, *, summed: bool = True
    ) -> torch.Tensor | None:
        """Copies a bucket into the staging set; done on a CPU, enqueued on the current stream of a GPU.

        Returns ``Bucket.sums`` where they were taken on the way.
        """
        if transfers_on(bucket.data.device):
            sums = self._copy_and_sum(bucket, plan, staging, summed=summed)
            return sums if summed else None
        copies = [(slot, slot.spec.torch_dtype, copy) for slot, copies in plan.table for copy in copies]
        copy_plainly(bucket.data, copies, staging, self._overflows)
        return None

    def _copy_and_sum(self, bucket: Bucket, plan: BucketPlan, staging: StagingSet, *, summed: bool) -> torch.Tensor:
        """One launch for all copies, except those that cast or that go to another device."""
        where: object = staging.number
        if not staging.staged:  # live parameters may move at any time, those of the second set do not
            where = where, tuple(map(torch.Tensor.data_ptr, map(staging.targets.__getitem__, plan.parameters)))
        device, place = bucket.data.device, (bucket.data.data_ptr(), where)
        found = plan.prepared.get(device)
        if not isinstance(found, _BucketLaunches) or place not in found.launches:
            found = _prepare(plan, staging, device)
        sums = found.launches.run(place, partial(_placed, found, bucket, plan, staging.targets), summed=summed)
        copy_plainly(bucket.data, found.rest, staging, self._overflows)
        return sums


def _placed(prepared: _BucketLaunches, bucket: Bucket, plan: BucketPlan, targets: Mapping[str, torch.Tensor]) -> Placed:
    memories = bucket.data, *map(targets.__getitem__, plan.parameters)
    return Placed(prepared.template, list(map(torch.Tensor.data_ptr, memories)))


def _prepare(plan: BucketPlan, staging: StagingSet, device: torch.device) -> _BucketLaunches:
    """The launches of a bucket wherever it lies; parameters on other devices are written by the rest of the copies."""
    known = plan.prepared.get(device)
    found = list(map(staging.targets.__getitem__, plan.parameters))
    if isinstance(known, _BucketLaunches) and known.form.fits(found):
        return known
    targets = dict(zip(plan.parameters, found, strict=True))
    made = StandIns()
    near = {name: made.of(target) if target.device == device else target for name, target in targets.items()}
    bucket = Bucket(plan.layout, flat_stand_in(plan.layout.size_bytes))
    transfers, written, rest = _transfers_of(bucket, plan, near.__getitem__)
    numbers = {name: 1 + number for number, name in enumerate(plan.parameters)}
    memories = [(0, NOWHERE if name is None else numbers[name]) for name in written]
    template, launches = Template(transfers, memories, device), PlacedLaunches(device, len(plan.table))
    prepared = plan.prepared[device] = _BucketLaunches(TensorPlaces(found), template, launches, rest)
    return prepared


def copy_plainly(
    data: torch.Tensor,
    copies: Iterable[tuple[TensorSlot, torch.dtype, Copy]],
    staging: StagingSet,
    overflowed: dict[str, list[torch.Tensor]] | None = None,
) -> None:
    """Copies out of a flat buffer, without sums; notes casts that may overflow in ``overflowed``, by tensor.

    Each copy has its dtype in the buffer.  Values become those of the slot's dtype first, and then the parameter's.
    """
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    flat = Flat(data)
    waiting: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by parameter, as it is and as bits
    for slot, dtype, copy in copies:
        if copy.parameter not in waiting:
            whole = staging.target(copy.parameter).detach()
            waiting[copy.parameter] = whole, bits(whole)
        target, as_bits = waiting[copy.parameter]
        sent = slot.spec.torch_dtype
        same = target.dtype == dtype == sent
        targets.append(written_by(copy, as_bits if same else target))
        source = flat.region(dtype, copy.shape, copy.source_stride, copy.source_offset, as_bits=same)
        if sent not in (dtype, target.dtype):
            source = source.to(sent)
        sources.append(source)
        if overflowed is not None and may_overflow(sent, target.dtype):
            overflowed.setdefault(slot.spec.name, []).append(overflows(source))
    copy_all(targets, sources)


def written_by(copy: Copy, whole: torch.Tensor) -> torch.Tensor:
    """The part of a parameter that a copy writes."""
    whole = whole.detach()
    return whole.as_strided(copy.shape, copy.stride, whole.storage_offset() + copy.offset)


def _transfers_of(
    bucket: Bucket, plan: BucketPlan, target: Callable[[str], torch.Tensor]
) -> tuple[list[Transfer], list[str | None], _PlainCopies]:
    """The transfers of a bucket, which sum every slot; what each writes (a parameter or None); and the other copies."""
    flat = Flat(bucket.data)
    transfers: list[Transfer] = []
    parameters: list[str | None] = []
    rest: _PlainCopies = []
    for number, (slot, copies) in enumerate(plan.table):
        whole = Transfer(piece=piece_of(slot, bucket.view(slot), slot.first_row), total=number)
        if len(copies) == 1 and copies[0].shape == slot.shape:
            both = replace(whole, target=written_by(copies[0], target(copies[0].parameter)))
            if can_transfer(both):
                transfers.append(both)
                parameters.append(copies[0].parameter)
                continue
        transfers.append(whole)
        parameters.append(None)
        for copy in copies:
            part = flat.region(slot.spec.torch_dtype, copy.shape, copy.source_stride, copy.source_offset, as_bits=False)
            written = written_by(copy, target(copy.parameter))
            transfer = Transfer(piece=TensorPiece(tensor=part, full_shape=copy.shape), target=written)
            if can_transfer(transfer):
                transfers.append(transfer)
                parameters.append(copy.parameter)
            else:
                rest.append((slot, slot.spec.torch_dtype, copy))
    return transfers, parameters, rest
