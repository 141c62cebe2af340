"""The structures that are handed to the CUDA driver are those of NVIDIA's own bindings, byte for byte."""

from __future__ import annotations

import ctypes

import pytest

from weightcast.comm import cuda_driver
from weightcast.runtime import mapped_memory

driver = pytest.importorskip("cuda.bindings.driver")


def test_properties_of_an_allocation() -> None:
    theirs = driver.CUmemAllocationProp()
    theirs.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    theirs.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    theirs.location.id = 3
    ours = mapped_memory._Properties(
        mapped_memory._PINNED,
        0,
        mapped_memory._Location(mapped_memory._DEVICE, 3),
        None,
        mapped_memory._AllocationFlags(),
    )
    assert bytes(ours) == ctypes.string_at(theirs.getPtr(), 32)


def test_access_to_an_allocation() -> None:
    theirs = driver.CUmemAccessDesc()
    theirs.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    theirs.location.id = 3
    theirs.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ours = mapped_memory._Access(mapped_memory._Location(mapped_memory._DEVICE, 3), mapped_memory._READ_WRITE)
    assert bytes(ours) == ctypes.string_at(theirs.getPtr(), 12)


def test_handle_and_numbers() -> None:
    assert ctypes.sizeof(cuda_driver._Handle) == driver.CU_IPC_HANDLE_SIZE
    attribute = driver.CUpointer_attribute
    assert attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID == cuda_driver._BUFFER_ID
    assert attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL == cuda_driver._DEVICE_ORDINAL
    granularity = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    assert granularity == mapped_memory._RECOMMENDED
    assert driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY == mapped_memory._OUT_OF_MEMORY
    can_map = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    assert can_map == mapped_memory._CAN_MAP
    peers = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    assert peers == cuda_driver._LAZY_ENABLE_PEER_ACCESS
