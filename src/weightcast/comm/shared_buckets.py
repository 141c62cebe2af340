"""Bucket buffers that other processes of this host can open.

Our own receiver maps a ``MemoryHandle`` (``comm/ipc.py``).  Stock engines open handles of ``torch.multiprocessing``.
This module takes torch's handle apart into plain data, and the engine's adapter puts that into the engine's format.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import torch

from weightcast.comm.ipc import SharedBuffer, device_uuid
from weightcast.comm.remote_memory import Arena
from weightcast.errors import ConfigError
from weightcast.wire.bucket_sources import BucketPart, MappedPart, MemoryHandle, Pack, RemoteMemory
from weightcast.wire.engine_info import EngineInfo

_ALIGNMENT_BYTES = 512  # as torch's own allocator; more than any dtype needs
_LAST_READ_S = 5.0
_redirecting = threading.Lock()


class TorchMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A storage as ``torch.multiprocessing.reductions`` describes it.  One process may open it once.

    Attributes:
        kind: ``cuda``, or ``shm`` for a named POSIX segment (torch's ``file_system`` strategy).
        handle: For ``cuda``, the handle of the allocation in torch's form; for ``shm``, the segment's name.
        manager: For ``shm``, the address of torch's manager of segments.
        first_byte: Offset of the buffer in the storage, in bytes; 0 except in a ring.
        turn: For a ring on a GPU, the handle of the event that the opener records after reading.
    """

    kind: Literal["cuda", "shm"]
    device: str
    size_bytes: int
    handle: bytes
    offset_bytes: int = 0
    ref_counter: bytes = b""
    ref_counter_offset: int = 0
    event: bytes = b""
    event_sync: bool = False
    manager: bytes = b""
    first_byte: int = 0
    turn: bytes = b""


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """Handles to one trainer rank's filled buffer.

    Attributes:
        memory: Handle for our receiver; None if no engine has it.
        remote: Address for our receiver on any host; None if no engine reads there.
        torch: Handles for stock engines, one for each process that will open it.
        ring: Handles to the storage that holds every buffer, for stock engines that keep it mapped.
        parts: The parts of the bucket that engines read from this buffer; empty if it has the whole bucket.
        packs: Places in the buffer at which short runs are put together for ranks that read it through NIXL.
        memories: Handles to the rank's own memory, if there is no buffer.
        host: Id of the host whose engines read the buffer; empty if all engines may.
        ranks: Ranks of one engine that read the buffer, if its ranks are on several hosts; otherwise empty.
        legs: The parts that engine ranks get from this rank, by the host whose trainer ranks' memory they read; the
            host is empty for those that get all in messages.
        leg: True if this is what one trainer rank gives to ``ranks``: ``parts``, in its buffer if there is ``memory``.
    """

    memory: MemoryHandle | None = None
    remote: RemoteMemory | None = None
    parts: tuple[BucketPart, ...] = ()
    packs: tuple[Pack, ...] = ()
    memories: tuple[MemoryHandle, ...] = ()
    mapped: tuple[MappedPart, ...] = ()
    torch: tuple[TorchMemory, ...] = ()
    ring: tuple[TorchMemory, ...] = ()
    host: str = ""
    ranks: tuple[int, ...] = ()
    legs: dict[str, tuple[BucketPart, ...]] = {}
    leg: bool = False


def memory_of_ranks(info: EngineInfo, handles: Sequence[Sequence[TorchMemory]]) -> list[TorchMemory]:
    """The handle for each rank of an engine, to the buffer on its own GPU or on the host.

    ``handles`` has those of each trainer rank, one for each engine rank.  Raises ConfigError for an engine rank on
    whose GPU no trainer rank is.
    """
    found: list[TorchMemory] = []
    for rank in info.ranks:
        offered = [some[rank.rank] for some in handles if rank.rank < len(some)]
        mine = [memory for memory in offered if memory.kind == "shm" or memory.device == rank.device]
        if not mine and rank.device == "cuda":  # without a UUID, its ranks sit on the trainer's GPUs, in the same order
            mine = offered[rank.rank : rank.rank + 1]
        if not mine:
            raise ConfigError(
                f"no trainer rank has filled a buffer on GPU {rank.device} of rank {rank.rank} of {info.engine}",
                hint="shared memory needs a trainer rank on each of the engine's GPUs; use broadcast otherwise",
            )
        found.append(mine[0])
    return found


class Ring:
    """One storage for all the buffers that are filled in turn: an engine maps it once and finds every bucket in it.

    On a GPU an engine answers before it has read.  It records an event after reading, and the buffer must not be
    written or freed before that event.
    """

    def __init__(self, count: int, size_bytes: int, device: torch.device) -> None:
        """Allocates ``count`` buffers of ``size_bytes`` each."""
        self._size_bytes = size_bytes
        self._stride = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._device = device
        self._segment = _Segment(count * self._stride) if device.type == "cpu" else None
        if self._segment is not None:
            self._data = self._segment.data
        else:
            self._data = torch.empty(count * self._stride, dtype=torch.uint8, device=device)
        self._exports: list[TorchMemory] = []
        self._turns: list[Any] = []

    def slot(self, index: int) -> torch.Tensor:
        """Returns one of the buffers, uint8."""
        return self._data[index * self._stride :][: self._size_bytes]

    def share(self, index: int, *, opens: int) -> tuple[TorchMemory, ...]:
        """Returns ``opens`` handles to the storage, with the offset of one filled buffer."""
        first = index * self._stride
        if self._segment is not None:
            return tuple(msgspec.structs.replace(self._segment.share(), first_byte=first) for _ in range(opens))
        while len(self._exports) < opens:
            events: Any = torch.cuda.Event
            turn = events(interprocess=True)
            turn.record(torch.cuda.current_stream(self._device))
            self._turns.append(turn)
            self._exports.append(msgspec.structs.replace(_share_cuda(self._data), turn=turn.ipc_handle()))
        # The buffer must be filled before its handle is posted.  Only the reader records the event: recorded here, it
        # would hide a reader that is still at work.
        torch.cuda.current_stream(self._device).synchronize()
        return tuple(msgspec.structs.replace(memory, first_byte=first) for memory in self._exports[:opens])

    def reclaim(self) -> None:
        """Makes the current stream wait until all readers have read."""
        for turn in self._turns:
            turn.wait(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        """Releases the storage when all readers have read; safe to call twice."""
        deadline = time.monotonic() + _LAST_READ_S
        while not all(turn.query() for turn in self._turns) and time.monotonic() < deadline:
            time.sleep(0.001)
        self._turns.clear()
        self._exports.clear()
        self._data = torch.empty(0, dtype=torch.uint8)
        if self._segment is not None:
            self._segment.close()


class SharedSlot:
    """A uint8 buffer that is filled again and again."""

    def __init__(
        self,
        size_bytes: int,
        device: torch.device,
        ways: Collection[str],
        *,
        ring: Ring | None = None,
        arena: Arena | None = None,
        index: int = 0,
    ) -> None:
        """Allocates the buffer; ConfigError if there is too little memory, or it cannot be shared.

        ``ways`` are any of ``weightcast``, ``torch`` and ``ring``; or ``remote`` alone; empty for a buffer that no
        process opens.  Each beyond the first costs a second buffer and a copy, except ``torch`` on a GPU.  ``index`` is
        the buffer's number in ``ring`` or ``arena``.
        """
        self._device = device
        self._ring = ring
        self._arena = arena
        self._index = index
        self._memory = "weightcast" in ways
        self._segment = _Segment(size_bytes) if device.type == "cpu" and "torch" in ways else None
        needed = self._memory or (ring is None and arena is None and self._segment is None)
        self._ours = SharedBuffer(size_bytes, device) if needed else None
        if self._memory and self._ours is not None:
            self._ours.handle()  # memory that cannot be shared must fail now, while no engine waits for it
        if arena is not None:
            self.data = arena.slot(index)
        elif ring is not None:
            self.data = ring.slot(index)
        elif self._ours is not None:
            self.data = self._ours.data
        else:
            assert self._segment is not None
            self.data = self._segment.data
        self._exports: list[TorchMemory] = []

    def reclaim(self) -> None:
        """Makes the current stream wait until the buffer may be written again."""
        if self._ring is not None:
            self._ring.reclaim()

    def share(self, *, opens: int, ring_opens: int = 0) -> Shared:
        """Returns handles to the current contents: torch's for ``opens`` processes, the ring's for ``ring_opens``."""
        for copy in (self._ours, self._segment):
            if copy is not None and copy.data is not self.data:
                copy.data.copy_(self.data)
        return Shared(
            memory=self._ours.handle() if self._memory and self._ours is not None else None,
            remote=self._arena.memory(self._index) if self._arena is not None else None,
            torch=self._share_with_torch(opens) if opens else (),
            ring=self._ring.share(self._index, opens=ring_opens) if self._ring is not None and ring_opens else (),
        )

    def _share_with_torch(self, opens: int) -> tuple[TorchMemory, ...]:
        if self._segment is not None:
            segment = self._segment
            return tuple(segment.share() for _ in range(opens))
        # The storage is shared only once, because torch keeps an event and a counter for each sharing until the storage
        # is freed.  So its event does not cover later writes, and we synchronise for those ourselves.
        while len(self._exports) < opens:
            self._exports.append(_share_cuda(self.data))
        torch.cuda.current_stream(self._device).synchronize()
        return tuple(self._exports[:opens])

    def close(self) -> None:
        """Releases the buffer; safe to call twice."""
        self.data = torch.empty(0, dtype=torch.uint8)
        for part in (self._ours, self._segment, self._ring, self._arena):
            if part is not None:
                part.close()


def make_slots(count: int, size_bytes: int, device: torch.device, ways: Collection[str]) -> list[SharedSlot]:
    """Makes ``count`` buffers to be filled in turn; see ``SharedSlot``."""
    ring = Ring(count, size_bytes, device) if "ring" in ways else None
    arena = Arena(count, size_bytes, device) if "remote" in ways else None
    slots: list[SharedSlot] = []
    try:
        for index in range(count):
            slots.append(SharedSlot(size_bytes, device, ways, ring=ring, arena=arena, index=index))
    except BaseException:
        for slot in slots:
            slot.close()
        for whole in (ring, arena):
            if whole is not None:
                whole.close()
        raise
    return slots


class _Segment:
    """A named shared-memory segment as torch makes it."""

    def __init__(self, size_bytes: int) -> None:
        storages: Any = torch.UntypedStorage
        try:
            with _silenced_stderr():
                self._storage: Any = storages._new_using_filename_cpu(size_bytes)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot allocate a shared segment of {size_bytes} bytes: {error}",
                hint="use a smaller bucket_bytes, or give /dev/shm more room",
            ) from error
        self.data = torch.empty(0, dtype=torch.uint8).set_(self._storage)
        self._name = b""

    def share(self) -> TorchMemory:
        """Returns a handle.  The process that opens it takes back the count that is added here."""
        manager, name, size_bytes = self._storage._share_filename_cpu_()
        self._storage._shared_incref()
        self._name = name
        return TorchMemory(kind="shm", device="cpu", size_bytes=size_bytes, handle=name, manager=manager)

    def close(self) -> None:
        """Releases the segment and its name, even if an engine never opened its handle."""
        self.data = torch.empty(0, dtype=torch.uint8)
        storage, self._storage = self._storage, None
        # An exception under way may hold views of the segment.  When the last view goes, torch removes the name, and
        # it ends the process if it cannot.  So we take back the counts of readers that never came.
        for _ in range(self._count() - 1):
            storage._shared_decref()
        self._name = b""

    def _count(self) -> int:
        """Reads torch's count of openings, the first number in the segment."""
        try:
            with open("/dev/shm/" + self._name.decode().lstrip("/"), "rb") as file:
                return int.from_bytes(file.read(4), sys.byteorder, signed=True)
        except (FileNotFoundError, IsADirectoryError):
            return 0


@contextmanager
def _silenced_stderr() -> Generator[None]:
    """Redirects standard error, because torch may start its manager of segments here.

    The manager lives as long as any engine with an open segment.  It would keep this process's standard error open, and
    a reader of that pipe would wait for the engine.
    """
    with _redirecting:
        mine, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, 2)
            yield
        finally:
            os.dup2(mine, 2)
            os.close(mine)
            os.close(nowhere)


def _share_cuda(data: torch.Tensor) -> TorchMemory:
    """Describes a tensor's part of its storage as if it were a storage of its own."""
    storage: Any = data.untyped_storage()
    _, handle, _, offset, counter, counter_offset, event, event_sync = storage._share_cuda_()
    return TorchMemory(
        kind="cuda",
        device=device_uuid(data.device),
        size_bytes=data.numel(),
        handle=handle,
        offset_bytes=offset + data.storage_offset(),
        ref_counter=counter,
        ref_counter_offset=counter_offset,
        event=event,
        event_sync=event_sync,
    )
