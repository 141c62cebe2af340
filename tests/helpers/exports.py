"""Collects an exporter's tensors as bytes from its buckets."""

from __future__ import annotations

import torch

from tests.helpers.ranks import allocate_slots
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.exporters.bucketize import bucketize
from weightcast.protocols import Exporter
from weightcast.wire.layout import Packing, plan_buckets

CPU = torch.device("cpu")
# Not from ``connect``: the ranks of a job import this module too.
ALONE = TrainerGroup(device=CPU, timeout_s=5)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()


def export(
    exporter: Exporter, group: TrainerGroup = ALONE, *, bucket_bytes: int = 1 << 20, packing: Packing | None = None
) -> dict[str, bytes]:
    """Every tensor's bytes; {} on a rank without buckets.  Buffers start full of noise."""
    layouts = plan_buckets(exporter.specs(), bucket_bytes=bucket_bytes, packing=packing or Packing())
    slots = allocate_slots(CPU, bucket_bytes) if group.rank in group.receivers else None
    for slot in slots or ():
        slot.random_(0, 256)
    parts: dict[str, list[bytes]] = {}
    for bucket in bucketize(exporter, layouts, group, slots):
        for slot, view in bucket.views() if bucket is not None else ():
            parts.setdefault(slot.spec.name, []).append(raw(view))
    return {name: b"".join(pieces) for name, pieces in parts.items()}
