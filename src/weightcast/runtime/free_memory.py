"""Host memory: how much this process may still allocate, by the machine and its control groups; temporary copies.

A container sees the whole machine's memory in ``/proc/meminfo`` and is killed at its own limit.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """Names of a memory controller's files; ``cache`` is a line of ``memory.stat``."""

    limit: str
    used: str
    cache: str


_V1 = _Files(limit="memory.limit_in_bytes", used="memory.usage_in_bytes", cache="total_inactive_file")
_V2 = _Files(limit="memory.max", used="memory.current", cache="inactive_file")


def free_host_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes of host memory that can be allocated; 0 where the system does not say."""
    machine = _number_after(root / "proc/meminfo", "MemAvailable:")
    if machine is None:
        return 0
    return min([machine * 1024, *_left_in_groups(root)])


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yields the free bytes of each control group of this process that has a limit."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, files = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            mount, files = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        # The limits of all groups above apply too.  In a container the path may be the host's, which does not exist
        # there; then the mount is the container's own group.
        below = PurePosixPath(path.lstrip("/"))
        for group in (below, *below.parents):
            left = _left(mount / group, files)
            if left is not None:
                yield left


def _left(group: Path, files: _Files) -> int | None:
    limit, used = _text(group / files.limit).strip(), _text(group / files.used).strip()
    if not limit.isdigit() or not used.isdigit():  # "max", or no such group
        return None
    cache = _number_after(group / "memory.stat", files.cache) or 0  # the kernel drops it when memory is short
    return max(int(limit) - max(int(used) - cache, 0), 0)


def _number_after(file: Path, name: str) -> int | None:
    for line in _text(file).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return int(words[1])
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


class Scratch:
    """Casts tensors into one buffer, again and again; it goes back to the kernel with its owner.

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
        return self.buffer(size_bytes, tensor.device)[:size_bytes].view(dtype).view(tensor.shape).copy_(tensor)

    def buffer(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """Returns at least so many bytes, uint8, whose contents are valid until the next call.

        On a GPU that call may be made at once if it is used on the same stream.
        """
        if self._flat.numel() < size_bytes or self._flat.device != device:
            self._flat = torch.empty(0, dtype=torch.uint8)  # freed before more is mapped
            if device.type == "cpu" and size_bytes:
                self._flat = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
            else:
                self._flat = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        return self._flat

    def free(self) -> None:
        """Frees the buffer; the next cast maps another."""
        self._flat = torch.empty(0, dtype=torch.uint8)
