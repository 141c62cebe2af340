"""Puts pieces of a bucket together in a flat buffer, one pack for each kind of engine rank.

Engine ranks of one kind want the same boxes, so one pack serves all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weightcast.digest.copy_program import CopyProgram, CopyStep, View, flat_stand_in, view_of_slot
from weightcast.wire.box import Box, contiguous_strides
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout
from weightcast.wire.pieces import ALIGNMENT_BYTES, PieceMessage, Wanted, plan_message

Parts = Sequence[tuple[int, Box]]


@dataclass(frozen=True, slots=True)
class PackPlan:
    """The pieces of one bucket: of the parts (slot and box) of this rank, with the first byte of each pack."""

    layout: BucketLayout
    parts: Parts
    messages: Sequence[PieceMessage]
    starts: Sequence[int]
    packed_bytes: int


class Packs:
    """The packs of one trainer rank.  Plans are made once and reused as long as buckets and parts stay alike."""

    def __init__(self, kinds: Sequence[Wanted], *, read: bool = False) -> None:
        """Plans nothing yet.

        ``kinds`` has the boxes that each kind of engine rank wants; ``read`` is as for ``plan_message``.
        """
        self._kinds = kinds
        self._read = read
        self._plans: dict[int, PackPlan] = {}
        self._programs: dict[int, CopyProgram] = {}

    def plan(self, layout: BucketLayout, parts: Parts) -> PackPlan:
        """The pieces of a bucket."""
        plan = self._plans.get(layout.index)
        if plan is None or plan.layout != layout or plan.parts != parts:
            messages = [plan_message(layout, parts, wanted, read=self._read) for wanted in self._kinds]
            starts, end = list[int](), 0
            for message in messages:
                starts.append(end)
                end += -(-message.packed_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            plan = self._plans[layout.index] = PackPlan(layout, parts, messages, starts, end)
        return plan

    def pack(self, bucket: Bucket, plan: PackPlan, out: torch.Tensor) -> None:
        """Copies the packed pieces of a bucket into a flat uint8 buffer of at least ``plan.packed_bytes``.

        Enqueued on the current stream of a GPU, done on a CPU.  For buffers that were packed before nothing is done
        for each piece but the copy.
        """
        if not plan.packed_bytes:
            return
        program = self._programs.get(plan.layout.index)
        if program is None or not program.is_for(plan, [bucket.data, out]):
            program = self._programs[plan.layout.index] = _program_of(plan, out.device)
        program.run([bucket.data, out], summed=False)


def _program_of(plan: PackPlan, device: torch.device) -> CopyProgram:
    """The copies of a plan wherever the bucket and the packs lie."""
    steps: list[CopyStep] = []
    for message, start in zip(plan.messages, plan.starts, strict=True):
        for piece in message.pieces:
            if not piece.straight:
                source = view_of_slot(plan.layout.slots[piece.slot], piece.box)
                first = (start + piece.offset_bytes) // source.dtype.itemsize
                target = View(1, source.dtype, source.shape, contiguous_strides(source.shape), first)
                steps.append(CopyStep(source, target, source.shape))
    memories = [flat_stand_in(plan.layout.size_bytes), flat_stand_in(plan.packed_bytes)]
    return CopyProgram(steps, memories, device, num_sums=1, form=plan)
