"""Finds weights that are NaN or infinite in a bucket, before it is sent.

One pass over the bucket tells whether anything in it is wrong.  Only then each tensor is looked at, to name it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from weightcast.config import UpdateConfig
from weightcast.errors import NotFinite, some
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout

_SMALL = 1 << 15  # elements
_WORD_BYTES = 8
_CHUNK_BYTES = 1 << 18  # stays in a core's cache
_CHUNK_BYTES_ON_GPU = 64 << 20
# For each format of 8 bits, what must be added to the least magnitude that is not finite to get 0x80.
_TO_SIGN = {torch.float8_e4m3fn: 0x80 - 0x7F, torch.float8_e5m2: 0x80 - 0x7C}
_Span = tuple[int, int, torch.dtype]


class FiniteCheck:
    """Refuses buckets with a value that is not finite, in update after update."""

    def __init__(self) -> None:
        self._spans: dict[int, tuple[BucketLayout, list[_Span]]] = {}

    def prepare(self, layout: BucketLayout) -> None:
        """Works out what a bucket needs to be checked."""
        self._spans_of(layout)

    def check(self, bucket: Bucket) -> None:
        """Checks a filled bucket; NotFinite names tensors with NaN or infinite values.  Waits for its device.

        Integers pass.  Weights that are not finite still show where their scales travel as integers, as those of MXFP8
        do: the 8-bit floats beside such a scale are NaN.
        """
        if bucket.finite:
            return
        spans = [bucket.data[start:end].view(dtype) for start, end, dtype in self._spans_of(bucket.layout)]
        if not all(map(_finite, spans)):
            _name_not_finite(bucket)

    def _spans_of(self, layout: BucketLayout) -> list[_Span]:
        known = self._spans.get(layout.index)
        if known is None or known[0] is not layout:
            known = self._spans[layout.index] = layout, list(_spans(layout))
        return known[1]


def _name_not_finite(bucket: Bucket) -> None:
    found = {slot.spec.name: _count(view) for slot, view in bucket.views() if _checked(view.dtype)}
    found = {name: count for name, count in found.items() if count}
    if found:  # else the bytes between two tensors, which mean nothing, or a sum that was too large
        raise _not_finite(found)


def checks_finite(config: UpdateConfig, device: torch.device) -> bool:
    """True if weights on this device must be finite: where the caller asks for it, and by default on CPUs."""
    wanted = config.check_finite
    return wanted or (wanted is None and device.type == "cpu" and config.verify != "none")


def check_parts_finite(
    parts: Sequence[tuple[str, torch.Tensor]], cast: Mapping[str, torch.dtype] = MappingProxyType({})
) -> None:
    """Raises ``NotFinite`` if a part, of any strides, has values that are NaN or infinite, and names its tensor.

    ``cast`` has the dtype by name of tensors whose values are float32 and become narrower on the way: those count.
    """
    found: dict[str, int] = {}
    small: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for name, values in parts:
        if _checked(values.dtype) and _is_small(values):
            dtype = cast.get(name, values.dtype)
            signs = [values.sum()] if dtype == values.dtype else [one.to(dtype) for one in values.aminmax()]
            small.setdefault((dtype, values.device), []).extend(signs)
    # One answer for all of them: to wait for that of each would take longer than the sum.
    fine = all(bool(torch.stack(signs).isfinite().all()) for signs in small.values())
    for name, values in parts:
        dtype = cast.get(name, values.dtype)
        if _checked(values.dtype) and not (fine and _is_small(values)) and not _finite(values, dtype):
            count = _count(values.to(dtype))
            if count:
                found[name] = found.get(name, 0) + count
    if found:
        raise _not_finite(found)


def _is_small(values: torch.Tensor) -> bool:
    return 0 < values.numel() < _SMALL and values.dtype not in _TO_SIGN


def _not_finite(found: Mapping[str, int]) -> NotFinite:
    shown = some([f"{name} ({count})" for name, count in found.items()], 6)
    return NotFinite(
        f"values that are NaN or infinite, counted by tensor: {shown}; no engine was told to switch",
        names=tuple(found),
        hint="look at the step that made them, or send them on purpose: "
        'advanced={"check_finite": False}, --advanced check_finite=false',
    )


def _spans(layout: BucketLayout) -> Iterator[_Span]:
    """Spans of a bucket with floating-point values, neighbours of one dtype together: first byte, end and dtype."""
    start = end = 0
    dtype: torch.dtype | None = None
    for slot in layout.slots:
        own = slot.spec.torch_dtype
        if not _checked(own):
            continue
        joins = own == dtype and slot.offset_bytes >= end and (slot.offset_bytes - start) % own.itemsize == 0
        if dtype is not None and not joins:
            yield start, end, dtype
        if not joins:
            start, dtype = slot.offset_bytes, own
        end = slot.end_bytes
    if dtype is not None:
        yield start, end, dtype


def _checked(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


def _finite(values: torch.Tensor, cast: torch.dtype | None = None) -> bool:
    """False if a value is not finite, once it is ``cast``; may be False for finite values whose sum is too large."""
    if not values.numel():
        return True
    if values.dtype in _TO_SIGN:
        return not _signs(values).any()
    if values.dtype.itemsize == 2:
        return bool(values.sum().isfinite())  # several times as fast as the extremes of 16-bit floats
    least, most = values.aminmax()  # a NaN becomes both
    return bool(least.to(cast).isfinite() & most.to(cast).isfinite())


def _count(values: torch.Tensor) -> int:
    """Number of values that are not finite."""
    if values.dtype in _TO_SIGN:
        return int(_bad_bytes(values.reshape(-1).view(torch.uint8), values.dtype).count_nonzero())
    return int(values.isfinite().logical_not().sum())


def _signs(values: torch.Tensor) -> torch.Tensor:
    """For each chunk of 8-bit floats whether one is not finite: bool, one-dimensional, on their device."""
    data = values.reshape(-1).view(torch.uint8)
    head = min(-int(data.storage_offset()) % _WORD_BYTES, data.numel())
    words = (data.numel() - head) // _WORD_BYTES * _WORD_BYTES
    parts = [data[:head], data[head + words :]]
    step = _CHUNK_BYTES if data.device.type == "cpu" else _CHUNK_BYTES_ON_GPU
    if words:
        parts += [chunk.view(torch.int64) for chunk in data[head : head + words].split(step)]
    return torch.stack([_bad_bytes(part, values.dtype).any() for part in parts])


def _bad_bytes(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sets the highest bit of each byte that is no finite 8-bit float, and no other bit: uint8, or eight in an int64.

    A byte without its sign is at most 0x7F, so the sum does not carry into the next byte.
    """
    each = 0x0101010101010101 if data.dtype == torch.int64 else 1
    signs = -0x7F7F7F7F7F7F7F80 if data.dtype == torch.int64 else 0x80
    return ((data & 0x7F * each) + _TO_SIGN[dtype] * each) & signs
