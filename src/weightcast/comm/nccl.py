"""NCCL by itself: a group for engines that meet by a unique id, not through a store of torch's.

Whoever is rank 0 makes an id of 128 bytes and tells it to the others; all initialise a communicator with it at the same
time, and the first thing that they do together is to sum one float32.  vLLM's communicator does it so; a member that
leaves the sum out blocks all of them.

The binding is NVIDIA's own, the package ``nccl4py`` (the extra ``weightcast[nccl]``), of which the public ``nccl.core``
is used, and which takes the NCCL that torch has loaded already.  The communicator is a non-blocking one, so that
meeting, too, has a deadline of ours.  Which engine is at the other end, and how it hears of the id, is not known here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from weightcast.comm.group import GroupFailed
from weightcast.comm.polling import Looks
from weightcast.errors import ConfigError, DeadlineExceeded

if TYPE_CHECKING:
    from nccl.core import Communicator

log = logging.getLogger("weightcast.comm")

UNIQUE_ID_BYTES = 128

_SUCCESS = 0
_IN_PROGRESS = 7
_OLDEST = 22300  # NCCL 2.23: nccl4py initialises communicators with ncclCommInitRankScalable


def new_unique_id() -> bytes:
    """A new id, of ``UNIQUE_ID_BYTES``; this process listens for the others from now on.

    Raises:
        ConfigError: There is no binding here, or no NCCL that it can use.
        GroupFailed: NCCL finds no way to listen.
    """
    nccl, nccl_error = nccl_binding()
    try:
        return bytes(nccl.get_unique_id())
    except nccl_error as error:
        raise GroupFailed(f"no NCCL id: {error}") from error


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
        lane: Lane | None = None,
    ) -> None:
        """Meet the others.  Returns when all are there and have summed one number.

        Args:
            unique_id: From ``new_unique_id``, the same for all members.
            name: For errors.
            rank: This member's rank.
            world_size: How many members there are.
            device: Where the tensors are.
            timeout_s: Deadline for meeting, in seconds.
            cancelled: Set by another thread to give the meeting up.
            lane: Where work is enqueued; None takes a stream of its own.

        Raises:
            ConfigError: As ``new_unique_id``.
            DeadlineExceeded: Somebody did not come in time.
            GroupFailed: NCCL failed, or the meeting was cancelled.
        """
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._nccl, self._nccl_error = nccl_binding()
        self._lane = lane or CudaLane(device)
        self._lock = threading.Lock()  # an aborted communicator is freed memory: nobody may be inside NCCL with it then
        self._why = ""
        self._communicator: Communicator = self._nccl.Communicator()
        deadline = time.monotonic() + timeout_s

        def look() -> None:
            if cancelled is not None and cancelled.is_set():
                raise GroupFailed(f"group {name}: the meeting was cancelled")

        what = f"all {world_size} members to meet"
        given = self._nccl.UniqueId.from_bytes(unique_id)
        config = self._nccl.NCCLConfig(blocking=False)
        try:
            self._enter(lambda: self._communicator.initialize(world_size, rank, given, config), what)
            self._settle(deadline, timeout_s, what, look)
            one = torch.ones(1, dtype=torch.float32, device=device)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # it is written on another stream than it is summed on
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
        """Enter the broadcast of flat uint8 ``data`` from rank 0; returns the handle for ``finish``.

        What ``data`` holds must be written already: the broadcast waits for no other stream.

        Raises:
            GroupFailed: NCCL did not take it, or the group was aborted.
        """
        what = f"a broadcast of {data.numel()} bytes"
        self._enter(lambda: self._communicator.broadcast(data, data, 0, stream=self._lane.pointer), what)
        return data

    def finish(
        self, work: torch.Tensor, *, what: str, timeout_s: float, poll: Callable[[], None] | None = None
    ) -> None:
        """Wait for a broadcast.  After it, ``work``, which is its data, is complete on this rank.

        Raises:
            DeadlineExceeded: The deadline passed; the group is unusable now.
            GroupFailed: A peer died or the group was aborted.
        """
        self._finish(time.monotonic() + timeout_s, timeout_s, what, poll)

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
                try:
                    self._communicator.abort()
                except self._nccl_error as error:
                    # It is given up all the same: the reason that is kept is the one that led here.
                    log.warning("group %s: NCCL did not abort: %s", self.name, error)

    def close(self) -> None:
        """Let go of the group; safe to call twice."""
        self.abort("closed")

    def _enter(self, call: Callable[[], None], what: str) -> None:
        """Call NCCL; what it says later is for ``_settle``."""
        try:
            with self._lock:
                self._check()
                with self._lane.here():
                    call()
        except self._nccl_error as error:
            self._fail(str(error), what, error)

    def _settle(self, deadline: float, timeout_s: float, what: str, poll: Callable[[], None] | None) -> None:
        """Return when a call that goes on in the background is over: the others may have to come first."""
        looks = Looks()
        while self._in_progress(what):
            self._look(deadline, timeout_s, what, poll)
            looks.sleep()

    def _finish(self, deadline: float, timeout_s: float, what: str, poll: Callable[[], None] | None) -> None:
        self._settle(deadline, timeout_s, what, poll)
        with self._lane.here():
            work = self._lane.record()  # only now is the kernel in the stream
        looks = Looks()
        while not work.query():
            self._look(deadline, timeout_s, what, poll)
            self._in_progress(what)
            looks.sleep()
        self._in_progress(what)

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

    def _in_progress(self, what: str) -> bool:
        """Whether NCCL is still at the last call; raises if it failed."""
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
            f"group {self.name}: NCCL failed, waiting for {what}: {words}",
            hint="all members need the same NCCL version; NCCL_DEBUG=WARN says more",
        ) from error

    def _check(self) -> None:
        if self._why:
            raise GroupFailed(f"group {self.name}: {self._why}")


def nccl_binding() -> tuple[Any, type[Exception]]:
    """The public API of ``nccl4py``, and what it raises for a result code of NCCL's.

    It takes more than a second to import, so only those who need it do.

    Raises:
        ConfigError: It is not installed, or what it needs is not, or NCCL is missing or too old.
    """
    try:
        import nccl.core
        from nccl.bindings.nccl import NCCLError, get_version
    except ImportError as error:
        raise ConfigError(
            f"the NCCL binding nccl4py cannot be used: {error}",
            hint="pip install 'weightcast[nccl]'; and cuda-bindings of the CUDA that torch was built for, "
            "if torch brought none",
        ) from error
    try:
        version = get_version()
    except RuntimeError as error:  # of the package's loader
        raise ConfigError(
            f"no NCCL library: {error}",
            hint="a torch for CUDA brings one; or pip install nvidia-nccl-cu12 (or -cu13)",
        ) from error
    if version < _OLDEST:
        raise ConfigError(f"NCCL {version} is too old for nccl4py", hint="2.23 or newer, as torch 2.7 has it")
    return nccl.core, NCCLError
