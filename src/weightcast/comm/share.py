"""A bucket buffer, and the ways in which processes of this host are let into it.

Our own receiver maps a ``MemoryHandle`` (``comm/ipc.py``).  Stock engines open what ``torch.multiprocessing`` shares;
this module takes torch's own handle apart into plain data, which an engine's package puts into whatever envelope
that engine reads.  It knows neither envelope nor engine.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Literal

import msgspec
import torch

from weightcast.comm.ipc import SharedBuffer, device_uuid
from weightcast.errors import ConfigError
from weightcast.wire.messages import MemoryHandle


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
    """

    memory: MemoryHandle | None = None
    torch: tuple[TorchMemory, ...] = ()


class SharedSlot:
    """A buffer that is filled again and again.

    Attributes:
        data: The buffer, uint8.
    """

    def __init__(self, size_bytes: int, device: torch.device, ways: Collection[str]) -> None:
        """Allocate it.

        Args:
            size_bytes: Its size.
            device: Where.
            ways: ``weightcast``, ``torch`` or both.  Both at once on a CPU cost a second buffer and a copy.

        Raises:
            ConfigError: There is not enough memory, or it cannot be shared.
        """
        self._ours = SharedBuffer(size_bytes, device) if device.type == "cuda" or "torch" not in ways else None
        self._segment: _Segment | None = None
        if device.type == "cpu" and "torch" in ways:
            self._segment = _Segment(size_bytes)
            if "weightcast" in ways:
                self._ours = SharedBuffer(size_bytes, device)
        if self._ours is not None:
            self.data = self._ours.data
        else:
            assert self._segment is not None
            self.data = self._segment.data
        self._device = device
        self._memory = "weightcast" in ways
        self._exports: list[TorchMemory] = []

    def share(self, *, opens: int) -> Shared:
        """Handles to what the buffer holds now.

        Args:
            opens: How many processes will open it in torch's way.
        """
        if self._segment is not None and self._ours is not None:
            self._segment.data.copy_(self.data)
        return Shared(
            memory=self._ours.handle() if self._memory and self._ours is not None else None,
            torch=self._share_with_torch(opens) if opens else (),
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


class _Segment:
    """A named shared-memory segment as torch makes it."""

    def __init__(self, size_bytes: int) -> None:
        storages: Any = torch.UntypedStorage
        try:
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
        """Let go, and take the name away even if an engine that should have opened it never did."""
        self.data = torch.empty(0, dtype=torch.uint8)
        self._storage = None
        if self._name:
            with suppress(FileNotFoundError):
                os.unlink("/dev/shm/" + self._name.decode().lstrip("/"))
            self._name = b""


def _share_cuda(data: torch.Tensor) -> TorchMemory:
    storage: Any = data.untyped_storage()
    _, handle, size_bytes, offset, counter, counter_offset, event, event_sync = storage._share_cuda_()
    return TorchMemory(
        kind="cuda",
        device=device_uuid(data.device),
        size_bytes=size_bytes,
        handle=handle,
        offset_bytes=offset,
        ref_counter=counter,
        ref_counter_offset=counter_offset,
        event=event,
        event_sync=event_sync,
    )
