"""The casts that keep a tensor's values on the way into an engine."""

from __future__ import annotations

import torch

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


def overflows(values: torch.Tensor) -> torch.Tensor:
    """Whether float16 makes a finite value of a tensor infinite: bool, shape ``()``, on the tensor's device.

    The answer is False for a tensor that has infinite values itself.
    """
    if not values.numel():
        return torch.zeros((), dtype=torch.bool, device=values.device)
    least, most = torch.aminmax(values)
    largest = torch.maximum(-least, most)
    return largest.to(torch.float16).isinf() & largest.isfinite()
