"""Fills planned buckets one after the other: the exporter gathers, and the caller sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from weightcast.digest.source_sums import Taker
from weightcast.errors import ConfigError
from weightcast.protocols import PlannedBucket
from weightcast.wire.bucket import Bucket


def bucketize(
    planned: Sequence[PlannedBucket], slots: Sequence[torch.Tensor] | None, takers: Sequence[Taker] | None = None
) -> Iterator[Bucket | None]:
    """Fills one bucket after another, using the given buffers in turn.  Collective: every rank takes as many steps.

    With n buffers, the caller must have finished with bucket k before it asks for bucket k + n.

    Args:
        planned: The buckets.
        slots: Flat uint8 buffers on the exporter's device, on ranks that have buckets; None elsewhere.
        takers: Take the sums of this rank's shards, one for each bucket; None for no sums.

    Yields:
        The filled bucket.  None on a rank without buffers, once it has sent its part of the bucket.

    Raises:
        ConfigError: A buffer is too small; nothing has moved.
        TrainerRankFailed: Another rank failed.
    """
    needed_bytes = max((one.layout.size_bytes for one in planned), default=0)
    if slots is not None and (not slots or min(slot.numel() for slot in slots) < needed_bytes):
        sizes = [slot.numel() for slot in slots]
        raise ConfigError(f"buffers of {sizes} bytes for buckets of {needed_bytes} bytes")
    for number, one in enumerate(planned):
        data = slots[number % len(slots)] if slots is not None else None
        taker = takers[number] if takers is not None else None
        sums = one.fill(data, taker)
        finite = taker is not None and taker.finite
        yield Bucket(one.layout, data, sums=sums, finite=finite) if data is not None else None
