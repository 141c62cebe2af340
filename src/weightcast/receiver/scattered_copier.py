"""Copies buckets whose parts lie in the buffers of several trainer ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from weightcast.digest.bucket_sums import piece_of
from weightcast.digest.definition import partial_sums
from weightcast.receiver.bucket_copier import BucketCopier
from weightcast.receiver.scattered_plan import Parts, ScatteredPlan, plan_scattered
from weightcast.receiver.staging import Staging
from weightcast.wire.box import Box
from weightcast.wire.bucket import Bucket
from weightcast.wire.held import HeldPart
from weightcast.wire.layout import BucketLayout, TensorSlot
from weightcast.wire.routes import Route


class ScatteredCopier:
    """Copies the own share of such buckets, in update after update.

    Attributes:
        read_bytes: Bytes that were read in this update.
        wholes: The tensors that were put together for the model's own loader in this update, and their sums.
    """

    def __init__(self) -> None:
        self._plans: dict[int, tuple[ScatteredPlan, list[BucketCopier]]] = {}
        self.read_bytes = 0
        self.wholes: list[tuple[HeldPart, int]] = []

    def begin(self) -> None:
        """Forgets what an earlier update left."""
        self.read_bytes = 0
        self.wholes.clear()

    def plan(
        self,
        layout: BucketLayout,
        parts: Parts,
        routes: Mapping[str, Sequence[Route]],
        computed: Collection[str],
    ) -> ScatteredPlan:
        """The plan of a bucket; the arguments are those of ``plan_scattered``."""
        plan, _ = self._plans.get(layout.index, (None, None))
        if plan is None or plan.layout != layout or plan.parts != parts:
            plan = plan_scattered(layout, parts, routes, computed)
            # A copier remembers copies by a buffer's address, where another trainer rank's buffer may lie next time.
            self._plans[layout.index] = plan, [BucketCopier() for _ in plan.buffers]
        return plan

    def copy(self, buckets: Sequence[Bucket], plan: ScatteredPlan, staging: Staging) -> None:
        """Copies out of all buffers into the set of weights that is written."""
        _, copiers = self._plans[plan.layout.index]
        for bucket, own, copier in zip(buckets, plan.buffers, copiers, strict=True):
            if own.parameters:
                copier.copy(bucket, own, staging, summed=False)
        self.read_bytes += plan.read_bytes

    def put_together(
        self, slot: TensorSlot, boxes: Sequence[tuple[int, Box]], buckets: Sequence[Bucket]
    ) -> torch.Tensor:
        """A slot's rows in memory of their own, out of the parts in several buffers; also sums them."""
        found = torch.empty(slot.shape, dtype=slot.spec.torch_dtype, device=buckets[0].data.device)
        for buffer, box in boxes:
            origin = (slot.first_row, *(0 for _ in box.shape[1:]))[: len(box.shape)]
            index = tuple(
                slice(start - first, start - first + extent)
                for start, extent, first in zip(box.offset, box.shape, origin, strict=True)
            )
            found[index].copy_(buckets[buffer].view(slot)[index])
        [total] = partial_sums([piece_of(slot, found, slot.first_row)]).tolist()
        shape = slot.spec.shape
        first = (slot.first_row, *(0 for _ in shape[1:])) if shape else ()
        rows = (slot.num_rows, *shape[1:]) if shape else ()
        self.wholes.append((HeldPart(spec=slot.spec, box_offset=first, box_shape=rows), total))
        return found
