"""Digest sums of the slots of a bucket, the same on both ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

import torch

from weightcast.digest.copy_program import CopyProgram, CopyStep, flat_stand_in, view_of_slot
from weightcast.digest.definition import key_of, partial_sums
from weightcast.digest.pieces import TensorPiece
from weightcast.digest.table import Absent, DigestTable
from weightcast.digest.transfers import worth_launch
from weightcast.wire.box import Box
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout, TensorSlot, TensorSpec


def sums_of_slots(bucket: Bucket) -> torch.Tensor:
    """One partial sum for each slot, or those that came with the bucket: int64 ``[slots]`` on its device."""
    if bucket.sums is not None:
        return bucket.sums
    return partial_sums(_pieces_of(bucket))


def _pieces_of(bucket: Bucket) -> list[TensorPiece]:
    return [piece_of(slot, view, slot.first_row) for slot, view in bucket.views()]


def piece_of(slot: TensorSlot, tensor: torch.Tensor, first_row: int) -> TensorPiece:
    """Some rows of a slot's tensor, as a piece of the whole tensor.

    ``tensor`` has the shape ``(rows, *rest)``, or is all of a tensor without dimensions.  ``first_row`` counts in the
    whole tensor.
    """
    shape = slot.spec.shape
    box = Box(offset=(first_row, *(0 for _ in shape[1:])), shape=tuple(tensor.shape)) if shape else None
    return TensorPiece(tensor=tensor, full_shape=shape, box=box)


class Totals:
    """The digests of all that travelled."""

    def __init__(self, contents: Contents, values: torch.Tensor) -> None:
        """Takes the sums of the slots, int64 ``[slots]`` on the CPU, in the order in which they travelled."""
        self._contents = contents
        self._values = values

    def __bool__(self) -> bool:
        return bool(self._contents.table.names)

    def changed_from(self, other: Totals) -> float | None:
        """The share of the bytes that lie in slots whose sums differ; None if other slots travelled then."""
        contents = self._contents
        if not self or other._contents is not contents:
            return None
        changed = contents.sizes[self._values != other._values]
        return float(changed.sum()) / max(1.0, float(contents.sizes.sum()))

    def by_name(self) -> dict[str, str]:
        """The digest of each tensor, by its name."""
        return self._contents.table.by_name(self._by_tensor)

    def model_digest(self) -> str:
        """``model_digest`` of ``by_name``."""
        return self._contents.table.of_all(self._by_tensor)

    def digest_of_sent(self, specs: Sequence[TensorSpec]) -> str:
        """``model_digest`` of those of some tensors that travelled."""
        contents = self._contents
        return self.digest_of(specs, contents.absent.names(specs, contents.specs))

    def digest_of(self, specs: Sequence[TensorSpec], without: Collection[str]) -> str:
        """``model_digest`` of some tensors; see ``DigestTable.of_some``."""
        return self._contents.table.of_some(self._by_tensor, specs, without)

    @cached_property
    def _by_tensor(self) -> torch.Tensor:
        contents = self._contents
        return torch.zeros_like(contents.table.keys).index_add_(0, contents.numbers, self._values)


class Contents:
    """The tensors that some buckets carry together, in the order in which they travel.

    ``numbers`` has the tensor that each slot belongs to, int64 ``[slots]``, and ``sizes`` the bytes of each, float64.
    """

    def __init__(self, layouts: Sequence[BucketLayout]) -> None:
        slots = [slot for layout in layouts for slot in layout.slots]
        specs = {slot.spec.name: slot.spec for slot in slots}
        self.specs = tuple(specs.values())
        self.absent = Absent()
        number_of = {name: number for number, name in enumerate(specs)}
        keys = [key_of(spec.torch_dtype, spec.shape) for spec in specs.values()]
        self.table = DigestTable(tuple(specs), torch.tensor(keys, dtype=torch.int64))
        self.numbers = torch.tensor([number_of[slot.spec.name] for slot in slots], dtype=torch.int64)
        self.sizes = torch.tensor([slot.size_bytes for slot in slots], dtype=torch.float64)


NOTHING = Totals(Contents(()), torch.zeros(0, dtype=torch.int64))


class PlanSums:
    """The sums of one plan's buckets, and their digests.  All that is worked out once goes with the plan.

    Buckets of no plan, or of another one, are summed as well, without help from an earlier update.
    """

    def __init__(self, layouts: Sequence[BucketLayout] = ()) -> None:
        """Works out nothing yet."""
        self.layouts = list(layouts)
        self._layout_of = {layout.index: layout for layout in layouts}
        self._programs: dict[tuple[int, torch.device], CopyProgram] = {}

    def prepare(self, device: torch.device) -> None:
        """Works out the sums of buckets on a device."""
        for layout in self.layouts:
            if worth_launch(layout.size_bytes, device):
                self._program(layout, device)

    def prepare_totals(self) -> Totals:
        """Works out the digests of all buckets together; returns those of sums that are 0."""
        return Totals(self._contents, torch.zeros(len(self._contents.numbers), dtype=torch.int64))

    def of(self, bucket: Bucket) -> torch.Tensor:
        """As ``sums_of_slots``."""
        layout, device = bucket.layout, bucket.data.device
        known = self._layout_of.get(layout.index) == layout
        if bucket.sums is not None or not known or not worth_launch(layout.size_bytes, device):
            return sums_of_slots(bucket)
        return self._program(layout, device).sums([bucket.data])

    def totals(self, sums: Sequence[tuple[BucketLayout, torch.Tensor]]) -> Totals:
        """Builds the digests of all that travelled, from the sums of each bucket's slots.  Waits for the device."""
        if not sums:
            return NOTHING
        layouts = [layout for layout, _ in sums]
        contents = self._contents if layouts == self.layouts else Contents(layouts)
        # Few calls of CUDA and torch: engines wait meanwhile, and with cold caches each call is slow.
        return Totals(contents, torch.cat([values for _, values in sums]).cpu())

    @cached_property
    def _contents(self) -> Contents:
        return Contents(self.layouts)

    def _program(self, layout: BucketLayout, device: torch.device) -> CopyProgram:
        """The sums of a bucket wherever it lies."""
        known = self._programs.get((layout.index, device))
        if known is None:
            steps = [
                CopyStep(view_of_slot(slot), None, slot.spec.shape, slot.box, number)
                for number, slot in enumerate(layout.slots)
            ]
            known = CopyProgram(steps, [flat_stand_in(layout.size_bytes)], device, num_sums=len(steps), launches=True)
            self._programs[layout.index, device] = known
        return known
