"""The casts that keep a tensor's values on the way into an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import torch

from weightcast.wire.layout import DTYPES, TensorSpec

_WIDE = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))


def why_no_cast(name: str, sent: torch.dtype, kept: torch.dtype) -> str:
    """The reason why a cast would not keep values; empty if it would, or if there is no cast.

    Floats of 16 bits and more are cast to each other.  Values of every other dtype have a scale, a zero point or a
    packing that the cast would lose.
    """
    if sent == kept or (sent in _WIDE and kept in _WIDE):
        return ""
    theirs = str(kept).removeprefix("torch.")
    ours = str(sent).removeprefix("torch.")
    scales = ", with the scales that belong to it" if kept.is_floating_point and kept not in _WIDE else ""
    return (
        f"{name} travels as {ours} and the engine keeps {theirs}, which a cast would not fill with the same values: "
        f"send it as {theirs}{scales}"
    )


def may_overflow(sent: torch.dtype, kept: torch.dtype) -> bool:
    """True if a finite trained weight may become infinite."""
    return kept == torch.float16 and sent in _WIDE and sent != kept


def is_copied_cast(kept: torch.dtype, sent: torch.dtype) -> bool:
    """True if an engine that reads weights where the trainer keeps them casts them in its copy.

    That is float32, as master weights are kept, to bfloat16.  float16 is not: the copy would have to look for values
    that become infinite in it.
    """
    return kept == torch.float32 and sent == torch.bfloat16


def best_sent(specs: Sequence[TensorSpec], tables: Iterable[Sequence[TensorSpec]]) -> tuple[TensorSpec, ...]:
    """The tensors in the dtypes in which they are best sent: the smaller float that every engine keeps, or their own.

    The values that arrive are those that the engines would have made of wider ones.  float16 is left to the engines,
    which tell values that become infinite in it from those that were.

    Args:
        tables: The tensors of each engine, with the dtypes that it keeps.
    """
    kept: dict[str, set[str]] = {}
    listed = list({id(table): table for table in tables}.values())
    counts: dict[str, int] = {}
    for table in listed:
        for spec in table:
            kept.setdefault(spec.name, set()).add(spec.dtype)
            counts[spec.name] = counts.get(spec.name, 0) + 1
    found: list[TensorSpec] = []
    for spec in specs:
        theirs = kept.get(spec.name, ())
        if len(theirs) == 1 and counts[spec.name] == len(listed):
            [name] = theirs
            own, dtype = spec.torch_dtype, DTYPES[name]
            smaller = own in _WIDE and dtype in _WIDE and dtype.itemsize < own.itemsize
            if smaller and not may_overflow(own, dtype):
                spec = msgspec.structs.replace(spec, dtype=name)
        found.append(spec)
    return tuple(found)


def overflows(values: torch.Tensor) -> torch.Tensor:
    """Whether float16 makes a finite value of a tensor infinite: bool, shape ``()``, on the tensor's device.

    The answer is False for a tensor that has infinite values itself.
    """
    if not values.numel():
        return torch.zeros((), dtype=torch.bool, device=values.device)
    least, most = torch.aminmax(values)
    largest = torch.maximum(-least, most)
    return largest.to(torch.float16).isinf() & largest.isfinite()
