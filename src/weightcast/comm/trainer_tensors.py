"""Tensors from trainer rank to trainer rank, over NCCL where each rank has a GPU of its own, else over gloo."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from weightcast.comm.group_moves import NUM_TAGS, Move, Tags, hang_up
from weightcast.comm.trainer_failure import FailureState
from weightcast.errors import TrainerRankFailed
from weightcast.runtime import blocking_threads

_MAX_ABORT_S = 10.0


class GlooPeers:
    """The other ranks of a gloo group."""

    def __init__(self, group: dist.ProcessGroup, failure: FailureState) -> None:
        self._group = group
        self._failure = failure

    def send(self, tensor: torch.Tensor, peer: int, tag: int, what: str) -> dist.Work:
        """Starts to send a host tensor.  Both ends use the same tag, which is taken modulo ``NUM_TAGS``."""
        return self._post(self._group.send, tensor, peer, tag, what)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int, what: str) -> dist.Work:
        """Starts to receive into a host tensor."""
        return self._post(self._group.recv, tensor, peer, tag, what)

    def wait(self, peer: int, work: dist.Work, what: str, deadline: float) -> None:
        """Waits for work with one rank until ``deadline``, by ``time.monotonic``; else raises TrainerRankFailed."""
        try:
            # 0 would mean "no limit" to torch.
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError:
            self._failure.fail([peer], what, timed_out=time.monotonic() >= deadline)

    def hang_up(self) -> None:
        """Ends every wait of this process and of its peers in the group."""
        hang_up(self._group)

    def close(self) -> None:
        """Destroys the group."""
        destroy_group(self._group)

    def _post(
        self,
        operation: Callable[[list[torch.Tensor], int, int], dist.Work | None],
        tensor: torch.Tensor,
        peer: int,
        tag: int,
        what: str,
    ) -> dist.Work:
        try:
            work = operation([tensor], peer, tag % NUM_TAGS)
        except RuntimeError:  # the connection is closed already
            self._failure.fail([peer], what)
        assert work is not None
        return work


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroys a process group, unless the trainer has done so already."""
    if dist.is_initialized():
        with suppress(ValueError):
            dist.destroy_process_group(group)


class GlooTensors(GlooPeers):
    """Tensors over gloo; those of a GPU pass through host memory."""

    def __init__(self, group: dist.ProcessGroup, failure: FailureState) -> None:
        super().__init__(group, failure)
        self._tags = Tags()

    def move(self, sends: Sequence[Move], receives: Sequence[Move], *, what: str) -> None:
        """Implements ``TrainerGroup.move``."""
        deadline = time.monotonic() + self._failure.timeout_s
        bounced: list[tuple[torch.Tensor, torch.Tensor]] = []
        works: list[tuple[int, dist.Work]] = []
        for move in receives:
            raw = _raw(move.data)
            if raw.is_cuda:
                bounced.append((raw, torch.empty(raw.shape, dtype=torch.uint8)))
                raw = bounced[-1][1]
            works.append((move.peer, self.receive(raw, move.peer, self._tags.of_receive(move.peer), what)))
        for move in sends:
            raw = _raw(move.data).cpu()
            works.append((move.peer, self.send(raw, move.peer, self._tags.of_send(move.peer), what)))
        for peer, work in works:
            self.wait(peer, work, what, deadline)
        for target, raw in bounced:
            target.copy_(raw)


class NcclTensors:
    """Tensors over NCCL, on the current stream."""

    def __init__(
        self, group: dist.ProcessGroup, *, failure: FailureState, device: torch.device, rank: int, world_size: int
    ) -> None:
        self._group: dist.ProcessGroup | None = group
        self._failure = failure
        self._device = device
        self._rank = rank
        self._world_size = world_size
        self._launch: _NcclCall | None = None

    def connect(self) -> None:
        """Runs a first collective: the first operation of an NCCL group must be one that every rank takes part in."""
        group, ones = self._open_group(), [torch.ones(1, device=self._device)]
        self._run(lambda: [group.allreduce(ones)], "NCCL to connect")

    def move(self, sends: Sequence[Move], receives: Sequence[Move], *, what: str) -> None:
        """Implements ``TrainerGroup.move``."""
        group = self._open_group()
        batch = [dist.P2POp(dist.isend, _raw(move.data), move.peer, group) for move in sends]
        batch += [dist.P2POp(dist.irecv, _raw(move.data), move.peer, group) for move in receives]
        self._run(lambda: dist.batch_isend_irecv(batch), what)

    def all_gather(self, tensors: Sequence[torch.Tensor], *, what: str) -> None:
        """Implements ``TrainerGroup.all_gather``."""
        group = self._open_group()
        wholes = [_raw(tensor) for tensor in tensors]
        parts = [whole.chunk(self._world_size)[self._rank] for whole in wholes]
        self._run(lambda: [group.allgather_into_tensor_coalesced(wholes, parts)], what)

    def hang_up(self) -> None:
        """Aborts the NCCL communicator, which ends every wait of this process and of its peers."""
        group, self._group = self._group, None
        if group is None:
            return
        abort = partial(_abort_nccl, group)
        # An abort frees the communicator.  If a thread is still connecting inside NCCL, that corrupts the heap (seen
        # with NCCL 2.28).  Nothing is on the device yet, so that thread aborts when it comes out.
        if self._launch is None or not self._launch.afterwards(abort):
            # The abort waits for NCCL's own threads, and they may wait for the rank that is lost.
            blocking_threads.start(abort, name="weightcast-abort").join(_MAX_ABORT_S)

    def close(self) -> None:
        """Destroys the group, unless an abort has taken it."""
        group, self._group = self._group, None
        if group is not None:
            destroy_group(group)

    def _open_group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise TrainerRankFailed("this group of trainer ranks is closed")
        return self._group

    def _run(self, launch: Callable[[], Sequence[dist.Work]], what: str) -> None:
        """Launches NCCL operations on the current stream and waits until they are complete.

        NCCL has no deadline of its own, on the device or on the host, where the first message between two ranks waits
        for both to connect.  So a thread launches, and may be left behind.
        """
        deadline = time.monotonic() + self._failure.timeout_s
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        stream = torch.cuda.current_stream(self._device)
        done = torch.cuda.Event()

        def work() -> None:
            with torch.cuda.stream(stream):
                for one in launch():
                    one.wait()  # the stream waits, the host does not
                done.record(stream)

        at_work = self._launch = _NcclCall(work)
        while not (at_work.launched and done.query()):
            self._failure.check()  # another thread may have aborted the group
            if time.monotonic() > deadline:
                self._failure.fail(others, what, timed_out=True)
            if at_work.error is not None:
                self._failure.fail(others, f"{what} ({at_work.error})")
            time.sleep(0.00005)
        self._launch = None  # it holds the buffers


class _NcclCall:
    """Runs a function on a thread that may be left behind, and keeps its error."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._guard = threading.Lock()
        self._inside = True
        self._after: Callable[[], None] | None = None
        self.launched = False
        self.error: RuntimeError | None = None
        blocking_threads.start(self._run, name="weightcast-nccl")

    def afterwards(self, act: Callable[[], None]) -> bool:
        """Lets the thread call ``act`` after the function; returns False if the function is over already."""
        with self._guard:
            if self._inside:
                self._after = act
            return self._inside

    def _run(self) -> None:
        try:
            self._work()
            self.launched = True
        except RuntimeError as error:  # the class of torch's own errors
            self.error = error
        finally:
            with self._guard:
                self._inside = False
            if self._after is not None:
                self._after()


def _abort_nccl(group: dist.ProcessGroup) -> None:
    with suppress(ValueError):  # the trainer has destroyed it
        # Frees the device of a collective that will never complete; torch has no public name for it.
        dist.distributed_c10d._abort_process_group(group)  # pyright: ignore[reportPrivateUsage]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Views a contiguous tensor as bytes.  Backends differ in the dtypes they know, but all know bytes."""
    return tensor.view(-1).view(torch.uint8)
