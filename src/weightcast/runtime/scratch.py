"""Memory for temporary copies on the host, which goes back to the kernel with its owner."""

from __future__ import annotations

import mmap

import torch


class Scratch:
    """Casts tensors into one buffer, again and again.

    Tensors of some MiB that are allocated and freed in turn leave holes in the C library's heap, which grew by the size
    of the whole model in one update.  This memory is mapped, and so leaves none.
    """

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor's values in another dtype.  On the CPU they are valid until the next call."""
        if tensor.device.type != "cpu":
            return tensor.to(dtype)  # torch's allocator for GPUs keeps blocks for reuse
        size_bytes = tensor.numel() * dtype.itemsize
        if self._flat.numel() < size_bytes:
            self._flat = torch.empty(0, dtype=torch.uint8)  # freed before more is mapped
            self._flat = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
        return self._flat[:size_bytes].view(dtype).view(tensor.shape).copy_(tensor)

    def free(self) -> None:
        """Frees the buffer; the next cast maps another."""
        self._flat = torch.empty(0, dtype=torch.uint8)
