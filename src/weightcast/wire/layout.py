"""The place of each tensor inside a bucket.

A bucket is one flat uint8 buffer carrying many tensors.  This module is the arithmetic: names,
dtypes and shapes go in, byte offsets come out.  It allocates nothing, so the two ends can agree on
a layout before either owns a buffer.

Every size and offset is in bytes unless its name says ``rows``.  Element counts never cross the
wire: two engines have a class of the same name, one counting in bytes and one in elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from weightcast.errors import ConfigError, WireError
from weightcast.wire.box import Box

# Wire names of the dtypes that may travel.  Anything else is refused before it moves.
DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

# Their names in safetensors files.
SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}

DRAFT_PREFIX = "draft."  # of the names of a draft model that is updated with the model

MAX_TENSORS = 1 << 20
MAX_DIMS = 8
MAX_GAP_BYTES = 4096  # no alignment of ours is larger; so a bucket takes memory only for what it carries
MAX_BYTES = 1 << 46  # 64 TiB: no tensor or bucket is larger; keeps every product far from overflow

Name = Annotated[str, Meta(min_length=1, max_length=512, pattern=r"^[\x21-\x7e]+\Z")]
Size = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Shape = Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMS)]


def dtype_name(dtype: torch.dtype) -> str:
    """The wire name of a torch dtype; raises ConfigError for one that cannot travel (complex, quantised, ...)."""
    try:
        return NAMES[dtype]
    except KeyError:
        raise ConfigError(f"dtype {dtype} cannot be sent", hint=f"cast to one of {', '.join(DTYPES)}") from None


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A tensor as both ends know it, whole and unsharded.

    Attributes:
        name: Its Hugging Face name, printable ASCII without spaces.
        dtype: Wire dtype, one of ``DTYPES``.
        shape: Unsharded shape, e.g. ``(2560, 9728)``; ``()`` for a scalar.
    """

    name: Name
    dtype: str
    shape: Shape

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.name}: unknown dtype {self.dtype!r}")
        if self.size_bytes > MAX_BYTES:
            raise ValueError(f"{self.name}: {self.size_bytes} bytes is more than a tensor may have")

    @staticmethod
    def of(name: str, tensor: torch.Tensor, *, dtype: torch.dtype | None = None) -> TensorSpec:
        """The spec of a tensor, with another wire dtype if given."""
        return TensorSpec(name=name, dtype=dtype_name(dtype or tensor.dtype), shape=tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of the wire."""
        return DTYPES[self.dtype]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor on the wire."""
        return self.numel * self.torch_dtype.itemsize

    @property
    def num_rows(self) -> int:
        """Length of dimension 0, the one along which a tensor may be cut; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of dimension 0."""
        return self.size_bytes // self.num_rows if self.num_rows else 0


class TensorSlot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One tensor's place in a bucket, or the place of some of its rows.

    Attributes:
        offset_bytes: First byte in the bucket.  A multiple of the dtype's item size: torch refuses to
            view a uint8 buffer anywhere else.
        first_row: First index of dimension 0 that travels here; 0 for a scalar.
        num_rows: How many indices of dimension 0 travel here; ``spec.num_rows`` for a whole tensor.
    """

    spec: TensorSpec
    offset_bytes: Size
    first_row: Size = 0
    num_rows: Size

    @property
    def whole(self) -> bool:
        return self.first_row == 0 and self.num_rows == self.spec.num_rows

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what travels here."""
        return (self.num_rows, *self.spec.shape[1:]) if self.spec.shape else ()

    @property
    def box(self) -> Box:
        """Place of what travels here in the whole tensor."""
        return Box(offset=(self.first_row, *(0 for _ in self.spec.shape))[: len(self.spec.shape)], shape=self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of what travels here."""
        return self.num_rows * self.spec.row_bytes

    @property
    def end_bytes(self) -> int:
        """First byte after the slot."""
        return self.offset_bytes + self.size_bytes


class BucketLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table of contents of one bucket.

    Attributes:
        index: Position in the update, from 0.
        slots: In order of offset, not overlapping.
        size_bytes: Bytes of the buffer that carry meaning.
    """

    index: Size
    slots: Annotated[tuple[TensorSlot, ...], Meta(min_length=1, max_length=MAX_TENSORS)]
    size_bytes: Size

    def check(self) -> None:
        """Refuses, with a WireError, a layout that no weightcast sender would make.

        In such a one a slot is misaligned, overlaps, leaves the bucket or has rows its tensor has not; a tensor has two
        slots; or the bucket is much larger than what it carries.
        """
        end = 0
        names: set[str] = set()
        for slot in self.slots:
            name = slot.spec.name
            if name in names:
                raise WireError(f"bucket {self.index}: {name} is in it twice")
            names.add(name)
            if slot.first_row + slot.num_rows > slot.spec.num_rows:
                raise WireError(
                    f"bucket {self.index}: {name} has {slot.spec.num_rows} rows, not {slot.first_row} + {slot.num_rows}"
                )
            if slot.offset_bytes % slot.spec.torch_dtype.itemsize:
                raise WireError(f"bucket {self.index}: {name} at byte {slot.offset_bytes} is not aligned to its dtype")
            if slot.offset_bytes < end:
                raise WireError(f"bucket {self.index}: {name} at byte {slot.offset_bytes} overlaps what ends at {end}")
            if slot.offset_bytes > end + MAX_GAP_BYTES:
                raise WireError(
                    f"bucket {self.index}: there is nothing between byte {end} and byte {slot.offset_bytes}"
                )
            end = slot.end_bytes
        if self.size_bytes > end + MAX_GAP_BYTES:
            raise WireError(f"bucket {self.index}: contents end at byte {end}, the bucket only at {self.size_bytes}")
        if end > self.size_bytes:
            raise WireError(f"bucket {self.index}: contents end at byte {end}, the bucket at {self.size_bytes}")


class Packing(msgspec.Struct, frozen=True, kw_only=True):
    """The packing that an engine can read, declared by its adapter.

    Attributes:
        alignment_bytes: Every slot starts at a multiple of this (and of its dtype's item size).
        one_dtype: A bucket may carry one dtype only.
        slices: A tensor larger than a bucket may be cut along dimension 0.
        gapless: Every slot starts where the one before it ends; a bucket ends where that would break the alignment.
    """

    alignment_bytes: int = 256
    one_dtype: bool = False
    slices: bool = True
    gapless: bool = False

    def also(self, other: Packing) -> Packing:
        """The packing that both engines can read."""
        gapless = self.gapless or other.gapless
        return Packing(
            alignment_bytes=1 if gapless else math.lcm(self.alignment_bytes, other.alignment_bytes),
            one_dtype=self.one_dtype or other.one_dtype,
            slices=self.slices and other.slices,
            gapless=gapless,
        )


def plan_buckets(specs: Iterable[TensorSpec], *, bucket_bytes: int, packing: Packing) -> list[BucketLayout]:
    """Fills buckets with tensors in the order given; one dtype after the other where a bucket may carry only one.

    ConfigError says how large a bucket has to be for a tensor (or, where it may be cut, a row of it) to fit.
    """
    buckets: list[BucketLayout] = []
    slots: list[TensorSlot] = []
    end = 0

    def flush() -> None:
        nonlocal slots, end
        if slots:
            buckets.append(BucketLayout(index=len(buckets), slots=tuple(slots), size_bytes=end))
        slots, end = [], 0

    specs = list(specs)
    _check_fits(specs, bucket_bytes, packing)
    if packing.one_dtype:  # or every float32 norm between bfloat16 weights would get a bucket of its own
        order = {dtype: number for number, dtype in enumerate(dict.fromkeys(spec.dtype for spec in specs))}
        specs.sort(key=lambda spec: order[spec.dtype])
    for spec in specs:
        if slots and packing.one_dtype and slots[-1].spec.dtype != spec.dtype:
            flush()
        row = 0
        while True:
            alignment = math.lcm(max(packing.alignment_bytes, 1), spec.torch_dtype.itemsize)
            offset = -(-end // alignment) * alignment
            if slots and packing.gapless and offset != end:
                flush()
                continue
            rows = spec.num_rows - row
            if offset + rows * spec.row_bytes > bucket_bytes:
                fits = (bucket_bytes - offset) // spec.row_bytes if offset < bucket_bytes else 0
                # Cut only a tensor that cannot travel whole: every piece costs the receiver one more copy.
                if slots and (spec.size_bytes <= bucket_bytes or fits <= 0):
                    flush()
                    continue
                rows = fits
            slots.append(TensorSlot(spec=spec, offset_bytes=offset, first_row=row, num_rows=rows))
            end = offset + rows * spec.row_bytes
            row += rows
            if row >= spec.num_rows:
                break
            flush()
    flush()
    return buckets


def _check_fits(specs: Sequence[TensorSpec], bucket_bytes: int, packing: Packing) -> None:
    """Refuses tensors that are too large; the size that the hint names is enough for all of them."""

    def smallest(spec: TensorSpec) -> int:
        return spec.row_bytes if packing.slices else spec.size_bytes

    large = [spec for spec in specs if smallest(spec) > bucket_bytes]
    if large:
        largest = max(large, key=smallest)
        part = "one row of " if packing.slices and largest.num_rows > 1 else ""
        others = len(large) - 1
        more = f", nor do {others} other{'s' if others > 1 else ''}" if others else ""
        raise ConfigError(
            f"{part}{largest.name} has {smallest(largest)} bytes and does not fit into a bucket of "
            f"{bucket_bytes}{more}",
            hint=f"use bucket_bytes={smallest(largest)} or more",
        )


def total_bytes(specs: Sequence[TensorSpec]) -> int:
    """Payload of one copy of the tensors, in bytes, without padding."""
    return sum(spec.size_bytes for spec in specs)
