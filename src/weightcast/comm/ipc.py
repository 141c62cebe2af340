"""Memory that two processes of one host share: an anonymous file on the host, a CUDA IPC allocation on a GPU.

The sender *exports* a buffer as a ``MemoryHandle``; the receiver *maps* it.  On the host the buffer is an anonymous
file (``memfd_create``): no other user can open it by name, no crash leaves it behind, and the kernel frees it with the
last process that has it open.  The receiver opens it through ``/proc/<pid>/fd`` and checks the random token in its
name.  On a GPU the CUDA driver exports the buffer, and an event marks when it is filled.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import weakref
from typing import Any
from urllib.parse import urlsplit

import torch

from weightcast.comm import cuda_driver
from weightcast.errors import ConfigError, WeightcastError
from weightcast.wire.bucket_sources import MemoryHandle

_PREFIX = "weightcast-"
_buffers: weakref.WeakSet[SharedBuffer] = weakref.WeakSet()  # on the host, of this process


class MappingFailed(WeightcastError):
    """A buffer of another process could not be mapped."""


def device_uuid(device: torch.device) -> str:
    """Returns ``"cpu"`` or the UUID of a GPU, which is the same in every process."""
    if device.type != "cuda":
        return "cpu"
    return str(torch.cuda.get_device_properties(device).uuid)


def visible_gpus() -> tuple[str, ...]:
    """Returns the UUIDs of the GPUs that this process can see, and so may map memory of."""
    return tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count()))


def device_of(uuid: str) -> torch.device | None:
    """Returns the visible device with this UUID, or None."""
    if uuid == "cpu":
        return torch.device("cpu")
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return torch.device("cuda", index)
    return None


def host_id() -> str:
    """Returns this host's boot id; two processes with the same one can share memory.

    A container has its host's boot id but may have a pid namespace of its own.  Then mapping fails with an error that
    recommends broadcast.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError as error:
        raise ConfigError(f"cannot read this host's boot id: {error}") from error


class SharedBuffer:
    """A flat uint8 buffer of this process that others can map."""

    data: torch.Tensor

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        """Allocates the buffer; raises ConfigError if there is not enough memory."""
        self._device = device
        self._file: int | None = None
        self._map: mmap.mmap | None = None
        self._event: torch.cuda.Event | None = None
        # A new buffer may get the CUDA handle, or the pid and descriptor, of one that was freed.
        self._token = token = secrets.token_hex(16)
        if device.type == "cuda":
            self.data = torch.empty(size_bytes, dtype=torch.uint8, device=device)
            self._handle: MemoryHandle | None = None
        else:
            self._file = os.memfd_create(_PREFIX + token, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(self._file, size_bytes)
                fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
                self._map = mmap.mmap(self._file, size_bytes)
            except (OSError, ValueError) as error:
                self.close()
                raise ConfigError(
                    f"cannot allocate a shared buffer of {size_bytes} bytes: {error}", hint="use a smaller bucket_bytes"
                ) from error
            self.data = torch.frombuffer(self._map, dtype=torch.uint8)
            _buffers.add(self)
            self._handle = MemoryHandle(
                kind="shm", device="cpu", size_bytes=size_bytes, token=token, pid=os.getpid(), fd=self._file
            )

    def handle(self) -> MemoryHandle:
        """Returns a handle to the current contents; ConfigError if it cannot be shared (expandable segments).

        On a GPU the handle's event marks this point of the current stream.  A reader that waits for it sees every write
        that was enqueued before this call.
        """
        if self._handle is None:
            self._event = torch.cuda.Event(interprocess=True)
            self._handle = self._export_cuda()
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))
        return self._handle

    def close(self) -> None:
        """Releases the buffer; safe to call twice.  A process that has mapped it keeps the pages until it unmaps."""
        _buffers.discard(self)
        self.data = torch.empty(0, dtype=torch.uint8)
        self._event = None
        self._map = _unmap(self._map)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _export_cuda(self) -> MemoryHandle:
        assert self._event is not None
        handle, offset = cuda_driver.export_memory(self.data.data_ptr(), self._device)
        self._event.record(torch.cuda.current_stream(self._device))
        return MemoryHandle(
            kind="cuda",
            device=device_uuid(self._device),
            size_bytes=self.data.numel(),
            token=self._token,
            handle=handle,
            offset_bytes=offset,
            event=self._event.ipc_handle(),
        )


def shared_buffer_at(address: int) -> SharedBuffer | None:
    """Returns this process's buffer on the host that holds an address."""
    for buffer in list(_buffers):
        if 0 <= address - buffer.data.data_ptr() < buffer.data.numel():
            return buffer
    return None


class Mapping:
    """A buffer of another process, mapped into this one; ``data`` is uint8, for reading only."""

    data: torch.Tensor

    def __init__(self, handle: MemoryHandle, reader: torch.device | None = None) -> None:
        """Maps the buffer; MappingFailed if its owner is gone or elsewhere, or the handle is wrong.

        ``reader`` is the GPU whose kernels read it, None the owner's.  It takes ``data`` for its own memory where it
        reaches the owner's.
        """
        self._event: Any = None  # torch types an imported event as its base class
        self._map: mmap.mmap | None = None
        self._owner = self._device = torch.device("cpu")
        self._base = 0
        self._handle = handle
        if (handle.kind == "cuda") == (handle.device == "cpu"):
            raise MappingFailed(f"a buffer of kind {handle.kind} cannot be on {handle.device}")
        if handle.kind == "cuda":
            self._map_cuda(handle, reader)
        else:
            self._map_shm(handle)

    @property
    def is_far(self) -> bool:
        """True if the memory lies on another GPU than the one that it was mapped for."""
        return self._owner != self._device

    def wait(self) -> None:
        """Makes the current stream wait until the buffer is filled; MappingFailed if its owner has released it."""
        if self._map is not None:
            handle = self._handle
            try:
                name = os.readlink(f"/proc/{handle.pid}/fd/{handle.fd}")
            except OSError:
                name = ""
            if name != _name_of(handle.token):
                raise MappingFailed(f"process {handle.pid} has released this buffer and will not fill it again")
        if self._event is not None:
            filled = torch.cuda.current_stream(self._owner)
            self._event.wait(filled)
            if self._owner != self._device:
                torch.cuda.current_stream(self._device).wait_stream(filled)

    def close(self) -> None:
        """Unmaps the buffer; safe to call twice."""
        self.data = torch.empty(0, dtype=torch.uint8)
        self._event = None
        self._map = _unmap(self._map)
        if self._base:
            cuda_driver.close_memory(self._base, self._device)
            self._base = 0

    def _map_shm(self, handle: MemoryHandle) -> None:
        path = f"/proc/{handle.pid}/fd/{handle.fd}"
        try:
            # The token proves that this is the announced buffer and not a file of a process that reuses the pid.
            if not handle.token or os.readlink(path) != _name_of(handle.token):
                raise MappingFailed(f"process {handle.pid} has no such buffer")
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise MappingFailed(
                f"cannot map memory of process {handle.pid}: {error.strerror}",
                hint="run trainer and engine on one host, as one user with the same capabilities, in one pid "
                "namespace, or use broadcast",
            ) from error
        try:
            # If the owner could still truncate the file, a copy from it could be killed by SIGBUS.
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise MappingFailed(f"the buffer of process {handle.pid} is not sealed against shrinking")
            if os.fstat(file).st_size != handle.size_bytes:
                raise MappingFailed(
                    f"the buffer of process {handle.pid} does not have the announced size of {handle.size_bytes} bytes"
                )
            # ACCESS_COPY makes the mapping private: this process cannot write to the trainer's memory.
            self._map = mmap.mmap(file, handle.size_bytes, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise MappingFailed(f"cannot map memory of process {handle.pid}: {error}") from error
        finally:
            os.close(file)
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)
        self._device = torch.device("cpu")

    def _map_cuda(self, handle: MemoryHandle, reader: torch.device | None) -> None:
        owner = device_of(handle.device)
        if owner is None:
            raise MappingFailed(
                f"GPU {handle.device} of the trainer is not visible to this engine rank",
                hint="add it to the engine's CUDA_VISIBLE_DEVICES, or use broadcast",
            )
        # Kernels on one GPU read memory on another only if it was mapped for them.
        reaches = reader is not None and reader != owner and torch.cuda.can_device_access_peer(reader, owner)
        self._owner, self._device = owner, reader if reader is not None and reaches else owner
        try:
            self._base = cuda_driver.open_memory(handle.handle, self._device)
            try:
                part = handle.offset_bytes, handle.size_bytes
                self.data = cuda_driver.as_tensor(self._base, *part, self._device, owner)
                if handle.event:
                    self._event = cuda_driver.open_event(handle.event, owner)
            except BaseException:
                self.close()
                raise
        except (cuda_driver.DriverError, RuntimeError) as error:
            raise MappingFailed(f"cannot map memory of GPU {handle.device}: {error}") from error


def _name_of(token: str) -> str:
    return f"/memfd:{_PREFIX}{token} (deleted)"


def _unmap(mapped: mmap.mmap | None) -> None:
    if mapped is not None:
        with contextlib.suppress(BufferError):  # a view is still alive, and the mapping ends with it
            mapped.close()


def host_id_of(url: str) -> str:
    """Returns this host's ``host_id`` if the URL leads to this host, else ``"host:NAME"``.

    A server that is reached at an address of this host runs on it, if nothing forwards the port.
    """
    name = urlsplit(url).hostname or ""
    return host_id() if is_here(name) else f"host:{name}"


def is_here(name: str) -> bool:
    """Returns True for an address of this host: a packet to such an address also comes from it."""
    try:
        here, there = route_to(name, 9)
    except OSError:
        return False
    return here == there or here.startswith("127.")


def route_to(host: str, port: int) -> tuple[str, str]:
    """This host's address on the route to another host, and that host's; OSError without one.  Sends no packet."""
    family, _, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0]), str(there[0])
