"""What an LMDeploy server keeps of our buffer between two buckets.

The server maps a buffer when a bucket brings a handle to it, and reads every later bucket from the same mapping until
it is told to finish or falls asleep.  The handle has to come again when the buffer, its size or the dtype has changed:
a bucket without one would be read from what was mapped before, without an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from weightcast.comm.share import TorchMemory

_Mapped = tuple[tuple[bytes, int, int, bytes], ...]


class Kept:
    """Which buffers a server's ranks have mapped, and as which dtype."""

    def __init__(self) -> None:
        self._mapped: _Mapped = ()
        self._dtype = ""

    def lacks(self, memories: Sequence[TorchMemory], dtype: str) -> bool:
        """True if a bucket in these buffers, one for each rank, must bring its handles."""
        return self._mapped != _places(memories) or self._dtype != dtype

    def have(self, memories: Sequence[TorchMemory], dtype: str) -> None:
        """The server has taken a bucket from these."""
        self._mapped, self._dtype = _places(memories), dtype

    def nothing(self) -> None:
        """It has let go of all, or nobody knows what it has."""
        self._mapped, self._dtype = (), ""


def _places(memories: Sequence[TorchMemory]) -> _Mapped:
    return tuple((memory.handle, memory.offset_bytes, memory.size_bytes, memory.turn) for memory in memories)
