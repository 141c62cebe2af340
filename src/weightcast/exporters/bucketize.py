"""Turns an exporter into a stream of filled buckets: the exporter gathers, and the caller sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch

from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.source_sums import SourceSums
from weightcast.errors import ConfigError
from weightcast.protocols import Exporter, Scattering, Summing
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout


def bucketize(
    exporter: Exporter,
    layouts: Sequence[BucketLayout],
    group: TrainerGroup,
    slots: Sequence[torch.Tensor] | None,
    sources: SourceSums | None = None,
    *,
    scattered: bool = False,
) -> Iterator[Bucket | None]:
    """Fills one bucket after another, using the given buffers in turn.  Collective: every rank takes as many steps.

    With n buffers, the caller must have finished with bucket k before it asks for bucket k + n.

    Args:
        slots: Flat uint8 buffers on the exporter's device, on ranks of ``group.receivers``; None elsewhere.
        sources: Takes the sums of this rank's shards, if the exporter is ``Summing``; None for no sums.
        scattered: True leaves shards where they are: each rank's bucket gets that rank's own parts.

    Yields:
        The filled bucket.  None on a rank without buffers, once it has sent its part of the bucket.

    Raises:
        ConfigError: A buffer is too small; nothing has moved.
        TrainerRankFailed: Another rank failed.
    """
    needed_bytes = max((layout.size_bytes for layout in layouts), default=0)
    if slots is not None and (not slots or min(slot.numel() for slot in slots) < needed_bytes):
        sizes = [slot.numel() for slot in slots]
        raise ConfigError(f"buffers of {sizes} bytes for buckets of {needed_bytes} bytes")
    sums_on_the_way = sources is not None and isinstance(exporter, Summing)
    for number, layout in enumerate(layouts):
        if sources is not None:
            sources.finite = None
        bucket = Bucket(layout, slots[number % len(slots)]) if slots is not None else None
        if scattered:
            assert bucket is not None
            sums = cast(Scattering, exporter).fill_own(bucket, layout, group, sources)
        elif sources is not None and sums_on_the_way:
            sums = cast(Summing, exporter).fill(bucket, layout, group, sources)
        else:
            sums = exporter.fill(bucket, layout, group)
        finite = sources is not None and sources.finite is layout
        yield replace(bucket, sums=sums, finite=finite) if bucket is not None else None
