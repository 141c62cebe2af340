"""Exports a model and sums its sources on the way."""

from __future__ import annotations

import torch

from tests.helpers.exports import CPU, plan
from tests.helpers.ranks import allocate_slots
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.bucket_sums import PlanSums
from weightcast.digest.definition import tensor_digest
from weightcast.digest.source_sums import SourceSums
from weightcast.exporters import all_sums
from weightcast.exporters.bucketize import bucketize
from weightcast.protocols import TO_HEAD, BucketUse, Exporter
from weightcast.wire.layout import Packing, plan_buckets


def summed(exporter: Exporter, group: TrainerGroup, use: BucketUse = TO_HEAD, *, bucket_bytes: int, flip: bool = False):
    """On the head (digests by the ranks' own sums, digests of what was gathered, mismatches); None elsewhere."""
    layouts = plan_buckets(exporter.specs(), bucket_bytes=bucket_bytes, packing=Packing())
    has_bucket = group.rank in use.receivers
    slots = allocate_slots(CPU, bucket_bytes) if has_bucket else None
    planned = plan(exporter, layouts, group, use)
    sources = SourceSums([bucket.sum_places for bucket in planned])
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
        for bucket in bucketize(planned, slots, sources.takers):
            for slot, view in bucket.views() if bucket is not None else ():
                parts.setdefault(slot.spec.name, []).append(view.clone())
    finally:
        TrainerGroup.move = move
    sums = all_sums.add_up(sources, None, group, timeout_s=60)
    found = all_sums.find_differing(sums, group, timeout_s=60)
    if not group.is_head:
        return None
    assert sums.differ == bool(found)
    totals = PlanSums().totals(list(zip(layouts, sums.sources, strict=True)))
    gathered = {name: tensor_digest(torch.cat(some) if some[0].dim() else some[0]) for name, some in parts.items()}
    return totals.by_name(), gathered, [(one.name, one.ranks, one.gathered) for one in found], len(flipped)
