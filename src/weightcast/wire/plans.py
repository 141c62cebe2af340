"""The plan of an update: tensors and buckets, as a table that both processes keep (``blobs.py``).

``Open`` names it, and ``Announce`` names buckets of it.  So an update of the same tensors sends nothing for each of
them.  A plan has no place in memory and no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import Meta

from weightcast.errors import WireError
from weightcast.wire.blobs import KEPT, BlobKind
from weightcast.wire.bucket_sources import BucketPart, BucketParts
from weightcast.wire.fields import MAX_BUCKETS
from weightcast.wire.layout import MAX_TENSORS, BucketLayout, Size, TensorSlot, TensorSpec

MAX_TRAINERS = 1 << 16  # ranks whose parts a plan has


class _Slot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A ``TensorSlot`` with the number of its tensor in the plan."""

    tensor: Size
    offset_bytes: Size
    first_row: Size
    num_rows: Size


class _Bucket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    size_bytes: Size
    slots: Annotated[tuple[_Slot, ...], Meta(min_length=1, max_length=MAX_TENSORS)]


class Tables(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan on the wire; ``bucket_sizes`` is as ``UpdateTables`` has it.

    ``parts`` has one list for each trainer rank, as that rank has encoded it: its parts of each bucket, in order.
    """

    specs: Annotated[tuple[TensorSpec, ...], Meta(min_length=1, max_length=MAX_TENSORS)]
    buckets: Annotated[tuple[_Bucket, ...], Meta(max_length=MAX_BUCKETS)]
    bucket_sizes: Annotated[tuple[Size, ...], Meta(max_length=MAX_BUCKETS)] = ()
    parts: Annotated[tuple[msgspec.Raw, ...], Meta(max_length=MAX_TRAINERS)] = ()


_encoder = msgspec.json.Encoder()
_tables = msgspec.json.Decoder(Tables)
_rank_parts = msgspec.json.Decoder(Annotated[tuple[BucketParts, ...], Meta(max_length=MAX_BUCKETS)])


def encode_parts(parts: Sequence[Sequence[BucketPart]]) -> bytes:
    """Encodes one trainer rank's parts of each bucket."""
    return _encoder.encode(parts)


class UpdateTables:
    """The tensors of an update, their places in buckets, and which trainer rank gives which parts of them."""

    def __init__(
        self,
        specs: tuple[TensorSpec, ...],
        layouts: Sequence[BucketLayout],
        bucket_sizes: tuple[int, ...] = (),
        told: Sequence[bytes] = (),
    ) -> None:
        """Takes the tables.

        Args:
            specs: Every tensor that will be sent, in order.
            layouts: The buckets; every slot is of one of the tensors.
            bucket_sizes: Size in bytes of each bucket, in order.  They let a receiver enter the broadcast of a bucket
                early; empty if the sender waits for each reply.
            told: The parts of each trainer rank, as ``encode_parts`` returns them, if engine ranks get their shares
                from every rank.
        """
        self.specs = specs
        self.layouts = tuple(layouts)
        self.bucket_sizes = bucket_sizes
        self.told = tuple(told)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, UpdateTables) and self.hash == other.hash)

    def __hash__(self) -> int:
        return hash(self.hash)

    @cached_property
    def parts(self) -> Sequence[tuple[BucketParts, ...]]:
        """For each bucket the parts of each trainer rank, in order of rank; empty if none were told."""
        ranks = [_rank_parts.decode(one) for one in self.told]
        short = next((rank for rank, parts in enumerate(ranks) if len(parts) != len(self.layouts)), None)
        if short is not None:
            raise WireError(
                f"trainer rank {short} has parts of {len(ranks[short])} buckets, and the plan has {len(self.layouts)}"
            )
        return tuple(zip(*ranks, strict=True))

    @cached_property
    def hash(self) -> str:
        """The name of the table, 32 hex characters."""
        return KEPT.encoded(PLAN, self).name

    @cached_property
    def without_sizes(self) -> UpdateTables:
        """The same plan for a sender that waits for each reply."""
        return UpdateTables(self.specs, self.layouts, told=self.told)


def _encode(plan: UpdateTables) -> bytes:
    """Returns the plan as JSON, in the form of ``Tables``."""
    numbers = {spec.name: number for number, spec in enumerate(plan.specs)}
    buckets = tuple(
        _Bucket(
            layout.size_bytes,
            tuple(
                _Slot(numbers[slot.spec.name], slot.offset_bytes, slot.first_row, slot.num_rows)
                for slot in layout.slots
            ),
        )
        for layout in plan.layouts
    )
    told = tuple(map(msgspec.Raw, plan.told))
    return _encoder.encode(Tables(specs=plan.specs, buckets=buckets, bucket_sizes=plan.bucket_sizes, parts=told))


def _decode(encoded: bytes) -> UpdateTables:
    tables = _tables.decode(encoded)
    specs = tables.specs
    layouts: list[BucketLayout] = []
    for index, bucket in enumerate(tables.buckets):
        beyond = next((slot.tensor for slot in bucket.slots if slot.tensor >= len(specs)), None)
        if beyond is not None:
            raise WireError(f"bucket {index} carries tensor {beyond}, and the plan has {len(specs)}")
        slots = tuple(
            TensorSlot(
                spec=specs[slot.tensor],
                offset_bytes=slot.offset_bytes,
                first_row=slot.first_row,
                num_rows=slot.num_rows,
            )
            for slot in bucket.slots
        )
        layout = BucketLayout(index=index, slots=slots, size_bytes=bucket.size_bytes)
        layout.check()
        layouts.append(layout)
    plan = UpdateTables(specs, layouts, tables.bucket_sizes, tuple(map(bytes, tables.parts)))
    _ = plan.parts  # what is malformed is refused here
    return plan


PLAN = BlobKind("plan", _encode, _decode)
