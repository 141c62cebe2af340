"""Two ranges of addresses whose memory changes places without a copy.

Captured graphs and kernels know addresses.  Virtual memory keeps the addresses and changes what lies behind them: an
H100 maps 16 GB anew in 1.5 ms, and exchanges their contents in 23 ms.  Source: "Virtual Memory Management" in the CUDA
driver's manual.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from typing import Any

import torch

from weightcast.runtime.cuda_calls import DriverError, current, driver_call

LIVE, WAITING = 0, 1
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_RECOMMENDED = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
_CAN_MAP = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class MappedPair:
    """A live and a waiting range of one size.  Tensors in it keep it alive; both ranges are freed with it."""

    def __init__(self, size_bytes: int, mapper: CudaMapper) -> None:
        """Reserves the addresses; ``fill`` puts memory behind them."""
        self._mapper = mapper
        self.size_bytes = -(-size_bytes // mapper.granularity) * mapper.granularity
        self._addresses = [mapper.reserve(self.size_bytes) for _ in (LIVE, WAITING)]
        self._wanted: list[int | None] = [None, None]  # what belongs behind each range
        self._mapped: list[int | None] = [None, None]  # what is there
        end = weakref.finalize(self, _free, mapper, self._addresses, self.size_bytes, self._wanted, self._mapped)
        end.atexit = False  # the driver frees all memory of a process that ends

    def fill(self, side: int) -> None:
        """Puts new memory behind a range that has none.

        Raises:
            torch.OutOfMemoryError: There is too little memory; nothing has changed.
        """
        memory = self._mapper.create(self.size_bytes)
        try:
            self._mapper.map(self._addresses[side], self.size_bytes, memory)
        except BaseException:
            self._mapper.destroy(memory)
            raise
        self._wanted[side] = self._mapped[side] = memory

    def empty(self, side: int) -> None:
        """Frees the memory behind a range; no tensor there may be used any more.  Does nothing if there is none."""
        memory = self._wanted[side]
        if memory is None:
            return
        self._mapper.wait()
        if self._mapped[side] is not None:
            self._mapper.unmap(self._addresses[side], self.size_bytes)
        self._wanted[side] = self._mapped[side] = None
        self._mapper.destroy(memory)

    def exchange(self) -> None:
        """Exchanges the memory of both ranges, after all work on the device.

        Raises:
            Exception: The driver's error.  All is as before, or ``whole`` is False.
        """
        before = list(self._wanted)
        self._mapper.wait()
        try:
            self._put(before[::-1])
        except BaseException:
            self._put(before)
            raise

    @property
    def whole(self) -> bool:
        """False if a failed exchange left a range without its memory; ``mend`` tries again."""
        return self._mapped == self._wanted

    def mend(self) -> None:
        """Puts the memory of before the failed exchange back; raises the driver's error."""
        self._put(list(self._wanted))

    def tensor(self, side: int, first_byte: int, like: torch.Tensor) -> torch.Tensor:
        """Returns a tensor in a range, with shape, strides and dtype of another one that has no gaps."""
        flat = self._mapper.tensor(self._addresses[side] + first_byte, like.nbytes, self)
        return flat.view(like.dtype).as_strided(tuple(like.shape), like.stride())

    def address(self, side: int) -> int:
        """First address of a range."""
        return self._addresses[side]

    def _put(self, wanted: list[int | None]) -> None:
        for side, address in enumerate(self._addresses):
            if self._mapped[side] not in (None, wanted[side]):
                self._mapper.unmap(address, self.size_bytes)
                self._mapped[side] = None
        for side, address in enumerate(self._addresses):
            memory = wanted[side]
            if memory is not None and self._mapped[side] is None:
                self._mapper.map(address, self.size_bytes, memory)
                self._mapped[side] = memory
        self._wanted[:] = wanted


def _free(
    mapper: CudaMapper, addresses: list[int], size_bytes: int, wanted: list[int | None], mapped: list[int | None]
) -> None:
    mapper.wait()
    for address, memory in zip(addresses, mapped, strict=True):
        if memory is not None:
            mapper.unmap(address, size_bytes)
    for memory in wanted:
        if memory is not None:
            mapper.destroy(memory)
    for address in addresses:
        mapper.give_back(address, size_bytes)


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationFlags(ctypes.Structure):
    _fields_ = [
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    ]


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


_U64, _SIZE = ctypes.c_uint64, ctypes.c_size_t
_reserve = driver_call("cuMemAddressReserve", ctypes.POINTER(_U64), _SIZE, _SIZE, _U64, _U64)
_give_back = driver_call("cuMemAddressFree", _U64, _SIZE)
_create = driver_call("cuMemCreate", ctypes.POINTER(_U64), _SIZE, ctypes.POINTER(_Properties), _U64)
_release = driver_call("cuMemRelease", _U64)
_map = driver_call("cuMemMap", _U64, _SIZE, _SIZE, _U64, _U64)
_unmap = driver_call("cuMemUnmap", _U64, _SIZE)
_set_access = driver_call("cuMemSetAccess", _U64, _SIZE, ctypes.POINTER(_Access), _SIZE)
_get_granularity = driver_call(
    "cuMemGetAllocationGranularity", ctypes.POINTER(_SIZE), ctypes.POINTER(_Properties), ctypes.c_int
)
_get_attribute = driver_call("cuDeviceGetAttribute", ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int)


class CudaMapper:
    """Maps memory of one GPU, on which a CUDA context exists, to addresses.  Each call raises the driver's error."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch and the driver number a process's visible GPUs alike.
        self._properties = _Properties(_PINNED, 0, _Location(_DEVICE, device.index), None, _AllocationFlags())
        granularity = _SIZE()
        with current(device):
            _get_granularity(ctypes.byref(granularity), ctypes.byref(self._properties), _RECOMMENDED)
        self.granularity = granularity.value  # sizes are multiples of so many bytes

    def reserve(self, size_bytes: int) -> int:
        """Returns the first of so many addresses that nothing else gets, without memory behind them."""
        address = _U64()
        with current(self._device):
            _reserve(ctypes.byref(address), size_bytes, 0, 0, 0)
        return address.value

    def give_back(self, address: int, size_bytes: int) -> None:
        """Ends ``reserve``."""
        with current(self._device):
            _give_back(address, size_bytes)

    def create(self, size_bytes: int) -> int:
        """Returns the handle of new memory; raises ``torch.OutOfMemoryError`` if there is too little."""
        memory = _U64()
        with current(self._device):
            try:
                _create(ctypes.byref(memory), size_bytes, ctypes.byref(self._properties), 0)
            except DriverError as error:
                if error.code != _OUT_OF_MEMORY:
                    raise
                free_bytes, _ = torch.cuda.mem_get_info(self._device)
                raise torch.OutOfMemoryError(
                    f"{size_bytes} bytes of {self._device} were asked for, and {free_bytes} are free"
                ) from error
        return memory.value

    def destroy(self, memory: int) -> None:
        """Frees memory that is mapped nowhere."""
        with current(self._device):
            _release(memory)

    def map(self, address: int, size_bytes: int, memory: int) -> None:
        """Puts memory behind reserved addresses, or changes nothing if that fails."""
        with current(self._device):
            _map(address, size_bytes, 0, memory, 0)
            try:
                access = _Access(_Location(_DEVICE, self._device.index), _READ_WRITE)
                _set_access(address, size_bytes, ctypes.byref(access), 1)
            except BaseException:
                _unmap(address, size_bytes)
                raise

    def unmap(self, address: int, size_bytes: int) -> None:
        """Takes the memory away from addresses that nothing reads or writes meanwhile."""
        with current(self._device):
            _unmap(address, size_bytes)

    def tensor(self, address: int, size_bytes: int, owner: object) -> torch.Tensor:
        """Returns a flat uint8 tensor at an address, which keeps ``owner`` alive."""
        return torch.as_tensor(_ArrayInterface(address, size_bytes, owner), device=self._device)

    def wait(self) -> None:
        """Waits for all work on the device."""
        torch.cuda.synchronize(self._device)


class _ArrayInterface:
    """Memory that torch takes as it is; the tensor keeps this object, and so the memory's owner, alive."""

    def __init__(self, address: int, size_bytes: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@cache
def can_map(device: torch.device) -> bool:
    """Returns True for a GPU whose driver maps memory; False for any other device."""
    if device.type != "cuda":
        return False
    found = ctypes.c_int()
    with current(device):
        _get_attribute(ctypes.byref(found), _CAN_MAP, device.index)
    return bool(found.value)
