"""Sums of the buckets that one rank has received in a session, and the digests that they add up to."""

from __future__ import annotations

import torch

from weightcast.digest.bucket_sums import PlanSums
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout


class ReceivedSums:
    """Takes the sums of each bucket as it arrives.  They go to the host without a wait, which would stop the stream."""

    def __init__(self) -> None:
        self._received: list[tuple[BucketLayout, torch.Tensor]] = []
        self._sums = PlanSums()

    def clear(self) -> None:
        """Drops the sums of a session that is over."""
        self._received.clear()

    def add(self, bucket: Bucket) -> None:
        """Sums a bucket for the proof."""
        self._received.append((bucket.layout, _to_host(self._sums.of(bucket))))

    def of_all(self) -> str:
        """One digest of everything that has arrived, empty without proof.  Waits for the device."""
        return self._sums.totals(self._received).of_all()

    def by_name(self) -> dict[str, str]:
        """The digest of each tensor that has arrived, by name.  Waits for the device."""
        return self._sums.totals(self._received).by_name()


def _to_host(sums: torch.Tensor) -> torch.Tensor:
    """Copies sums to the host without a wait; they are valid once the current stream has come so far."""
    if sums.device.type != "cuda":
        return sums
    return torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True).copy_(sums, non_blocking=True)
