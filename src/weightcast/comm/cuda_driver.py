"""The calls of the CUDA driver that share an allocation between processes.

torch's own sharing (``_share_cuda_``) counts one reader for each export.  A bucket has one reader for each engine rank,
so that counter would never return to zero and the memory would never be freed.  The driver's handles have no counter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from weightcast.errors import ConfigError
from weightcast.runtime.cuda_calls import DriverError, current, driver_call

_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


_get_handle = driver_call("cuIpcGetMemHandle", ctypes.POINTER(_Handle), ctypes.c_uint64)
_open_handle = driver_call("cuIpcOpenMemHandle_v2", ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint)
_close_handle = driver_call("cuIpcCloseMemHandle", ctypes.c_uint64)
_get_range = driver_call(
    "cuMemGetAddressRange_v2", ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint64
)
_get_attribute = driver_call("cuPointerGetAttribute", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)


def export_memory(pointer: int, device: torch.device) -> tuple[bytes, int]:
    """Returns the handle of the allocation that holds ``pointer``, and the pointer's offset in it, in bytes.

    It raises ConfigError if that cannot be shared, for example because it is part of an expandable segment.
    """
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    handle = _Handle()
    try:
        with current(device):
            _get_range(ctypes.byref(base), ctypes.byref(size), pointer)
            _get_handle(ctypes.byref(handle), base.value)
    except DriverError as error:
        raise ConfigError(
            f"GPU memory cannot be shared: {error}",
            hint="remove expandable_segments from the trainer's PYTORCH_CUDA_ALLOC_CONF",
        ) from error
    return ctypes.string_at(ctypes.byref(handle), _HANDLE_BYTES), pointer - base.value


def allocation_of(pointer: int, device: torch.device) -> tuple[int, int, int]:
    """Address, size and id, which no other has, of the allocation that holds ``pointer``; DriverError if none does."""
    base, size, name = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64()
    with current(device):
        _get_range(ctypes.byref(base), ctypes.byref(size), pointer)
        _get_attribute(ctypes.byref(name), _BUFFER_ID, base.value)
    return base.value, size.value, name.value


def ids_of(bases: Sequence[int], device: torch.device) -> list[int]:
    """Returns the ids of the allocations that begin at these addresses; raises as ``allocation_of``."""
    found: list[int] = []
    name = ctypes.c_uint64()
    with current(device):
        for base in bases:
            _get_attribute(ctypes.byref(name), _BUFFER_ID, base)
            found.append(name.value)
    return found


def open_memory(handle: bytes, device: torch.device) -> int:
    """Maps another process's allocation, on any device, for the kernels of ``device``; returns its address here.

    It raises DriverError if the handle is malformed, its owner gone, or its device out of reach.
    """
    if len(handle) != _HANDLE_BYTES:
        raise DriverError(f"a handle has {_HANDLE_BYTES} bytes, not {len(handle)}")
    pointer = ctypes.c_uint64()
    raw = _Handle()
    ctypes.memmove(ctypes.byref(raw), handle, _HANDLE_BYTES)
    with current(device):
        _open_handle(ctypes.byref(pointer), raw, _LAZY_ENABLE_PEER_ACCESS)
    return pointer.value


def close_memory(pointer: int, device: torch.device) -> None:
    """Unmaps an allocation that ``open_memory`` has mapped."""
    with current(device):
        _close_handle(pointer)


def open_event(handle: bytes, device: torch.device) -> Any:
    """Opens another process's event on ``device``; RuntimeError if its handle is malformed or its owner is gone."""
    with current(device):  # without a context of this device, waiting for the event ends the process
        return torch.cuda.Event.from_ipc_handle(device, handle)


def as_tensor(base: int, offset_bytes: int, size_bytes: int, device: torch.device, owner: torch.device) -> torch.Tensor:
    """Views a part of an allocation that ``open_memory`` has mapped as a flat uint8 tensor; it must stay mapped.

    It was mapped for ``device``, and is said to be on ``owner``.  DriverError if it lies on another one, or if the part
    is not wholly in it: kernels would read what is beside it.
    """
    ordinal, first, size = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_size_t()
    with current(device):
        _get_attribute(ctypes.byref(ordinal), _DEVICE_ORDINAL, base)
        _get_range(ctypes.byref(first), ctypes.byref(size), base)
    if offset_bytes < 0 or offset_bytes + size_bytes > first.value + size.value - base:
        raise DriverError(
            f"the message says {size_bytes} bytes from byte {offset_bytes} on, and the allocation has {size.value}"
        )
    if ordinal.value not in (owner.index, device.index):
        raise DriverError(f"the buffer is on cuda:{ordinal.value}, and the message says {owner}")
    # torch's public ways ask the driver on which device memory lies, and copy it if that is another one.
    make: Any = torch._C._construct_storage_from_data_pointer  # pyright: ignore[reportPrivateUsage]
    storage = make(base + offset_bytes, device, size_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
