"""A bucket buffer, and the ways in which processes of this host are let into it.

Our own receiver maps a ``MemoryHandle`` (``comm/ipc.py``).  Stock engines open what ``torch.multiprocessing`` shares;
this module takes torch's own handle apart into plain data, which an engine's package puts into whatever envelope
that engine reads.  It knows neither envelope nor engine.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import torch

from weightcast.comm.ipc import SharedBuffer, device_uuid
from weightcast.errors import ConfigError
from weightcast.wire.messages import MemoryHandle

_ALIGNMENT_BYTES = 512  # more than any dtype needs; what torch's own allocator gives
_LAST_READ_S = 5.0
_redirecting = threading.Lock()


class TorchMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What ``torch.multiprocessing.reductions`` says of a storage.  To be opened once, by one process.

    Attributes:
        kind: ``cuda``, or ``shm`` for a named POSIX segment (torch's ``file_system`` strategy).
        device: UUID of the GPU without prefix, or ``"cpu"``.
        size_bytes: Size of the storage.
        handle: For ``cuda``, the handle of the allocation in torch's form; for ``shm``, the segment's name.
        offset_bytes: For ``cuda``, where the storage starts in the allocation.
        ref_counter: For ``cuda``, name of the file with the reference counters.
        ref_counter_offset: For ``cuda``, which of them.
        event: For ``cuda``, handle of the event that torch recorded when it shared.
        event_sync: For ``cuda``, True if the opener has to wait for that event.
        manager: For ``shm``, the address of torch's manager of segments.
        first_byte: Where the buffer starts in the storage; not 0 only where a ring was asked for.
        turn: For a ring on a GPU, the handle of the event that its opener records when it has read.
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
    """One trainer rank's filled buffer, as other processes may open it.

    Attributes:
        memory: For our receiver; None if none asked for it.
        torch: For stock engines, one for each process that will open it.
        ring: Likewise, but of the storage that holds every buffer in turn, for engines that keep it mapped.
    """

    memory: MemoryHandle | None = None
    torch: tuple[TorchMemory, ...] = ()
    ring: tuple[TorchMemory, ...] = ()


class Ring:
    """One storage for all the buffers that are filled in turn: an engine maps it once and finds every bucket in it.

    On a GPU an engine that opened it says by an event when it has read, since its answers do not wait for that: nothing
    may be written, and nothing freed, before.
    """

    def __init__(self, count: int, size_bytes: int, device: torch.device) -> None:
        """Allocate.

        Args:
            count: How many buffers.
            size_bytes: Of each.
            device: Where.
        """
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
        """One of the buffers, uint8."""
        return self._data[index * self._stride :][: self._size_bytes]

    def share(self, index: int, *, opens: int) -> tuple[TorchMemory, ...]:
        """Handles to the storage, and where in it this buffer is, filled."""
        first = index * self._stride
        if self._segment is not None:
            return tuple(msgspec.structs.replace(self._segment.share(), first_byte=first) for _ in range(opens))
        while len(self._exports) < opens:
            events: Any = torch.cuda.Event
            turn = events(interprocess=True)
            turn.record(torch.cuda.current_stream(self._device))
            self._turns.append(turn)
            self._exports.append(msgspec.structs.replace(_share_cuda(self._data), turn=turn.ipc_handle()))
        # What is posted is filled.  The event is the reader's alone: recorded here, it would hide that one still reads.
        torch.cuda.current_stream(self._device).synchronize()
        return tuple(msgspec.structs.replace(memory, first_byte=first) for memory in self._exports[:opens])

    def reclaim(self) -> None:
        """Whatever the current stream writes from here on, it writes after all readers have read."""
        for turn in self._turns:
            turn.wait(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        """Let go when all readers have read; safe to call twice."""
        deadline = time.monotonic() + _LAST_READ_S
        while not all(turn.query() for turn in self._turns) and time.monotonic() < deadline:
            time.sleep(0.001)
        self._turns.clear()
        self._exports.clear()
        self._data = torch.empty(0, dtype=torch.uint8)
        if self._segment is not None:
            self._segment.close()


class SharedSlot:
    """A buffer that is filled again and again.

    Attributes:
        data: The buffer, uint8.
    """

    def __init__(
        self, size_bytes: int, device: torch.device, ways: Collection[str], *, ring: Ring | None = None, index: int = 0
    ) -> None:
        """Allocate it.

        Args:
            size_bytes: Its size.
            device: Where.
            ways: ``weightcast``, ``torch``, ``ring`` or several; none for a buffer that nobody opens.  Each more than
                one costs a second buffer and a copy, but for ``torch`` on a GPU.
            ring: The one that it is a part of.
            index: Which part.

        Raises:
            ConfigError: There is not enough memory, or it cannot be shared.
        """
        self._device = device
        self._ring = ring
        self._index = index
        self._memory = "weightcast" in ways
        self._segment = _Segment(size_bytes) if device.type == "cpu" and "torch" in ways else None
        needed = self._memory or (ring is None and self._segment is None)
        self._ours = SharedBuffer(size_bytes, device) if needed else None
        if self._memory and self._ours is not None:
            self._ours.handle()  # if it cannot be shared, now: nobody waits for it yet
        if ring is not None:
            self.data = ring.slot(index)
        elif self._ours is not None:
            self.data = self._ours.data
        else:
            assert self._segment is not None
            self.data = self._segment.data
        self._exports: list[TorchMemory] = []

    def reclaim(self) -> None:
        """Make the current stream wait until the buffer may be written again."""
        if self._ring is not None:
            self._ring.reclaim()

    def share(self, *, opens: int, ring_opens: int = 0) -> Shared:
        """Handles to what the buffer holds now.

        Args:
            opens: How many processes will open it in torch's way.
            ring_opens: How many will open the ring that it is a part of.
        """
        for copy in (self._ours, self._segment):
            if copy is not None and copy.data is not self.data:
                copy.data.copy_(self.data)
        return Shared(
            memory=self._ours.handle() if self._memory and self._ours is not None else None,
            torch=self._share_with_torch(opens) if opens else (),
            ring=self._ring.share(self._index, opens=ring_opens) if self._ring is not None and ring_opens else (),
        )

    def _share_with_torch(self, opens: int) -> tuple[TorchMemory, ...]:
        if self._segment is not None:
            segment = self._segment
            return tuple(segment.share() for _ in range(opens))
        # Shared once and for all: torch keeps an event and a counter for each sharing until the storage is freed, which
        # here is at the very end.  So its event says nothing of what was written since; we wait for that ourselves.
        while len(self._exports) < opens:
            self._exports.append(_share_cuda(self.data))
        torch.cuda.current_stream(self._device).synchronize()
        return tuple(self._exports[:opens])

    def close(self) -> None:
        """Let go; safe to call twice."""
        self.data = torch.empty(0, dtype=torch.uint8)
        if self._ours is not None:
            self._ours.close()
        if self._segment is not None:
            self._segment.close()
        if self._ring is not None:
            self._ring.close()


def make_slots(count: int, size_bytes: int, device: torch.device, ways: Collection[str]) -> list[SharedSlot]:
    """Buffers to be filled in turn, and closed together; see ``SharedSlot``."""
    ring = Ring(count, size_bytes, device) if "ring" in ways else None
    slots: list[SharedSlot] = []
    try:
        for index in range(count):
            slots.append(SharedSlot(size_bytes, device, ways, ring=ring, index=index))
    except BaseException:
        for slot in slots:
            slot.close()
        if ring is not None:
            ring.close()
        raise
    return slots


class _Segment:
    """A named shared-memory segment as torch makes it."""

    def __init__(self, size_bytes: int) -> None:
        storages: Any = torch.UntypedStorage
        try:
            with _no_words():
                self._storage: Any = storages._new_using_filename_cpu(size_bytes)
        except RuntimeError as error:
            raise ConfigError(
                f"no shared segment of {size_bytes} bytes: {error}",
                hint="use a smaller bucket_bytes, or give /dev/shm more room",
            ) from error
        self.data = torch.empty(0, dtype=torch.uint8).set_(self._storage)
        self._name = b""

    def share(self) -> TorchMemory:
        """A handle; whoever opens it takes back the count that is added here."""
        manager, name, size_bytes = self._storage._share_filename_cpu_()
        self._storage._shared_incref()
        self._name = name
        return TorchMemory(kind="shm", device="cpu", size_bytes=size_bytes, handle=name, manager=manager)

    def close(self) -> None:
        """Let go; the name goes with the memory, even if an engine that should have opened it never did."""
        self.data = torch.empty(0, dtype=torch.uint8)
        storage, self._storage = self._storage, None
        # An error under way may hold views of it, and torch ends the process if it cannot take the name away itself
        # when the last one goes.  So the counts of those who never came are taken back, and torch does it.
        for _ in range(self._count() - 1):
            storage._shared_decref()
        self._name = b""

    def _count(self) -> int:
        """How often torch counts the segment as open: the first number in it."""
        try:
            with open("/dev/shm/" + self._name.decode().lstrip("/"), "rb") as file:
                return int.from_bytes(file.read(4), sys.byteorder, signed=True)
        except (FileNotFoundError, IsADirectoryError):
            return 0


@contextmanager
def _no_words() -> Generator[None]:
    """Torch may start its manager of segments here, which lives as long as any engine that opened one.

    It would keep this process's standard error open as long: whoever reads that from a pipe would wait for the engine.
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
    """A handle to a tensor's part of its storage, as to a storage of its own."""
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
