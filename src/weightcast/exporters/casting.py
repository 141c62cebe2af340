"""Chooses the dtype that a tensor travels in."""

from __future__ import annotations

import torch

from weightcast.errors import ConfigError


def check_wire_dtype(wanted: torch.dtype | None) -> None:
    """Refuses, with ``ConfigError``, a dtype that is no float of 16 bits or more; narrower ones need scales."""
    if wanted is not None and not isinstance(wanted, torch.dtype):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"wire_dtype={wanted!r} is no dtype of torch", hint="use torch.bfloat16, for example")
    if wanted is not None and (not wanted.is_floating_point or wanted.itemsize < 2):
        raise ConfigError(
            f"weights cannot simply be cast to {wanted}", hint="use torch.bfloat16, float16, float32 or float64"
        )


def wire_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype that a tensor travels in: ``wanted`` for floats of 16 bits or more, ``own`` for everything else."""
    return wanted if wanted is not None and can_cast(own) else own


def can_cast(own: torch.dtype) -> bool:
    """True for floats of 16 bits or more; narrower ones have scales, and other numbers mean something else."""
    return own.is_floating_point and own.itemsize >= 2
