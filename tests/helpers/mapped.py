"""A mapper for host memory, so that tests without a GPU map memory anew: files without a name, mapped by the kernel."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FIXED, _ANYWHERE = 0x10, 0
_FAILED = ctypes.c_void_p(-1).value


class HostMapper:
    """Has the methods of ``CudaMapper``.  Reserved addresses without memory end a process that reads them, as on a GPU.

    Attributes:
        live: Memory that exists, by handle, with its size.
        places: Addresses that are reserved, with their size.
        mapped: Handle of what is behind an address.
        fail_at: Number of the call of ``map`` that fails, counted from now; None for none.
    """

    granularity = mmap.PAGESIZE

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.places: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.fail_at: int | None = None

    def reserve(self, size_bytes: int) -> int:
        address = _mmap(None, size_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self.places[address] = size_bytes
        return address

    def give_back(self, address: int, size_bytes: int) -> None:
        assert self.places.pop(address) == size_bytes
        assert address not in self.mapped
        assert _libc.munmap(address, size_bytes) == 0

    def create(self, size_bytes: int) -> int:
        memory = os.memfd_create("weights")
        os.ftruncate(memory, size_bytes)
        self.live[memory] = size_bytes
        return memory

    def destroy(self, memory: int) -> None:
        assert memory not in self.mapped.values()
        del self.live[memory]
        os.close(memory)

    def map(self, address: int, size_bytes: int, memory: int) -> None:
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at < 0:
                raise RuntimeError("the driver refuses")
        assert self.places[address] == self.live[memory] == size_bytes
        assert address not in self.mapped
        _mmap(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, memory)
        self.mapped[address] = memory

    def unmap(self, address: int, size_bytes: int) -> None:
        assert self.places[address] == size_bytes
        del self.mapped[address]
        _mmap(address, size_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED, -1)

    def tensor(self, address: int, size_bytes: int, owner: object) -> torch.Tensor:
        memory = (ctypes.c_uint8 * size_bytes).from_address(address)
        memory.owner = owner  # type: ignore[attr-defined]  torch keeps the buffer alive
        return torch.frombuffer(memory, dtype=torch.uint8)

    def wait(self) -> None:
        pass


def _mmap(address: int | None, size_bytes: int, protection: int, flags: int, file: int) -> int:
    found = _libc.mmap(address, size_bytes, protection, flags, file, _ANYWHERE)
    if found in (None, _FAILED):
        raise OSError(ctypes.get_errno(), "mmap")
    return found
