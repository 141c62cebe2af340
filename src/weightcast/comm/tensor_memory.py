"""Memory of this process's tensors that other processes of the host can map: GPU allocations and shared buffers."""

from __future__ import annotations

import os
import secrets
from bisect import bisect_right
from collections.abc import Sequence

import torch

from weightcast.comm import cuda_driver
from weightcast.comm.ipc import device_uuid, shared_buffer_at
from weightcast.errors import ConfigError
from weightcast.wire.bucket_sources import MemoryHandle

_Allocation = tuple[int, int, object]  # address, size, identity


class TensorMemory:
    """The allocations that hold some tensors, with a handle to each."""

    def __init__(self) -> None:
        self.handles: list[MemoryHandle] = []
        self._allocations: list[_Allocation] = []
        self._devices: list[torch.device] = []
        self._known: dict[_Allocation, MemoryHandle] = {}

    def locate(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
        """Number of each tensor's allocation, and first byte there; ConfigError for one that cannot be shared."""
        self.handles, self._allocations, self._devices = [], [], []
        addresses: list[int] = []  # ascending, with the number of the allocation that begins there
        numbers: list[int] = []
        found: list[tuple[int, int]] = []
        for index, tensor in enumerate(tensors):
            pointer = tensor.data_ptr()
            place = bisect_right(addresses, pointer)
            at = self._allocations[numbers[place - 1]] if place else None
            if at is None or pointer >= at[0] + at[1]:
                at = _allocation(pointer, tensor.device, index)
                if at not in self._known:
                    self._known[at] = _handle(at, tensor.device)
                addresses.insert(place, at[0])
                numbers.insert(place, len(self.handles))
                place += 1
                self._allocations.append(at)
                self._devices.append(tensor.device)
                self.handles.append(self._known[at])
            found.append((numbers[place - 1], pointer - at[0]))
        self._known = {at: self._known[at] for at in self._allocations}  # memory that was freed has no handle
        return found

    def unchanged(self) -> bool:
        """True if every allocation is still the one that ``locate`` found."""
        by_device: dict[torch.device, list[_Allocation]] = {}
        for at, device in zip(self._allocations, self._devices, strict=True):
            by_device.setdefault(device, []).append(at)
        return all(_identities(found, device) == [at[2] for at in found] for device, found in by_device.items())

    def forget(self) -> None:
        """Drops all handles."""
        self.handles, self._allocations, self._devices = [], [], []
        self._known.clear()


def _allocation(pointer: int, device: torch.device, index: int) -> _Allocation:
    if device.type == "cuda":
        try:
            return cuda_driver.allocation_of(pointer, device)
        except cuda_driver.DriverError as error:
            raise ConfigError(f"tensor {index} is in no allocation of {device}: {error}") from error
    buffer = shared_buffer_at(pointer)
    if buffer is None:
        raise ConfigError(
            f"tensor {index} is on the host, in memory that other processes cannot map",
            hint="keep the weights on a GPU, or leave keep_mapped out",
        )
    return buffer.data.data_ptr(), buffer.data.numel(), buffer.handle().token


def _handle(at: _Allocation, device: torch.device) -> MemoryHandle:
    if device.type != "cuda":
        buffer = shared_buffer_at(at[0])
        assert buffer is not None
        return buffer.handle()
    handle, _ = cuda_driver.export_memory(at[0], device)
    return MemoryHandle(
        kind="cuda",
        device=device_uuid(device),
        size_bytes=at[1],
        token=secrets.token_hex(16),
        pid=os.getpid(),
        handle=handle,
    )


def _identities(allocations: Sequence[_Allocation], device: torch.device) -> list[object]:
    """The identities of the allocations at these addresses now; None for one that is gone."""
    if device.type == "cuda":
        try:
            return list(cuda_driver.ids_of([at[0] for at in allocations], device))
        except cuda_driver.DriverError:
            return [None]
    buffers = [shared_buffer_at(at[0]) for at in allocations]
    return [None if buffer is None else buffer.handle().token for buffer in buffers]
