"""Copies of buckets into the set of weights that is written, with the digest sums of what passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from weightcast.digest.bucket_sums import piece_of
from weightcast.digest.copies import Flat, bits, copy_all
from weightcast.digest.pieces import Piece, Transfer
from weightcast.digest.transfers import RepeatedTransfers, can_transfer, transfers_on
from weightcast.receiver.bucket_plan import BucketPlan, Copy
from weightcast.receiver.staging import Staging
from weightcast.wire.bucket import Bucket
from weightcast.wire.casts import may_overflow, overflows
from weightcast.wire.layout import TensorSlot

_MAX_PLACES = 16


class BucketCopier:
    """Copies the buckets of update after update.  A launch that comes again in the same places is worked out once."""

    def __init__(self) -> None:
        self._overflows: dict[str, list[torch.Tensor]] = {}
        self._transfers = RepeatedTransfers()
        self._rests: dict[object, list[tuple[TensorSlot, Copy]]] = {}  # copies of a place that are no transfers

    def begin(self, num_buckets: int) -> None:
        """Forgets the overflows of the update before."""
        self._overflows.clear()
        if len(self._rests) > _MAX_PLACES * num_buckets:  # an engine that moves its weights again and again
            self._transfers = RepeatedTransfers()
            self._rests.clear()

    def overflowed(self) -> list[str]:
        """Names of tensors with finite values that became infinite in the model's dtype.  Waits for the device."""
        if not self._overflows:
            return []
        flags = [torch.stack(some).any().item() for some in self._overflows.values()]
        return [name for name, flag in zip(self._overflows, flags, strict=True) if flag]

    def copy(self, bucket: Bucket, plan: BucketPlan, staging: Staging, *, summed: bool = True) -> torch.Tensor | None:
        """Copies a bucket into the staging set.  Enqueued on the current stream of a GPU, done on a CPU.

        Lent slots lie where they belong already.  Returns ``Bucket.sums`` where they were taken on the way.
        """
        if transfers_on(bucket.data.device):
            sums = self._copy_and_sum(bucket, plan, staging, summed=summed)
            return sums if summed else None
        lent = bucket.lent
        copies = [(slot, copy) for slot, copies in plan.table if slot.spec.name not in lent for copy in copies]
        self._copy(bucket, copies, staging)
        return None

    def _copy(self, bucket: Bucket, copies: Sequence[tuple[TensorSlot, Copy]], staging: Staging) -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        flat = Flat(bucket.data)
        waiting: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by parameter, as it is and as bits
        for slot, copy in copies:
            if copy.parameter not in waiting:
                whole = staging.target(copy.parameter).detach()
                waiting[copy.parameter] = whole, bits(whole)
            target, as_bits = waiting[copy.parameter]
            dtype = slot.spec.torch_dtype
            same = target.dtype == dtype
            target = as_bits if same else target
            targets.append(target.as_strided(copy.shape, copy.stride, target.storage_offset() + copy.offset))
            source = flat.region(dtype, copy.shape, copy.source_stride, copy.source_offset, as_bits=same)
            sources.append(source)
            if may_overflow(dtype, target.dtype) and not same:
                self._overflows.setdefault(slot.spec.name, []).append(overflows(source))
        copy_all(targets, sources)

    def _copy_and_sum(self, bucket: Bucket, plan: BucketPlan, staging: Staging, *, summed: bool) -> torch.Tensor:
        """One launch for all copies, except those that cast or that come from another device."""
        where: object = staging.number
        if not staging.staged:  # live parameters may move at any time, those of the second set do not
            where = where, tuple(staging.target(name).data_ptr() for name in plan.parameters)
        place = bucket.layout.index, bucket.data.data_ptr(), where, frozenset(bucket.lent)

        def transfers() -> list[Transfer]:
            found, rest = _transfers_of(bucket, plan, staging)
            self._rests[place] = rest
            return found

        sums = self._transfers.run(place, bucket.layout, bucket.data.device, len(plan.table), transfers, summed=summed)
        self._copy(bucket, self._rests[place], staging)
        return sums


def target_of(copy: Copy, staging: Staging) -> torch.Tensor:
    """The memory that a copy writes."""
    whole = staging.target(copy.parameter).detach()
    return whole.as_strided(copy.shape, copy.stride, whole.storage_offset() + copy.offset)


def _transfers_of(
    bucket: Bucket, plan: BucketPlan, staging: Staging
) -> tuple[list[Transfer], list[tuple[TensorSlot, Copy]]]:
    """The transfers of a bucket, which sum every slot, and those of its copies that cannot be transfers."""
    flat = Flat(bucket.data)
    transfers: list[Transfer] = []
    rest: list[tuple[TensorSlot, Copy]] = []
    for number, (slot, copies) in enumerate(plan.table):
        whole = Transfer(piece=piece_of(slot, bucket.view(slot), slot.first_row), total=number)
        if slot.spec.name in bucket.lent:  # lies where it belongs already
            transfers.append(whole)
            continue
        if len(copies) == 1 and copies[0].shape == slot.shape:
            both = replace(whole, target=target_of(copies[0], staging))
            if can_transfer(both):
                transfers.append(both)
                continue
        transfers.append(whole)
        for copy in copies:
            part = flat.region(slot.spec.torch_dtype, copy.shape, copy.source_stride, copy.source_offset, as_bits=False)
            transfer = Transfer(piece=Piece(tensor=part, full_shape=copy.shape), target=target_of(copy, staging))
            if can_transfer(transfer):
                transfers.append(transfer)
            else:
                rest.append((slot, copy))
    return transfers, rest
