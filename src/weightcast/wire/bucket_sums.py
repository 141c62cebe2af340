"""Digest sums of the slots of a bucket, the same on both ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightcast.wire.bucket import Bucket
from weightcast.wire.digest import Box, Piece, RepeatedSums, finish_all, key_of
from weightcast.wire.layout import BucketLayout, TensorSlot


def sums_of_slots(bucket: Bucket, repeated: RepeatedSums) -> torch.Tensor:
    """One partial sum for each slot: int64 ``[slots]`` on the bucket's device, to be read mod 2**64.

    Args:
        bucket: Filled.  Sums that it came with are taken as they are.
        repeated: Of the same owner in earlier updates.
    """
    if bucket.sums is not None:
        return bucket.sums
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


class RepeatedTotals:
    """Digests of whole tensors from the sums of their slots; what belongs together is worked out once for the same
    buckets."""

    def __init__(self) -> None:
        self._layouts: list[BucketLayout] = []
        self._names: list[str] = []
        self._numbers = self._keys = torch.zeros(0, dtype=torch.int64)

    def digests(self, sums: Sequence[tuple[BucketLayout, torch.Tensor]]) -> dict[str, str]:
        """By tensor name.  Waits for the device.

        Args:
            sums: Of the slots of each bucket, as from ``sums_of_slots``.
        """
        if not sums:
            return {}
        layouts = [layout for layout, _ in sums]
        if layouts != self._layouts:
            self._work_out(layouts)
        values = torch.cat([values for _, values in sums]).cpu()
        totals = torch.zeros_like(self._keys).index_add_(0, self._numbers, values)
        return dict(zip(self._names, finish_all(totals, self._keys), strict=True))

    def _work_out(self, layouts: list[BucketLayout]) -> None:
        specs = {slot.spec.name: slot.spec for layout in layouts for slot in layout.slots}
        numbers = {name: number for number, name in enumerate(specs)}
        self._layouts = layouts
        self._names = list(specs)
        self._keys = torch.tensor([key_of(spec.torch_dtype, spec.shape) for spec in specs.values()], dtype=torch.int64)
        self._numbers = torch.tensor(
            [numbers[slot.spec.name] for layout in layouts for slot in layout.slots], dtype=torch.int64
        )
