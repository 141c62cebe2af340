"""Digest sums of the slots of a bucket, the same on both ends."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence

import msgspec
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


class Totals:
    """The digests of all that travelled.  Made of what it takes to compare all at once; each by name when asked for."""

    def __init__(self, contents: Contents, values: torch.Tensor) -> None:
        """Of all.

        Args:
            contents: What the buckets carry.
            values: The sums of their slots, int64 ``[slots]`` on the CPU, in the order in which they travelled.
        """
        self._contents = contents
        self._values = values

    def __bool__(self) -> bool:
        return bool(self._contents.names)

    def of_all(self) -> str:
        """One digest of all, 32 hex characters: BLAKE2b over the table of contents and the sums, for whoever has the
        same buckets; empty if there are none."""
        if not self:
            return ""
        hashed = hashlib.blake2b(self._contents.seed, digest_size=16)
        values = self._values.contiguous()
        hashed.update((ctypes.c_ubyte * values.nbytes).from_address(values.data_ptr()))
        return hashed.hexdigest()

    def by_name(self) -> dict[str, str]:
        """Of each tensor, by its name."""
        contents = self._contents
        totals = torch.zeros_like(contents.keys).index_add_(0, contents.numbers, self._values)
        return dict(zip(contents.names, finish_all(totals, contents.keys), strict=True))


class Contents:
    """What some buckets carry together.

    Attributes:
        names: Of the tensors, in the order in which they travel.
        keys: Their ``digest.key_of``, int64 ``[tensors]``.
        numbers: Which tensor each slot belongs to, int64 ``[slots]``.
        seed: Digest of all slots.
    """

    def __init__(self, layouts: Sequence[BucketLayout]) -> None:
        slots = [slot for layout in layouts for slot in layout.slots]
        specs = {slot.spec.name: slot.spec for slot in slots}
        number_of = {name: number for number, name in enumerate(specs)}
        self.names = tuple(specs)
        self.keys = torch.tensor([key_of(spec.torch_dtype, spec.shape) for spec in specs.values()], dtype=torch.int64)
        self.numbers = torch.tensor([number_of[slot.spec.name] for slot in slots], dtype=torch.int64)
        self.seed = hashlib.blake2b(msgspec.json.encode(slots), digest_size=16).digest()


NOTHING = Totals(Contents(()), torch.zeros(0, dtype=torch.int64))


class RepeatedTotals:
    """``Totals`` of update after update; what the buckets carry is worked out once for the same ones."""

    def __init__(self) -> None:
        self._layouts: list[BucketLayout] = []
        self._contents = Contents(())

    def totals(self, sums: Sequence[tuple[BucketLayout, torch.Tensor]]) -> Totals:
        """Of all that travelled.  Waits for the device.

        Args:
            sums: Of the slots of each bucket, as from ``sums_of_slots``.
        """
        if not sums:
            return NOTHING
        layouts = [layout for layout, _ in sums]
        if layouts != self._layouts:
            self._layouts, self._contents = layouts, Contents(layouts)
        # Few calls, of CUDA and of torch: engines wait, with cold caches, and each takes long.
        return Totals(self._contents, torch.cat([values for _, values in sums]).cpu())
