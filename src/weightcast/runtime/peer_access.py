"""Whether kernels on one GPU can read the memory of another."""

from __future__ import annotations

from functools import cache

import torch


@cache
def reads_directly(device: torch.device, other: torch.device) -> bool:
    """True if kernels on ``device`` can read memory of ``other`` as their own.

    The first call with two GPUs enables it in this process, where the GPUs allow it, and waits for both.

    Args:
        device: Where the kernels run.
        other: Where the memory is, also memory of another process that is mapped here.
    """
    if device == other:
        return True
    if device.type != "cuda" or other.type != "cuda" or not torch.cuda.can_device_access_peer(device, other):
        return False
    # torch enables access at the first copy between two GPUs, for the GPU that it copies from.
    torch.zeros(1, device=device).to(other)
    torch.cuda.synchronize(device)
    torch.cuda.synchronize(other)
    return True
