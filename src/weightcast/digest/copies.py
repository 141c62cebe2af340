"""Many copies between a flat buffer and strided memory, in few launches and without changing a bit.

This module knows tensors and dtypes only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same size.

    A copy of integers keeps every bit.  torch copies many floats at once through float32, which changes the bits of a
    NaN (seen with bfloat16 on CUDA).
    """
    dtype = _INTEGERS.get(tensor.element_size())
    return tensor if dtype is None or dtype == tensor.dtype else tensor.view(dtype)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as flat uint8; no copy."""
    # Not view(-1): it may keep an odd stride of a dimension of one element, which cannot be read as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def host_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a CPU tensor, in order, as bytes.  numpy, which torch's own way needs, may not be installed."""
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""


class Flat:
    """A flat uint8 buffer, one-dimensional and contiguous, read as any dtype."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._views: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    def region(
        self, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int, *, as_bits: bool
    ) -> torch.Tensor:
        """A view of the buffer.

        Strides and offset are in elements of ``dtype``, and the buffer need not be a multiple of its size.  With
        ``as_bits`` the view has integers of that size.
        """
        found = self._views.get(dtype)
        if found is None:
            size = dtype.itemsize
            values = self._data[: self._data.numel() // size * size].view(dtype)
            found = self._views[dtype] = values, bits(values)
        base = found[1] if as_bits else found[0]
        return base.as_strided(shape, stride, base.storage_offset() + offset)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source to its target, with a cast where dtypes differ.

    On a GPU the copies are enqueued on the current stream, many in one launch: a launch each would cost more than the
    bytes.  A copy from another device is done when this returns.
    """
    if not targets:
        return
    with torch.no_grad():
        if targets[0].device.type != "cuda":
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return
        # One list for each pair of dtypes: a single tensor of another dtype makes torch launch once for every tensor.
        kinds: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for target, source in zip(targets, sources, strict=True):
            if source.device != target.device:
                target.copy_(source)
                continue
            kind = kinds.setdefault((target.dtype, source.dtype), ([], []))
            kind[0].append(target)
            kind[1].append(source)
        for some_targets, some_sources in kinds.values():
            torch._foreach_copy_(some_targets, some_sources, non_blocking=True)  # pyright: ignore[reportPrivateUsage]
