"""Digest sums of the slots of a bucket, the same on both ends."""

from __future__ import annotations

import torch

from weightcast.wire.bucket import Bucket
from weightcast.wire.digest import Box, Piece, RepeatedSums
from weightcast.wire.layout import TensorSlot


def sums_of_slots(bucket: Bucket, repeated: RepeatedSums) -> torch.Tensor:
    """One partial sum for each slot: int64 ``[slots]`` on the bucket's device, to be read mod 2**64.

    Args:
        bucket: Filled.
        repeated: Of the same owner in earlier updates.
    """
    layout, data = bucket.layout, bucket.data
    return repeated.sums(
        (layout.index, data.data_ptr()),
        layout,
        data.device,
        lambda: [piece_of(slot, view, slot.first_row) for slot, view in bucket.views()],
    )


def piece_of(slot: TensorSlot, tensor: torch.Tensor, first_row: int) -> Piece:
    """Some rows of a slot's tensor, as a part of the whole one.

    Args:
        slot: Whose.
        tensor: Shape ``(rows, *rest)``, or all of a tensor without dimensions.
        first_row: Which row of the whole tensor is its first.
    """
    shape = slot.spec.shape
    box = Box(offset=(first_row, *(0 for _ in shape[1:])), shape=tuple(tensor.shape)) if shape else None
    return Piece(tensor=tensor, full_shape=shape, box=box)
