"""An NCCL communicator without ``torch.distributed``, for engines whose rendezvous is an NCCL unique id.

Rank 0 makes an id of 128 bytes and the caller sends it to the others.  All initialise a communicator with it at the
same time.  Their first collective is an all-reduce of one float32, as in vLLM's communicator; a member that leaves it
out blocks all of them.

The binding is NVIDIA's package ``nccl4py`` (the extra ``weightcast[nccl]``), which uses the NCCL that torch has loaded.
The communicator is non-blocking, so the rendezvous has a deadline of ours too.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.cuda import nccl as torch_nccl

from weightcast.comm.update_group import GroupFailed
from weightcast.errors import ConfigError, DeadlineExceeded
from weightcast.runtime.deadline import Backoff
from weightcast.wire.nccl_settings import COMPARED, NcclSettings

if TYPE_CHECKING:
    from nccl.core import Communicator

log = logging.getLogger("weightcast.comm")

UNIQUE_ID_BYTES = 128

_SUCCESS = 0
_IN_PROGRESS = 7
_OLDEST = 22300  # NCCL 2.23: nccl4py initialises communicators with ncclCommInitRankScalable


def new_unique_id() -> bytes:
    """Returns a new id of ``UNIQUE_ID_BYTES``; this process listens for the others from now on.

    It raises ConfigError without the binding or an NCCL that it can use, and GroupFailed if NCCL cannot listen.
    """
    nccl, nccl_error = nccl_binding()
    try:
        return bytes(nccl.get_unique_id())
    except nccl_error as error:
        raise GroupFailed(f"NCCL made no unique id: {error}") from error


class CudaLane:
    """A separate CUDA stream, so that a broadcast waits for no work of a training step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.pointer: int = self._stream.cuda_stream

    @contextmanager
    def here(self) -> Generator[None]:
        """Makes the stream's device the current one."""
        with torch.cuda.device(self._device):
            yield

    def record(self) -> torch.cuda.Event:
        """Marks the end of the work enqueued so far."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event


class NcclGroup:
    """One member's end, with the methods of ``UpdateGroup``; any thread may call ``abort``, one at a time the rest."""

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
    ) -> None:
        """Meets the other members.  Returns when all are there and have summed one number.

        ``unique_id`` is from ``new_unique_id``.  The other arguments and the errors are those of ``UpdateGroup``.
        """
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._nccl, self._nccl_error = nccl_binding()
        self._lane = CudaLane(device)
        self._lock = threading.Lock()  # an abort frees the communicator: no other thread may be inside NCCL with it
        self._why = ""
        self._communicator: Communicator = self._nccl.Communicator()
        deadline = time.monotonic() + timeout_s

        def look() -> None:
            if cancelled is not None and cancelled.is_set():
                raise GroupFailed(f"group {name}: the rendezvous was cancelled")

        what = f"the rendezvous of all {world_size} members"
        given = self._nccl.UniqueId.from_bytes(unique_id)
        config = self._nccl.NCCLConfig(blocking=False)
        try:
            self._enter(lambda: self._communicator.initialize(world_size, rank, given, config), what)
            self._settle(deadline, timeout_s, what, look)
            one = torch.ones(1, dtype=torch.float32, device=device)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # NCCL reads it on another stream
            self._enter(lambda: self._communicator.allreduce(one, one, self._nccl.SUM, stream=self._lane.pointer), what)
            self._finish(deadline, timeout_s, what, look)
        except BaseException as error:
            self.abort(str(error))
            raise

    @property
    def alive(self) -> bool:
        """False after an abort."""
        return not self._why

    def start_broadcast(self, data: torch.Tensor) -> torch.Tensor:
        """As ``UpdateGroup.start_broadcast``; ``data`` must be written already, since no other stream is waited for."""
        what = f"a broadcast of {data.numel()} bytes"
        self._enter(lambda: self._communicator.broadcast(data, data, 0, stream=self._lane.pointer), what)
        return data

    def finish(
        self, work: torch.Tensor, *, what: str, timeout_s: float, poll: Callable[[], None] | None = None
    ) -> None:
        """As ``UpdateGroup.finish``; ``work`` is the data."""
        self._finish(time.monotonic() + timeout_s, timeout_s, what, poll)

    def broadcast(self, data: torch.Tensor, *, what: str, timeout_s: float) -> None:
        """Calls ``start_broadcast`` and ``finish``."""
        self.finish(self.start_broadcast(data), what=what, timeout_s=timeout_s)

    def abort(self, why: str) -> None:
        """Ends every wait now, here and at every other member.  Safe to call twice and from any thread."""
        with self._lock:
            if self._why:
                return
            self._why = why or "aborted"
            with self._lane.here():
                try:
                    self._communicator.abort()
                except self._nccl_error as error:
                    # The group is aborted all the same, and ``_why`` keeps the first reason.
                    log.warning("group %s: NCCL did not abort: %s", self.name, error)

    def close(self) -> None:
        """Releases the group; safe to call twice."""
        self.abort("closed")

    def _enter(self, call: Callable[[], None], what: str) -> None:
        """Calls NCCL, which may continue in the background; ``_settle`` waits for that."""
        try:
            with self._lock:
                self._check()
                with self._lane.here():
                    call()
        except self._nccl_error as error:
            self._fail(str(error), what, error)

    def _settle(self, deadline: float, timeout_s: float, what: str, poll: Callable[[], None] | None) -> None:
        """Waits until NCCL's last call is over, for which other members may have to come."""
        backoff = Backoff()
        while self._in_progress(what):
            self._check_limits(deadline, timeout_s, what, poll)
            backoff.sleep()

    def _finish(self, deadline: float, timeout_s: float, what: str, poll: Callable[[], None] | None) -> None:
        self._settle(deadline, timeout_s, what, poll)
        with self._lane.here():
            work = self._lane.record()  # the kernel is in the stream only now
        backoff = Backoff()
        while not work.query():
            self._check_limits(deadline, timeout_s, what, poll)
            self._in_progress(what)
            backoff.sleep()
        self._in_progress(what)

    def _check_limits(self, deadline: float, timeout_s: float, what: str, poll: Callable[[], None] | None) -> None:
        if poll is not None:
            poll()
        if time.monotonic() > deadline:
            self.abort(f"waited {timeout_s:g} s for {what}")
            raise DeadlineExceeded(
                who=f"group {self.name}",
                waiting_for=what,
                timeout_s=timeout_s,
                hint="check that every engine can reach this host on NCCL's interface (NCCL_SOCKET_IFNAME), and that "
                "NCCL_CUMEM_ENABLE and NCCL_NVLS_ENABLE agree on both sides",
            )

    def _in_progress(self, what: str) -> bool:
        """Returns whether NCCL's last call is still under way; raises if it failed."""
        try:
            with self._lock:
                self._check()
                result = self._communicator.get_async_error()
                if result in (_SUCCESS, _IN_PROGRESS):
                    return result == _IN_PROGRESS
                last = self._communicator.get_last_error().strip().split("\n")[-1]
        except self._nccl_error as error:
            self._fail(str(error), what, error)
        words = self._nccl.get_error_string(result)
        self._fail(f"{words}: {last}" if last else words, what)

    def _fail(self, words: str, what: str, error: Exception | None = None) -> NoReturn:
        self.abort(words)
        raise GroupFailed(
            f"group {self.name}: NCCL failed while it waited for {what}: {words}",
            hint="use the same NCCL version on all members; NCCL_DEBUG=WARN logs more",
        ) from error

    def _check(self) -> None:
        if self._why:
            raise GroupFailed(f"group {self.name}: {self._why}")


def settings_here(device: torch.device) -> NcclSettings | None:
    """Returns NCCL's settings in this process; None for a device whose groups are not NCCL's."""
    if device.type != "cuda":
        return None
    variables = {name: os.environ[name][:200] for name in COMPARED if name in os.environ}
    return NcclSettings(version=_loaded_version(), variables=variables)


def _loaded_version() -> str:
    """Version of the library that torch has loaded, which may be newer than the one that it was built with."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # torch contains it
        return ".".join(map(str, torch_nccl.version()))
    return f"{number.value // 10_000}.{number.value // 100 % 100}.{number.value % 100}"


def nccl_binding() -> tuple[Any, type[Exception]]:
    """Imports ``nccl4py``, which takes over a second; returns its API, and the class of its errors for result codes.

    It raises ConfigError if a package is not installed, or NCCL is missing or too old.
    """
    try:
        import nccl.core
        from nccl.bindings.nccl import NCCLError, get_version
    except ImportError as error:
        raise ConfigError(
            f"the NCCL binding nccl4py cannot be imported: {error}",
            hint="pip install 'weightcast[nccl]', and cuda-bindings for torch's version of CUDA if torch has brought "
            "none",
        ) from error
    try:
        version = get_version()
    except RuntimeError as error:  # of the package's loader
        raise ConfigError(
            f"the NCCL library was not found: {error}",
            hint="install a torch for CUDA, which brings one, or pip install nvidia-nccl-cu12 (or -cu13)",
        ) from error
    if version < _OLDEST:
        raise ConfigError(
            f"NCCL {version} is too old for nccl4py", hint="install NCCL 2.23 or newer; torch 2.7 brings it"
        )
    return nccl.core, NCCLError
