"""One flat uint8 buffer and its table of contents.

Views only: nothing here allocates, copies or knows where the buffer came from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from weightcast.wire.layout import BucketLayout, TensorSlot


@dataclass(frozen=True, slots=True)
class Bucket:
    """A filled or fillable bucket.

    Attributes:
        data: uint8, one-dimensional, contiguous, at least ``layout.size_bytes`` long, on any device.
        sums: Partial digest sum of each slot, int64 ``[slots]`` on the device of ``data``, if they were taken
            on the way; else None.
        lent: Bytes of slots that lie outside ``data``, flat uint8, by tensor name: zero-copy views of the trainer's
            tensors, or the places where the engine keeps them.
        finite: True if all values were seen to be finite on the way.
    """

    layout: BucketLayout
    data: torch.Tensor
    sums: torch.Tensor | None = None
    lent: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
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
        raw = self.lent.get(slot.spec.name)
        if raw is None:
            raw = self.data[slot.offset_bytes : slot.end_bytes]
        return raw.view(slot.spec.torch_dtype).view(slot.shape)

    def views(self) -> Iterator[tuple[TensorSlot, torch.Tensor]]:
        """Every slot with its view, in order."""
        for slot in self.layout.slots:
            yield slot, self.view(slot)

    def runs(self) -> list[torch.Tensor]:
        """The bytes of the bucket in order, as flat uint8 tensors: one, and more where slots are lent."""
        return [
            self.data[start:end] if name is None else self.lent[name]
            for start, end, name in _runs(self.layout, self.lent.keys())
        ]


def run_sizes(layout: BucketLayout, lent: Collection[str]) -> tuple[int, ...]:
    """Sizes of a bucket's runs, in bytes; ``lent`` names the tensors whose slots are lent."""
    return tuple(end - start for start, end, _ in _runs(layout, lent))


def _runs(layout: BucketLayout, lent: Collection[str]) -> Iterator[tuple[int, int, str | None]]:
    """First byte and end of each run, and the name of the tensor that is lent; None for bytes of the buffer."""
    done = 0
    for slot in layout.slots if lent else ():
        if slot.spec.name in lent:
            if slot.offset_bytes > done:
                yield done, slot.offset_bytes, None
            yield slot.offset_bytes, slot.end_bytes, slot.spec.name
            done = slot.end_bytes
    if done < layout.size_bytes:
        yield done, layout.size_bytes, None
