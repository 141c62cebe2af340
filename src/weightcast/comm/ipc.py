"""Memory that two processes of one host share: an anonymous file on the host, a CUDA IPC allocation on a GPU.

The sender *exports* a buffer as a ``MemoryHandle``; the receiver *maps* it.  On the host the buffer is an
anonymous POSIX shared-memory file (``memfd_create``): it has no name that a stranger could open or a crash
could leave behind, and the kernel frees it with the last process that has it.  The receiver reaches it
through ``/proc/<pid>/fd`` and checks the random token in its name.  On a GPU the buffer is exported by
the CUDA driver, and an event says when it is filled.

It knows bytes and devices, neither engines nor buckets.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from typing import Any

import torch

from weightcast.comm import cuda_driver
from weightcast.errors import ConfigError, WeightcastError
from weightcast.wire.messages import MemoryHandle

_PREFIX = "weightcast-"


class MappingFailed(WeightcastError):
    """A buffer of another process could not be mapped."""


def device_uuid(device: torch.device) -> str:
    """``"cpu"``, or the UUID of a GPU, the same in every process whatever ``CUDA_VISIBLE_DEVICES`` says."""
    if device.type != "cuda":
        return "cpu"
    return str(torch.cuda.get_device_properties(device).uuid)


def device_of(uuid: str) -> torch.device | None:
    """The visible device with this UUID, or None."""
    if uuid == "cpu":
        return torch.device("cpu")
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return torch.device("cuda", index)
    return None


def host_id() -> str:
    """Boot id of this host; two processes with the same one can share memory.

    A container shares it with its host, but may have a pid namespace of its own: then mapping fails with a clear
    error and broadcast is the way.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError as error:
        raise ConfigError(f"cannot tell which host this is: {error}") from error


class SharedBuffer:
    """A flat uint8 buffer of this process that others can map.

    Attributes:
        data: The buffer, uint8, ``(size_bytes,)``.
    """

    data: torch.Tensor

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        """Allocate.

        Raises:
            ConfigError: There is not enough memory.
        """
        self._device = device
        self._file: int | None = None
        self._map: mmap.mmap | None = None
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.data = torch.empty(size_bytes, dtype=torch.uint8, device=device)
            self._handle: MemoryHandle | None = None
        else:
            token = secrets.token_hex(16)
            self._file = os.memfd_create(_PREFIX + token, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(self._file, size_bytes)
                fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
                self._map = mmap.mmap(self._file, size_bytes)
            except (OSError, ValueError) as error:
                self.close()
                raise ConfigError(
                    f"no shared buffer of {size_bytes} bytes: {error}", hint="use a smaller bucket_bytes"
                ) from error
            self.data = torch.frombuffer(self._map, dtype=torch.uint8)
            self._handle = MemoryHandle(
                kind="shm", device="cpu", size_bytes=size_bytes, token=token, pid=os.getpid(), fd=self._file
            )

    def handle(self) -> MemoryHandle:
        """A handle to what the buffer holds now.

        On a GPU it marks this point of the current stream: whoever waits for the handle's event sees every
        write that was enqueued before this call.

        Raises:
            ConfigError: The memory cannot be shared (PyTorch's expandable segments).
        """
        if self._handle is None:
            self._event = torch.cuda.Event(interprocess=True)
            self._handle = self._export_cuda()
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))
        return self._handle

    def close(self) -> None:
        """Let go; safe to call twice.  A process that has mapped the buffer keeps its pages until it lets go too."""
        self.data = torch.empty(0, dtype=torch.uint8)
        self._event = None
        self._map = _unmap(self._map)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _export_cuda(self) -> MemoryHandle:
        assert self._event is not None
        try:
            handle, offset = cuda_driver.export_memory(self.data.data_ptr(), self._device)
        except cuda_driver.DriverError as error:
            raise ConfigError(
                f"GPU memory cannot be shared: {error}",
                hint="take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF for the trainer",
            ) from error
        self._event.record(torch.cuda.current_stream(self._device))
        return MemoryHandle(
            kind="cuda",
            device=device_uuid(self._device),
            size_bytes=self.data.numel(),
            handle=handle,
            offset_bytes=offset,
            event=self._event.ipc_handle(),
        )


class Mapping:
    """A buffer of another process, mapped into this one.

    Attributes:
        data: The buffer, uint8; reading only.
    """

    data: torch.Tensor

    def __init__(self, handle: MemoryHandle) -> None:
        """Map it.

        Raises:
            MappingFailed: The owner is gone, another user's, on another host, or the handle is not what it says.
        """
        self._event: Any = None  # torch types an imported event as its base class
        self._map: mmap.mmap | None = None
        self._base = 0
        if handle.kind == "cuda":
            self._map_cuda(handle)
        else:
            self._map_shm(handle)

    def wait(self) -> None:
        """Make the current stream wait until the sender has filled the buffer; returns at once."""
        if self._event is not None:
            self._event.wait(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        """Unmap; safe to call twice."""
        self.data = torch.empty(0, dtype=torch.uint8)
        self._event = None
        self._map = _unmap(self._map)
        if self._base:
            cuda_driver.close_memory(self._base, self._device)
            self._base = 0

    def _map_shm(self, handle: MemoryHandle) -> None:
        path = f"/proc/{handle.pid}/fd/{handle.fd}"
        try:
            # The token proves that this is the announced buffer and not whatever a reused pid has at that number.
            if not handle.token or os.readlink(path) != f"/memfd:{_PREFIX}{handle.token} (deleted)":
                raise MappingFailed(f"process {handle.pid} has no such buffer")
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise MappingFailed(
                f"cannot map memory of process {handle.pid}: {error.strerror}",
                hint="trainer and engine must run on one host, as one user, in one pid namespace; else use broadcast",
            ) from error
        try:
            # A file that could still be cut short would kill its reader (SIGBUS) in the middle of a copy.
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise MappingFailed(f"buffer of process {handle.pid} is not sealed against shrinking")
            if os.fstat(file).st_size != handle.size_bytes:
                raise MappingFailed(f"buffer of process {handle.pid} has not the {handle.size_bytes} bytes announced")
            # ACCESS_COPY: private, so nothing this process does can reach the trainer's memory.
            self._map = mmap.mmap(file, handle.size_bytes, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise MappingFailed(f"cannot map memory of process {handle.pid}: {error}") from error
        finally:
            os.close(file)
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)
        self._device = torch.device("cpu")

    def _map_cuda(self, handle: MemoryHandle) -> None:
        device = device_of(handle.device)
        if device is None:
            raise MappingFailed(
                f"GPU {handle.device} of the trainer is not visible to this engine rank",
                hint="do not hide it with CUDA_VISIBLE_DEVICES, or use broadcast",
            )
        self._device = device
        try:
            self._base = cuda_driver.open_memory(handle.handle, device)
            try:
                self.data = cuda_driver.as_tensor(self._base + handle.offset_bytes, handle.size_bytes, device)
                if handle.event:
                    self._event = torch.cuda.Event.from_ipc_handle(device, handle.event)
            except BaseException:
                self.close()
                raise
        except (cuda_driver.DriverError, RuntimeError) as error:
            raise MappingFailed(f"cannot map memory of GPU {handle.device}: {error}") from error


def _unmap(mapped: mmap.mmap | None) -> None:
    if mapped is not None:
        with contextlib.suppress(BufferError):  # a view is alive somewhere; the mapping goes with it
            mapped.close()
