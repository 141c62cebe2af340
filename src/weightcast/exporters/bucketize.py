"""An exporter as a stream of filled buckets.

Knows the order of work and nothing else: who gathers is the exporter's affair, who sends is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from weightcast.comm.local import TrainerGroup
from weightcast.errors import ConfigError
from weightcast.protocols import Exporter
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout


def bucketize(
    exporter: Exporter,
    layouts: Sequence[BucketLayout],
    group: TrainerGroup,
    slots: Sequence[torch.Tensor] | None,
    lent: Sequence[Mapping[str, torch.Tensor]] = (),
) -> Iterator[Bucket | None]:
    """Fill bucket after bucket, in turn into the given buffers.  Collective: every rank takes as many steps.

    With n buffers, bucket k must be done with before bucket k + n is asked for.

    Args:
        exporter: Whose tensors.
        layouts: What goes where; the same on every rank.
        group: The trainer ranks.
        slots: Flat uint8 buffers on the exporter's device, on ranks of ``group.receivers``; None elsewhere.
        lent: ``Bucket.lent`` of each bucket, in order; empty if all is to be in the buffers.

    Yields:
        The filled bucket; None on a rank without buffers, when its part of the bucket is given.

    Raises:
        ConfigError: A buffer is too small; nothing has moved.
        TrainerRankFailed: Another rank failed.
    """
    needed_bytes = max((layout.size_bytes for layout in layouts), default=0)
    if slots is not None and (not slots or min(slot.numel() for slot in slots) < needed_bytes):
        sizes = [slot.numel() for slot in slots]
        raise ConfigError(f"buffers of {sizes} bytes for buckets of {needed_bytes} bytes")
    for number, layout in enumerate(layouts):
        stays = lent[number] if lent else {}
        bucket = Bucket(layout, slots[number % len(slots)], lent=stays) if slots is not None else None
        sums = exporter.fill(bucket, layout, group)
        yield replace(bucket, sums=sums) if bucket is not None else None
