"""Parameters that moved out of vLLM's pool for sleep mode (cumem), and still sleep and wake with it.

vLLM's allocator keeps books: for each allocation an address, a size, a tag, and the place where its C code keeps the
driver's handle of the memory.  A sleep frees the memory of every entry, and copies it to the host before, if the tag
says so.  A wake-up puts new memory behind the same addresses and writes its handle into that place.  So an entry of our
own, whose place is ours, sleeps and wakes as vLLM's do, and a commit that maps other memory writes the handle of that.

The memory that parameters leave in the pool is freed as vLLM frees what is left over in it, by the same two calls.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false, reportPrivateUsage=false
from __future__ import annotations

import ctypes
import importlib
import logging
from typing import Any

import torch

from weightcast.runtime.mapped_memory import Mapper

log = logging.getLogger("vllm.weightcast")

_MODULE = "vllm.device_allocator.cumem"
_NEEDED = ("CuMemAllocator", "AllocationData", "create_and_map", "unmap_and_release")
_TAG = "weights"
_FIRST, _SECOND = 90, 165


class CumemOwner:
    """Implements ``Owner`` for vLLM's allocator.

    Attributes:
        released_bytes: Memory that was freed because parameters had left it; torch still counts it as reserved.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        """Does nothing yet; ``module`` is vLLM's."""
        self._module = module
        self._device = device
        self._allocator = module.CuMemAllocator.get_instance()
        self.released_bytes = 0

    def enter(self, address: int, size_bytes: int, memory: int) -> CumemEntry:
        """Implements ``Owner.enter``."""
        return CumemEntry(self._module, self._allocator, self._device, address, size_bytes, memory)

    def release_left(self) -> None:
        """Implements ``Owner.release_left``: frees the segments of weights in which nothing is allocated any more."""
        for segment in torch.cuda.memory_snapshot():
            known = self._allocator.pointer_to_data.get(segment["address"])
            used = segment["allocated_size"] or segment["active_size"]
            if known is None or known.tag != _TAG or known.is_asleep or used:
                continue
            self._module.unmap_and_release(self._allocator._python_free_callback(segment["address"]))
            self.released_bytes += segment["total_size"]

    def try_out(self, mapper: Mapper) -> None:
        """Lets a small range of ours sleep and wake by vLLM's calls.

        Raises:
            Exception: They do not do what this module needs.
        """
        size_bytes = mapper.granularity
        address, memory = mapper.reserve(size_bytes), mapper.create(size_bytes)
        mapper.map(address, size_bytes, memory)
        entry = self.enter(address, size_bytes, memory)
        try:
            tensor = mapper.tensor(address, size_bytes, entry)
            tensor.fill_(_FIRST)
            mapper.wait()
            self._module.unmap_and_release(entry.handle)
            entry.exchanged(0)
            self._module.create_and_map(entry.handle)
            found = entry.memory()
            if not found:  # a write to addresses without memory would end the process
                raise RuntimeError("vLLM's allocator does not keep the handle of memory where it is expected")
            tensor.fill_(_SECOND)
            if not bool((tensor == _SECOND).all()):
                raise RuntimeError(
                    "memory that vLLM's allocator put behind our addresses does not keep what is written"
                )
            mapper.wait()
            mapper.unmap(address, size_bytes)
            mapper.destroy(found)
        finally:
            entry.end()
        mapper.give_back(address, size_bytes)


class CumemEntry:
    """Implements ``Entry``."""

    def __init__(
        self, module: Any, allocator: Any, device: torch.device, address: int, size_bytes: int, memory: int
    ) -> None:
        self._books = allocator.pointer_to_data
        self._address = address
        self._place = ctypes.c_uint64(memory)
        self.handle = device.index, size_bytes, address, ctypes.addressof(self._place)
        self._books[address] = module.AllocationData(self.handle, _TAG)

    def memory(self) -> int | None:
        """Implements ``Entry.memory``."""
        return None if self._books[self._address].is_asleep else self._place.value

    def exchanged(self, memory: int) -> None:
        """Implements ``Entry.exchanged``."""
        self._place.value = memory

    def end(self) -> None:
        """Implements ``Entry.end``."""
        self._books.pop(self._address, None)


def owner_for(device: torch.device, mapper: Mapper | None) -> CumemOwner | None:
    """Returns vLLM's allocator as the owner of parameters that move; None, with a warning, if that is not possible."""
    try:
        module = importlib.import_module(_MODULE)
        missing = [name for name in _NEEDED if not hasattr(module, name)]
        if mapper is None or missing:
            raise RuntimeError(f"no {', '.join(missing) or 'mapper'}")
        owner = CumemOwner(module, device)
        if not hasattr(owner._allocator, "_python_free_callback"):
            raise RuntimeError("no _python_free_callback")
        owner.try_out(mapper)
    except Exception as error:  # noqa: BLE001  other versions of vLLM may have another allocator
        log.warning("weightcast: with sleep mode, this vLLM exchanges the contents of parameters: %s", error)
        return None
    return owner
