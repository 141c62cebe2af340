"""Exports a model and sums its sources on the way."""

from __future__ import annotations

import torch

from tests.helpers.exports import CPU, bucketize
from tests.helpers.ranks import allocate_slots
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.bucket_sums import PlanSums
from weightcast.digest.definition import tensor_digest
from weightcast.digest.source_sums import SourceSums
from weightcast.exporters import sum_messages
from weightcast.protocols import TO_HEAD, BucketUse, Exporter
from weightcast.wire.layout import Packing, plan_buckets


def summed(exporter: Exporter, group: TrainerGroup, use: BucketUse = TO_HEAD, *, bucket_bytes: int, flip: bool = False):
    """On the head (digests by the ranks' own sums, digests of what was gathered, mismatches); None elsewhere."""
    layouts = plan_buckets(exporter.specs(), bucket_bytes=bucket_bytes, packing=Packing())
    has_bucket = group.rank in use.receivers
    slots = allocate_slots(CPU, bucket_bytes) if has_bucket else None
    sources = SourceSums()
    move = TrainerGroup.move
    flipped: list[int] = []

    def flipping(self, sends, receives, *, what):
        move(self, sends, receives, what=what)
        if receives and not flipped and flip and self.is_head:
            receives[0].data.view(-1).view(torch.uint8)[0] ^= 1
            flipped.append(1)

    TrainerGroup.move = flipping
    try:
        parts: dict[str, list[torch.Tensor]] = {}
        for bucket in bucketize(exporter, layouts, group, slots, sources, use):
            for slot, view in bucket.views() if bucket is not None else ():
                parts.setdefault(slot.spec.name, []).append(view.clone())
    finally:
        TrainerGroup.move = move
    messages = group.gather_bytes(sum_messages.encode(sources.values(), ()))
    if messages is None:
        return None
    folded, _ = sum_messages.decode(exporter.plan(layouts, group, use), messages)
    known = all(bool(one.known.all()) for one in folded)
    totals = PlanSums().totals([(layout, one.sums) for layout, one in zip(layouts, folded, strict=True)])
    gathered = {name: tensor_digest(torch.cat(some) if some[0].dim() else some[0]) for name, some in parts.items()}
    mismatches = [(one.name, one.ranks, one.gathered) for folds in folded for one in folds.mismatches]
    return (totals.by_name() if known else None), gathered, mismatches, len(flipped)
