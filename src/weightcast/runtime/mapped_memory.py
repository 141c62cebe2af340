"""Two ranges of addresses whose memory changes places without a copy.

Captured graphs and kernels know addresses.  Virtual memory keeps the addresses and changes what lies behind them: an
H100 maps 16 GB anew in 1.5 ms, and exchanges their contents in 23 ms.  Source: "Virtual Memory Management" in the CUDA
driver's manual.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

LIVE, WAITING = 0, 1


class Mapper(Protocol):
    """Maps memory of one device to addresses.  Each call raises the driver's error."""

    granularity: int
    """Sizes are multiples of so many bytes."""

    def reserve(self, size_bytes: int) -> int:
        """Returns the first of so many addresses that nothing else gets, without memory behind them."""
        ...

    def give_back(self, address: int, size_bytes: int) -> None:
        """Ends ``reserve``."""
        ...

    def create(self, size_bytes: int) -> int:
        """Returns the handle of new memory; raises ``torch.OutOfMemoryError`` if there is too little."""
        ...

    def destroy(self, memory: int) -> None:
        """Frees memory that is mapped nowhere."""
        ...

    def map(self, address: int, size_bytes: int, memory: int) -> None:
        """Puts memory behind reserved addresses, or changes nothing if that fails."""
        ...

    def unmap(self, address: int, size_bytes: int) -> None:
        """Takes the memory away from addresses that nothing reads or writes meanwhile."""
        ...

    def tensor(self, address: int, size_bytes: int, owner: object) -> torch.Tensor:
        """Returns a flat uint8 tensor at an address, which keeps ``owner`` alive."""
        ...

    def wait(self) -> None:
        """Waits for all work on the device."""
        ...


class MappedPair:
    """A live and a waiting range of one size.  Tensors in it keep it alive; both ranges are freed with it."""

    def __init__(self, size_bytes: int, mapper: Mapper) -> None:
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
    mapper: Mapper, addresses: list[int], size_bytes: int, wanted: list[int | None], mapped: list[int | None]
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
