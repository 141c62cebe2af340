"""The boxes that one trainer rank sends to one engine rank, and their places in the message.  Numbers only.

Both ends work the message out by themselves: from the parts of a bucket that the trainer rank has, and from the boxes
that the engine rank wants.  So a message has no table of contents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from weightcast.wire.box import Box, contiguous_strides, intersection, is_one_run
from weightcast.wire.fields import decoded
from weightcast.wire.layout import MAX_TENSORS, BucketLayout, Shape, TensorSlot

ALIGNMENT_BYTES = 16  # more than any dtype needs
# Sending a piece by itself costs more than packing it below this size, and packing costs more above it.
STRAIGHT_BYTES = 64 << 10
# Reading a run of bytes by itself costs more than reading it with others, out of a pack, below this size.
RUN_BYTES = 16 << 10
_MAX_ROUTES = 1 << 22


class WantedBox(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of a source tensor that an engine rank keeps, or that its model's own loader needs."""

    offset: Shape
    shape: Shape

    @property
    def box(self) -> Box:
        return Box(offset=self.offset, shape=self.shape)


# By name of the source tensor, in the order of the rank's routes.
Wanted = dict[str, tuple[WantedBox, ...]]

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(
    Annotated[dict[str, Annotated[tuple[WantedBox, ...], Meta(max_length=_MAX_ROUTES)]], Meta(max_length=MAX_TENSORS)]
)


def encode_wanted(wanted: Wanted) -> bytes:
    """The boxes as JSON."""
    return _encoder.encode(wanted)


def decode_wanted(data: bytes) -> Wanted:
    """Decodes what an engine rank wants; raises WireError if the bytes are no such table."""
    return decoded(_decoder.decode, data, "the boxes that an engine rank wants")


class WantedBoxes(msgspec.Struct, frozen=True, kw_only=True):
    """The boxes that an engine's ranks want; ``kinds`` has ``encode_wanted`` of each distinct rank."""

    kinds: Annotated[tuple[bytes, ...], Meta(max_length=1 << 16)]


_boxes = msgspec.json.Decoder(WantedBoxes)


def decode_boxes(data: bytes) -> WantedBoxes:
    """Decodes the boxes that an engine's ranks want; raises WireError if the bytes are no such answer."""
    return decoded(_boxes.decode, data, "the boxes that an engine wants")


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one slot on its way from one rank to another.

    Attributes:
        wanted: Number of the wanted box among those of the slot's tensor.
        box: The box, a part of the wanted one.
        offset_bytes: First byte in the message.
        straight: True if it is taken from the sender's bucket; else it is packed.
    """

    slot: int
    wanted: int
    box: Box
    offset_bytes: int
    size_bytes: int
    straight: bool


@dataclass(frozen=True, slots=True)
class PieceMessage:
    """The pieces of one bucket from one trainer rank to one engine rank, first the ``packed_bytes`` of packed ones."""

    pieces: tuple[Piece, ...]
    packed_bytes: int
    size_bytes: int

    @property
    def runs(self) -> list[tuple[int, int]]:
        """First byte and size of each run that travels by itself."""
        first = [(0, self.packed_bytes)] if self.packed_bytes else []
        return first + [(piece.offset_bytes, piece.size_bytes) for piece in self.pieces if piece.straight]


def plan_message(
    layout: BucketLayout, parts: Sequence[tuple[int, Box]], wanted: Wanted, *, read: bool = False
) -> PieceMessage:
    """Works out a message, the same at both ends, from number of the slot and box of each of the rank's parts.

    With ``read`` the engine rank reads the pieces by itself, in any number of runs; only short runs are packed.
    """
    packed: list[tuple[int, int, Box, int]] = []
    straight: list[tuple[int, int, Box, int]] = []
    for number, part in parts:
        slot = layout.slots[number]
        itemsize = slot.spec.torch_dtype.itemsize
        for index, want in enumerate(wanted.get(slot.spec.name, ())):
            box = intersection(part, want.box)
            if box is None:
                continue
            size_bytes = box.numel * itemsize
            if read:
                alone = math.prod(box.shape[_run_dim(slot, box) :]) * itemsize >= RUN_BYTES
            else:
                alone = size_bytes >= STRAIGHT_BYTES and is_one_run(box.shape, slot.shape)
            (straight if alone else packed).append((number, index, box, size_bytes))
    pieces: list[Piece] = []
    end = packed_bytes = 0
    for some, alone in ((packed, False), (straight, True)):
        for number, index, box, size_bytes in some:
            pieces.append(Piece(number, index, box, end, size_bytes, alone))
            end += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        packed_bytes = packed_bytes if alone else end
    return PieceMessage(tuple(pieces), packed_bytes, end)


class Runs(NamedTuple):
    """Equally spaced runs of bytes in a bucket."""

    first_byte: int
    size_bytes: int
    stride_bytes: int
    number: int


def runs_of(slot: TensorSlot, box: Box) -> list[Runs]:
    """The runs of bytes that a box in a slot's rows is, in the order of its elements."""
    if not box.numel:
        return []
    itemsize, strides = slot.spec.torch_dtype.itemsize, contiguous_strides(slot.shape)
    dim = _run_dim(slot, box)
    size_bytes = math.prod(box.shape[dim:]) * itemsize
    count, stride_bytes, outer = 1, size_bytes, dim
    if dim:
        outer = dim - 1
        count, stride_bytes = box.shape[outer], strides[outer] * itemsize
    first = sum((at - zero) * step for at, zero, step in zip(box.offset, slot.box.offset, strides, strict=True))
    places = product(*(range(extent) for extent in box.shape[:outer]))
    return [
        Runs(
            slot.offset_bytes + (first + sum(at * step for at, step in zip(place, strides, strict=False))) * itemsize,
            size_bytes,
            stride_bytes,
            count,
        )
        for place in places
    ]


def _run_dim(slot: TensorSlot, box: Box) -> int:
    """The first dimension of one run of a box: those after it are whole, so they are one run with it."""
    dim = len(slot.shape)
    while dim and box.shape[dim - 1] == slot.shape[dim - 1]:
        dim -= 1
    return max(dim - 1, 0)
