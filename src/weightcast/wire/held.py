"""The parts of the source tensors that one engine rank keeps, and their sums.

The parts stay the same from update to update, so they are one table with a content hash.  It travels from the rank's
process once; later answers name it and carry the sums alone, 8 bytes for each part.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from functools import cached_property
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from weightcast.errors import WireError
from weightcast.wire.box import Box
from weightcast.wire.fields import PlanHash
from weightcast.wire.layout import MAX_TENSORS, Shape, TensorSpec
from weightcast.wire.plans import hash_of


class HeldPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The part of a source tensor that one rank keeps; ``spec`` is the whole one, in the dtype the engine keeps."""

    spec: TensorSpec
    box_offset: Shape
    box_shape: Shape

    @property
    def box(self) -> Box:
        return Box(offset=self.box_offset, shape=self.box_shape)


class HeldTable:
    """All parts that one rank keeps, in order."""

    def __init__(self, parts: tuple[HeldPart, ...]) -> None:
        self.parts = parts

    @cached_property
    def encoded(self) -> bytes:
        """The table as JSON."""
        return _encoder.encode(self.parts)

    @cached_property
    def hash(self) -> str:
        """BLAKE2b of ``encoded``, 32 hex characters."""
        return hash_of(self.encoded)


class HeldSums:
    """Partial digest sums of the parts of a table: ``totals``, int64 ``[parts]`` on the CPU, to be read mod 2**64."""

    def __init__(self, table: HeldTable, totals: torch.Tensor) -> None:
        self.table = table
        self.totals = totals

    def __bool__(self) -> bool:
        return bool(self.table.parts)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, HeldSums)
            and (self.table is other.table or self.table.hash == other.table.hash)
            and torch.equal(self.totals, other.totals)
        )

    __hash__ = None  # type: ignore[assignment]


class HeldForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sums on the wire; ``parts`` is left out if the other end has the table.  ``totals`` has 8 bytes for each part."""

    table: PlanHash
    totals: bytes
    parts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


NOTHING_HELD = HeldSums(HeldTable(()), torch.zeros(0, dtype=torch.int64))
_encoder = msgspec.json.Encoder()
_parts = msgspec.json.Decoder(Annotated[tuple[HeldPart, ...], Meta(max_length=MAX_TENSORS)])


def form_of(held: HeldSums, known: Collection[str]) -> HeldForm:
    """Returns sums for the wire, without the table if the other end has it: ``known`` are the hashes of its tables."""
    parts = msgspec.UNSET if held.table.hash in known else msgspec.Raw(held.table.encoded)
    return HeldForm(table=held.table.hash, totals=held.totals.contiguous().numpy().tobytes(), parts=parts)


def held_of(form: HeldForm, tables: MutableMapping[str, HeldTable]) -> HeldSums:
    """Returns the sums of a form; ``tables`` are those here, by hash, and takes the one that came with it.

    WireError says that the table is unknown or has another hash, or there is not one sum for each part.
    """
    if form.parts is not msgspec.UNSET:
        table = HeldTable(_parts.decode(form.parts))
        if table.hash != form.table:
            raise WireError(f"the table of parts that came with the answer is not {form.table}")
        tables[form.table] = table
    table = tables.get(form.table)
    if table is None:
        raise WireError(f"the answer names the table of parts {form.table}, which did not come")
    totals = torch.frombuffer(bytearray(form.totals), dtype=torch.int64) if form.totals else NOTHING_HELD.totals
    if len(totals) != len(table.parts):
        raise WireError(f"the answer has {len(totals)} sums for {len(table.parts)} parts")
    return HeldSums(table, totals)
