"""Collects an exporter's tensors as bytes from its buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tests.helpers.ranks import allocate_slots
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.source_sums import SourceSums, Taker
from weightcast.exporters import bucketize as filling
from weightcast.protocols import TO_HEAD, BucketUse, Exporter, PlannedBucket
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout, Packing, plan_buckets

CPU = torch.device("cpu")
# Not from ``connect``: the ranks of a job import this module too.
ALONE = TrainerGroup(device=CPU, timeout_s=5)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()


def plan(
    exporter: Exporter, layouts: Sequence[BucketLayout], group: TrainerGroup = ALONE, use: BucketUse = TO_HEAD
) -> Sequence[PlannedBucket]:
    """Buckets of an exporter that nobody has prepared."""
    exporter.prepare(group)
    return exporter.plan(layouts, group, use)


def bucketize(
    exporter: Exporter,
    layouts: Sequence[BucketLayout],
    group: TrainerGroup,
    slots: Sequence[torch.Tensor] | None,
    use: BucketUse = TO_HEAD,
    *,
    sums: bool = False,
) -> Iterator[Bucket | None]:
    """Plans and fills buckets; ``sums`` says that ranks sum their shards on the way."""
    planned = plan(exporter, layouts, group, use)
    return filling.bucketize(planned, slots, takers_of(planned) if sums else None)


def takers_of(planned: Sequence[PlannedBucket]) -> Sequence[Taker]:
    """Takes the sums of one update."""
    return SourceSums([bucket.sum_places for bucket in planned]).takers


def export(
    exporter: Exporter,
    group: TrainerGroup = ALONE,
    use: BucketUse = TO_HEAD,
    *,
    bucket_bytes: int = 1 << 20,
    packing: Packing | None = None,
) -> dict[str, bytes]:
    """Every tensor's bytes; {} on a rank without buckets.  Buffers start full of noise."""
    layouts = plan_buckets(exporter.specs(), bucket_bytes=bucket_bytes, packing=packing or Packing())
    slots = allocate_slots(CPU, bucket_bytes) if group.rank in use.receivers else None
    for slot in slots or ():
        slot.random_(0, 256)
    return contents(bucketize(exporter, layouts, group, slots, use=use))


def contents(buckets: Iterator[Bucket | None]) -> dict[str, bytes]:
    """Every tensor's bytes in some buckets."""
    parts: dict[str, list[bytes]] = {}
    for bucket in buckets:
        for slot, view in bucket.views() if bucket is not None else ():
            parts.setdefault(slot.spec.name, []).append(raw(view))
    return {name: b"".join(pieces) for name, pieces in parts.items()}
