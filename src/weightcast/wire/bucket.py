"""One flat uint8 buffer and its table of contents.

Views only: nothing here allocates, copies or knows where the buffer came from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from weightcast.wire.layout import BucketLayout, TensorSlot


@dataclass(frozen=True, slots=True)
class Bucket:
    """A filled or fillable bucket.

    Attributes:
        data: uint8, one-dimensional, contiguous, at least ``layout.size_bytes`` long, on any device.
        sums: Partial digest sum of each slot, int64 ``[slots]`` on the device of ``data``, if they were taken
            on the way; else None.
        finite: True if all values were seen to be finite on the way.
    """

    layout: BucketLayout
    data: torch.Tensor
    sums: torch.Tensor | None = None
    finite: bool = False

    def __post_init__(self) -> None:
        if self.data.dtype != torch.uint8 or self.data.dim() != 1 or not self.data.is_contiguous():
            raise ValueError(f"a bucket is flat contiguous uint8, not {tuple(self.data.shape)} {self.data.dtype}")
        if self.data.numel() < self.layout.size_bytes:
            raise ValueError(
                f"bucket {self.layout.index} needs {self.layout.size_bytes} bytes, got {self.data.numel()}"
            )

    def view(self, slot: TensorSlot) -> torch.Tensor:
        """The slot's bytes as a tensor of its dtype and shape ``(num_rows, *rest)``; no copy."""
        return self.data[slot.offset_bytes : slot.end_bytes].view(slot.spec.torch_dtype).view(slot.shape)

    def views(self) -> Iterator[tuple[TensorSlot, torch.Tensor]]:
        """Every slot with its view, in order."""
        for slot in self.layout.slots:
            yield slot, self.view(slot)
