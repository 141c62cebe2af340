"""The IPC handles that an LMDeploy server keeps between two buckets.

The server maps a buffer when a bucket brings a handle, and reads later buckets from the same mapping until an update
ends or it falls asleep.  The handle has to come again when the buffer, its size or the dtype has changed.  Without it
the server would read the old mapping and report no error.
"""

from __future__ import annotations

from collections.abc import Sequence

from weightcast.comm.shared_buckets import TorchMemory

_Places = tuple[tuple[bytes, int, int, bytes], ...]


class HandleCache:
    """The buffers that a server's ranks have mapped, and the dtype that they read there."""

    def __init__(self) -> None:
        self._mapped: _Places = ()
        self._dtype = ""

    def needs_handles(self, memories: Sequence[TorchMemory], dtype: str) -> bool:
        """True if a bucket in these buffers, one for each rank, must bring its handles."""
        return self._mapped != _places(memories) or self._dtype != dtype

    def remember(self, memories: Sequence[TorchMemory], dtype: str) -> None:
        """Records that the server has taken a bucket from these buffers."""
        self._mapped, self._dtype = _places(memories), dtype

    def clear(self) -> None:
        """Forgets all buffers: the server has unmapped them, or its mappings are unknown."""
        self._mapped, self._dtype = (), ""


def _places(memories: Sequence[TorchMemory]) -> _Places:
    return tuple((memory.handle, memory.offset_bytes, memory.size_bytes, memory.turn) for memory in memories)
