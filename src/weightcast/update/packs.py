"""Puts pieces of a bucket together in a flat buffer, one pack for each kind of engine rank.

Engine ranks of one kind want the same boxes, so one pack serves all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weightcast.digest.copies import Flat, bits, copy_all
from weightcast.exporters.held_parts import region
from weightcast.wire.box import Box, contiguous_strides
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout
from weightcast.wire.pieces import ALIGNMENT_BYTES, PieceMessage, Wanted, plan_message

Parts = Sequence[tuple[int, Box]]


@dataclass(frozen=True, slots=True)
class PackPlan:
    """The pieces of one bucket.

    Attributes:
        parts: Number of the slot and box of each part that engines get from this rank.
        starts: First byte of each pack.
    """

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


def pack(bucket: Bucket, plan: PackPlan, out: torch.Tensor) -> None:
    """Copies the packed pieces of a bucket into a flat uint8 buffer of at least ``plan.packed_bytes``."""
    flat = Flat(out)
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for message, start in zip(plan.messages, plan.starts, strict=True):
        for piece in message.pieces:
            if not piece.straight:
                slot = bucket.layout.slots[piece.slot]
                raw = region(bucket, slot, piece.box)
                sources.append(raw)
                targets.append(
                    flat.region(
                        slot.spec.torch_dtype,
                        raw.shape,
                        contiguous_strides(piece.box.shape),
                        (start + piece.offset_bytes) // slot.spec.torch_dtype.itemsize,
                        as_bits=False,
                    )
                )
    copy_all([bits(one) for one in targets], [bits(one) for one in sources])
