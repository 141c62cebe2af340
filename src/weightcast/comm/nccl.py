"""NCCL by itself: a group for engines that meet by a unique id, not through a store of torch's.

Whoever is rank 0 makes an id of 128 bytes and tells it to the others; all enter ``ncclCommInitRank`` at the same time,
and the first thing that they do together is to sum one float32.  vLLM's communicator does it so; a member that leaves
the sum out blocks all of them.

The binding is ``ctypes`` on the library that torch has loaded already: ten functions of NCCL's C interface as it has
been since 2.14.  The communicator is a non-blocking one, so that meeting, too, has a deadline of ours.  Which engine is
at the other end, and how it hears of the id, is not known here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from weightcast.comm.group import GroupFailed
from weightcast.comm.polling import Looks
from weightcast.errors import ConfigError, DeadlineExceeded

UNIQUE_ID_BYTES = 128

_SUCCESS = 0
_IN_PROGRESS = 7
_UINT8, _FLOAT32, _SUM = 1, 7, 0
_OLDEST = 21400  # NCCL 2.14, the first with non-blocking communicators
_MAGIC = 0xCAFEBEEF


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    """``ncclConfig_t`` as it was in 2.14: NCCL takes what it has not heard of from its defaults."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


class NcclLibrary:
    """The functions that a group needs.  Every method gives NCCL's result code unless it says otherwise."""

    def __init__(self, path: str | None = None) -> None:
        """Load it.

        Args:
            path: Of the shared library; None looks for the one that torch uses.

        Raises:
            ConfigError: There is none, or it is too old.
        """
        self._library: Any = _load(path)
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for name, arguments in (
            ("ncclGetVersion", (ctypes.POINTER(number),)),
            ("ncclGetUniqueId", (ctypes.POINTER(_UniqueId),)),
            (
                "ncclCommInitRankConfig",
                (ctypes.POINTER(pointer), number, _UniqueId, number, ctypes.POINTER(_Config)),
            ),
            ("ncclCommGetAsyncError", (pointer, ctypes.POINTER(number))),
            ("ncclCommAbort", (pointer,)),
            ("ncclAllReduce", (pointer, pointer, size, number, number, pointer, pointer)),
            ("ncclBroadcast", (pointer, pointer, size, number, number, pointer, pointer)),
        ):
            function = getattr(self._library, name, None)
            if function is None:
                raise ConfigError(f"this NCCL has no {name}", hint="NCCL 2.14 or newer, as every torch of 2023 has it")
            function.argtypes = list(arguments)
            function.restype = number
        for name, arguments in (("ncclGetErrorString", (number,)), ("ncclGetLastError", (pointer,))):
            function = getattr(self._library, name)
            function.argtypes = list(arguments)
            function.restype = ctypes.c_char_p
        found = ctypes.c_int()
        self._library.ncclGetVersion(ctypes.byref(found))
        self.version: int = found.value
        if self.version < _OLDEST:
            raise ConfigError(f"NCCL {self.version} is too old", hint="2.14 or newer")

    def unique_id(self) -> bytes:
        """A new id; this process listens for the others from now on.

        Raises:
            GroupFailed: NCCL finds no way to listen.
        """
        found = _UniqueId()
        result = self._library.ncclGetUniqueId(ctypes.byref(found))
        if result != _SUCCESS:
            raise GroupFailed(f"no NCCL id: {self.words(result, None)}")
        return ctypes.string_at(ctypes.addressof(found), UNIQUE_ID_BYTES)

    def init(self, unique_id: bytes, *, rank: int, world_size: int) -> tuple[int, Any]:
        """Start to meet; the communicator is there when ``state`` says so."""
        config = _Config(size=ctypes.sizeof(_Config), magic=_MAGIC, version=_OLDEST, blocking=0)
        given = _UniqueId.from_buffer_copy(unique_id)
        communicator = ctypes.c_void_p()
        result = self._library.ncclCommInitRankConfig(
            ctypes.byref(communicator), world_size, given, rank, ctypes.byref(config)
        )
        return result, communicator

    def state(self, communicator: Any) -> int:
        """What the communicator is at: done, in progress, or an error."""
        found = ctypes.c_int()
        result = self._library.ncclCommGetAsyncError(communicator, ctypes.byref(found))
        return result if result != _SUCCESS else found.value

    def sum_float32(self, address: int, count: int, communicator: Any, stream: int) -> int:
        """Enqueue a sum over all members, in place."""
        return self._library.ncclAllReduce(address, address, count, _FLOAT32, _SUM, communicator, stream)

    def broadcast(self, address: int, size_bytes: int, root: int, communicator: Any, stream: int) -> int:
        """Enqueue a broadcast of bytes, in place."""
        return self._library.ncclBroadcast(address, address, size_bytes, _UINT8, root, communicator, stream)

    def abort(self, communicator: Any) -> int:
        """End what is under way and give the communicator up; it must not be used again."""
        return self._library.ncclCommAbort(communicator)

    def words(self, result: int, communicator: Any) -> str:
        """NCCL's own words for a result code."""
        text = self._library.ncclGetErrorString(result).decode(errors="replace")
        last = self._library.ncclGetLastError(communicator)
        more = last.decode(errors="replace").strip().split("\n")[-1] if last else ""
        return f"{text}: {more}" if more else text


class Work(Protocol):
    """Something enqueued."""

    def query(self) -> bool:
        """True when it is done."""
        ...


class Lane(Protocol):
    """Where a group's work is enqueued.

    Attributes:
        pointer: The CUDA stream, as NCCL wants it.
    """

    pointer: int

    @contextmanager
    def here(self) -> Generator[None]:
        """With its device as the current one."""
        ...

    def record(self) -> Work:
        """A mark behind what was enqueued so far."""
        ...


class CudaLane:
    """A stream of our own, so that a broadcast waits for nothing that a training step has enqueued."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.pointer: int = self._stream.cuda_stream

    @contextmanager
    def here(self) -> Generator[None]:
        """As ``Lane.here``."""
        with torch.cuda.device(self._device):
            yield

    def record(self) -> Work:
        """As ``Lane.record``."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A collective that was entered.

    Attributes:
        result: What NCCL said to it.
        data: What it works on, kept alive.
    """

    result: int
    data: torch.Tensor


class NcclGroup:
    """One member's end; the methods are those of ``comm.group.WorldGroup``.

    Thread rule: one thread at a time calls ``broadcast``; ``abort`` may come from any other.
    """

    def __init__(
        self,
        *,
        unique_id: bytes,
        name: str,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
        cancelled: threading.Event | None = None,
        library: NcclLibrary | None = None,
        lane: Lane | None = None,
    ) -> None:
        """Meet the others.  Returns when all are there and have summed one number.

        Args:
            unique_id: From ``NcclLibrary.unique_id``, the same for all members.
            name: For errors.
            rank: This member's rank.
            world_size: How many members there are.
            device: Where the tensors are.
            timeout_s: Deadline for meeting, in seconds.
            cancelled: Set by another thread to give the meeting up.
            library: NCCL; None loads it.
            lane: Where work is enqueued; None takes a stream of its own.

        Raises:
            ConfigError: There is no NCCL here.
            DeadlineExceeded: Somebody did not come in time.
            GroupFailed: NCCL failed, or the meeting was cancelled.
        """
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._library = library or NcclLibrary()
        self._lane = lane or CudaLane(device)
        self._lock = threading.Lock()  # an aborted communicator is freed memory: nobody may be inside NCCL with it then
        self._why = ""
        deadline = time.monotonic() + timeout_s
        with self._lane.here():
            result, self._communicator = self._library.init(unique_id, rank=rank, world_size=world_size)
        if not self._communicator:
            raise GroupFailed(f"group {name}: {self._library.words(result, None)}")

        def look() -> None:
            if cancelled is not None and cancelled.is_set():
                raise GroupFailed(f"group {name}: the meeting was cancelled")

        what = f"all {world_size} members to meet"
        try:
            self._settle(result, deadline, timeout_s, what, look)
            one = torch.ones(1, dtype=torch.float32, device=device)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # it is written on another stream than it is summed on
            started = self._start(
                lambda: self._library.sum_float32(one.data_ptr(), 1, self._communicator, self._lane.pointer), one
            )
            self._finish(started, deadline, timeout_s, what, look)
        except BaseException as error:
            self.abort(str(error))
            raise

    @property
    def alive(self) -> bool:
        """False after an abort."""
        return not self._why

    def start_broadcast(self, data: torch.Tensor) -> Started:
        """Enter the broadcast of flat uint8 ``data`` from rank 0; returns a handle for ``finish``.

        What ``data`` holds must be written already: the broadcast waits for no other stream.
        """
        address, size_bytes = data.data_ptr(), data.numel()
        return self._start(
            lambda: self._library.broadcast(address, size_bytes, 0, self._communicator, self._lane.pointer), data
        )

    def finish(self, work: Started, *, what: str, timeout_s: float, poll: Callable[[], None] | None = None) -> None:
        """Wait for a broadcast.  After it, ``data`` is complete on this rank.

        Raises:
            DeadlineExceeded: The deadline passed; the group is unusable now.
            GroupFailed: A peer died or the group was aborted.
        """
        self._finish(work, time.monotonic() + timeout_s, timeout_s, what, poll)

    def broadcast(self, data: torch.Tensor, *, what: str, timeout_s: float) -> None:
        """``start_broadcast`` and ``finish`` in one."""
        self.finish(self.start_broadcast(data), what=what, timeout_s=timeout_s)

    def abort(self, why: str) -> None:
        """Make every wait end now, here and at every other member.  Safe to call twice and from any thread."""
        with self._lock:
            if self._why:
                return
            self._why = why or "aborted"
            with self._lane.here():
                self._library.abort(self._communicator)

    def close(self) -> None:
        """Let go of the group; safe to call twice."""
        self.abort("closed")

    def _start(self, call: Callable[[], int], data: torch.Tensor) -> Started:
        with self._lock:
            self._check()
            with self._lane.here():
                return Started(result=call(), data=data)

    def _settle(
        self, result: int, deadline: float, timeout_s: float, what: str, poll: Callable[[], None] | None = None
    ) -> None:
        """Return when a call that goes on in the background is over: the others may have to come first."""
        looks = Looks()
        while result == _IN_PROGRESS:
            self._look(deadline, timeout_s, what, poll)
            looks.sleep()
            result = self._state()
        self._raise_for(result, what)

    def _finish(
        self, started: Started, deadline: float, timeout_s: float, what: str, poll: Callable[[], None] | None = None
    ) -> None:
        self._settle(started.result, deadline, timeout_s, what, poll)
        with self._lane.here():
            work = self._lane.record()  # only now is the kernel in the stream
        looks = Looks()
        while not work.query():
            self._look(deadline, timeout_s, what, poll)
            self._raise_for(self._state(), what)
            looks.sleep()
        self._raise_for(self._state(), what)

    def _look(self, deadline: float, timeout_s: float, what: str, poll: Callable[[], None] | None) -> None:
        if poll is not None:
            poll()
        if time.monotonic() > deadline:
            self.abort(f"waited {timeout_s:g} s for {what}")
            raise DeadlineExceeded(
                who=f"group {self.name}",
                waiting_for=what,
                timeout_s=timeout_s,
                hint="can every engine reach this host on NCCL's interface (NCCL_SOCKET_IFNAME), and do "
                "NCCL_CUMEM_ENABLE and NCCL_NVLS_ENABLE agree on both sides?",
            )

    def _state(self) -> int:
        with self._lock:
            self._check()
            return self._library.state(self._communicator)

    def _raise_for(self, result: int, what: str) -> None:
        if result in (_SUCCESS, _IN_PROGRESS):
            return
        with self._lock:
            self._check()
            words = self._library.words(result, self._communicator)
        self.abort(words)
        raise GroupFailed(
            f"group {self.name}: NCCL failed, waiting for {what}: {words}",
            hint="all members need the same NCCL version; NCCL_DEBUG=WARN says more",
        )

    def _check(self) -> None:
        if self._why:
            raise GroupFailed(f"group {self.name}: {self._why}")


def _load(path: str | None) -> Any:
    # By its soname, the loader gives the one that torch brought into this process.
    candidates = [path] if path else ["libnccl.so.2", *_in_wheels()]
    errors: list[str] = []
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate)
        except OSError as error:
            errors.append(str(error))
    raise ConfigError(
        f"no NCCL library: {errors[0]}", hint="a torch for CUDA brings one; or pip install nvidia-nccl-cu12 (or -cu13)"
    )


def _in_wheels() -> list[str]:
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [str(Path(folder) / "lib" / "libnccl.so.2") for folder in folders]
