"""Puts pieces of a bucket together in a flat buffer, one pack for each kind of engine rank.

Engine ranks of one kind want the same boxes, so one pack serves all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from weightcast.digest.copies import Flat, bits, copy_all
from weightcast.digest.pieces import TensorPiece as TensorPiece
from weightcast.digest.pieces import Transfer
from weightcast.digest.templates import Placed, Template, flat_stand_in
from weightcast.digest.transfers import PlacedLaunches, can_transfer, transfers_on
from weightcast.exporters.held_parts import region
from weightcast.wire.box import Box, contiguous_strides
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout
from weightcast.wire.pieces import ALIGNMENT_BYTES, Piece, PieceMessage, Wanted, plan_message

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
        self._steps: dict[int, _PackSteps] = {}

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
        if not transfers_on(out.device):
            _copy(bucket, out, _packed(plan))
            return
        steps = self._steps.get(plan.layout.index)
        if steps is None or steps.plan is not plan or steps.device != out.device:
            steps = self._steps[plan.layout.index] = _steps_of(plan, out.device)
        addresses = bucket.data.data_ptr(), out.data_ptr()
        steps.launches.run(addresses, lambda: Placed(steps.template, addresses), summed=False)
        _copy(bucket, out, steps.rest)


@dataclass(frozen=True, slots=True, eq=False)
class _PackSteps:
    """The copies of a plan wherever the bucket and the packs lie; ``rest`` has the pieces that are no transfers."""

    plan: PackPlan
    device: torch.device
    template: Template
    launches: PlacedLaunches
    rest: list[tuple[int, Piece]]


def _steps_of(plan: PackPlan, device: torch.device) -> _PackSteps:
    bucket, out = Bucket(plan.layout, flat_stand_in(plan.layout.size_bytes)), Flat(flat_stand_in(plan.packed_bytes))
    transfers, rest = list[Transfer](), list[tuple[int, Piece]]()
    for start, piece in _packed(plan):
        target, source = _views(bucket, out, start, piece)
        transfer = Transfer(piece=TensorPiece(tensor=source, full_shape=tuple(source.shape)), target=target)
        if can_transfer(transfer):
            transfers.append(transfer)
        else:
            rest.append((start, piece))
    template = Template(transfers, [(0, 1)] * len(transfers), device)
    return _PackSteps(plan, device, template, PlacedLaunches(device, 1), rest)


def _packed(plan: PackPlan) -> Iterator[tuple[int, Piece]]:
    """The packed pieces, each with the first byte of its pack."""
    for message, start in zip(plan.messages, plan.starts, strict=True):
        for piece in message.pieces:
            if not piece.straight:
                yield start, piece


def _views(bucket: Bucket, out: Flat, start: int, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
    """The place of a piece in the packs, and in the bucket."""
    slot = bucket.layout.slots[piece.slot]
    dtype, source = slot.spec.torch_dtype, region(bucket, slot, piece.box)
    offset = (start + piece.offset_bytes) // dtype.itemsize
    return out.region(dtype, source.shape, contiguous_strides(piece.box.shape), offset, as_bits=False), source


def _copy(bucket: Bucket, out: torch.Tensor, pieces: Iterable[tuple[int, Piece]]) -> None:
    flat = Flat(out)
    pairs = [_views(bucket, flat, start, piece) for start, piece in pieces]
    copy_all([bits(target) for target, _ in pairs], [bits(source) for _, source in pairs])
