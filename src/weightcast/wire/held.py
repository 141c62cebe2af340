"""The parts of the source tensors that one engine rank keeps, and their sums.

The parts stay the same from update to update, so they are a table that travels once (``blobs.py``).  Later answers name
it and carry the sums alone, 8 bytes for each part.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from weightcast.wire.blobs import BlobKind
from weightcast.wire.box import Box
from weightcast.wire.layout import MAX_TENSORS, Shape, TensorSpec


class HeldPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The part of a source tensor that one rank keeps; ``spec`` is the whole one, in the dtype the engine keeps."""

    spec: TensorSpec
    box_offset: Shape
    box_shape: Shape

    @property
    def box(self) -> Box:
        return Box(offset=self.box_offset, shape=self.box_shape)


HeldTable = tuple[HeldPart, ...]  # all parts that one rank keeps, in order
PARTS: BlobKind[HeldTable] = BlobKind(
    "table of parts",
    msgspec.json.Encoder().encode,
    msgspec.json.Decoder(Annotated[HeldTable, Meta(max_length=MAX_TENSORS)]).decode,
)


class HeldSums:
    """Partial digest sums of the parts of a table: ``totals``, int64 ``[parts]`` on the CPU, to be read mod 2**64."""

    def __init__(self, table: HeldTable, totals: torch.Tensor) -> None:
        self.table = table
        self.totals = totals

    @classmethod
    def of_bytes(cls, table: HeldTable, sums: bytes) -> HeldSums:
        """Returns the sums that ``fields`` has."""
        return cls(table, torch.frombuffer(bytearray(sums), dtype=torch.int64) if sums else NOTHING_HELD.totals)

    @property
    def fields(self) -> dict[str, Any]:
        """The table and its sums as ``RankAck`` has them."""
        return {"parts": self.table, "sums": self.totals.contiguous().numpy().tobytes()}

    def __bool__(self) -> bool:
        return bool(self.table)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, HeldSums)
            and (self.table is other.table or self.table == other.table)
            and torch.equal(self.totals, other.totals)
        )

    __hash__ = None  # type: ignore[assignment]


NOTHING_HELD = HeldSums((), torch.zeros(0, dtype=torch.int64))
