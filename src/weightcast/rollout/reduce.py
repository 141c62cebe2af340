"""Adding up the partial results of the tensor-parallel ranks.

Every rank calls `Reduce` with a partial tensor of the same shape and gets the sum in place.  This
module joins the ranks of one engine and does the sum; what the tensors mean is the model's business.

On one x86 host the ranks meet in shared memory: a decode step makes two small reductions per layer,
and a collective over sockets costs more than the matmuls around it as soon as ranks outnumber cores.
Elsewhere a gloo group does it, and nccl on GPUs.  The rule is chosen by all ranks together, so no
rank can wait in one mechanism while its peers wait in the other.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weightcast.errors import DeadlineExceeded, EngineFailure

Reduce = Callable[[torch.Tensor], None]

_dist: Any = dist  # its stores and backends are annotated for builds that have them all

_CHUNK_BYTES = 1 << 20
_FLAG_BYTES = 64  # one cache line per rank: a flag that shares its line is a flag that is fought over
_SPINS = 500  # polls that give the core away, before the wait starts to sleep
_NAP_S = 50e-6


def no_group(tensor: torch.Tensor) -> None:
    """The sum of a model part that has no peers to ask."""
    raise EngineFailure(
        f"a sum of {tuple(tensor.shape)} over ranks that never met: the model was built without a group"
    )


class GroupReduce:
    """The sum through a process group: nccl, or gloo where ranks do not share memory."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __call__(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` with the sum over all ranks."""
        self._group.allreduce([tensor]).wait()

    def interrupt(self, reason: str) -> None:
        """Make a reduction under way fail."""
        del reason
        with contextlib.suppress(RuntimeError):  # a group already broken refuses to be aborted; that is the same
            self._group.abort()

    def close(self) -> None:
        """Leave the group."""
        self.interrupt("closed")


class SharedMemoryReduce:
    """The sum through a memory segment that all ranks have mapped.

    Each rank owns a counter and two slots.  In round n it writes slot ``n % 2``, sets its counter to
    n and waits for the others' counters.  A slot is written again in round n + 2, and a rank gets
    there only after every rank has finished round n: one wait per round is enough.

    Counters are aligned 8-byte words; the protocol relies on x86 keeping stores in order.
    """

    def __init__(self, segment: mmap.mmap, *, rank: int, size: int, timeout_s: float) -> None:
        data = torch.frombuffer(segment, dtype=torch.uint8)
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._flags = memoryview(segment)[: size * _FLAG_BYTES].cast("q")[:: _FLAG_BYTES // 8]
        self._slots = data[size * _FLAG_BYTES :].view(2, size, _CHUNK_BYTES)
        self._round = 0
        self._broken: str | None = None

    @staticmethod
    def segment_bytes(size: int) -> int:
        """Bytes of the segment that `size` ranks share."""
        return size * (_FLAG_BYTES + 2 * _CHUNK_BYTES)

    def __call__(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` (contiguous) with the sum over all ranks, the same bits on each."""
        flat = tensor.view(-1)
        step = _CHUNK_BYTES // flat.element_size()
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            self._round += 1
            slots = self._slots[self._round % 2].view(flat.dtype)[:, : part.numel()]
            slots[self._rank].copy_(part)
            self._flags[self._rank] = self._round
            self._wait()
            torch.sum(slots, dim=0, out=part)

    def _wait(self) -> None:
        spins = 0
        deadline = 0.0
        for peer in range(self._size):
            while self._flags[peer] < self._round:
                spins += 1
                if spins < _SPINS:
                    os.sched_yield()
                    continue
                if self._broken is not None:
                    raise EngineFailure(f"rank {self._rank}: reduction interrupted: {self._broken}")
                deadline = deadline or time.monotonic() + self._timeout_s
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        who=f"engine rank {peer}", waiting_for="a tensor-parallel sum", timeout_s=self._timeout_s
                    )
                time.sleep(_NAP_S)

    def interrupt(self, reason: str) -> None:
        """Make a reduction under way fail."""
        self._broken = reason

    def close(self) -> None:
        """Fail whoever still waits; the segment goes with the last rank."""
        self._broken = "closed"


def connect(rendezvous: str, *, rank: int, timeout_s: float) -> Any:
    """The store where the ranks of this engine meet.

    Args:
        rendezvous: ``host:port`` of a TCP store that is already running.
        rank: This rank, for the error.
        timeout_s: Limit of each operation.

    Raises:
        EngineFailure: Nothing answers there.
    """
    host, _, port = rendezvous.rpartition(":")
    try:
        tcp = _dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:  # torch.distributed raises subclasses of RuntimeError
        raise EngineFailure(f"engine rank {rank}: nothing to meet at {rendezvous}: {error}", ranks=[rank]) from error
    return _dist.PrefixStore("weightcast-tp", tcp)


def exchange(store: Any, key: str, value: str, *, rank: int, size: int) -> list[str]:
    """Every rank's value, in rank order.

    Raises:
        EngineFailure: A rank did not come.
    """
    try:
        store.set(f"{key} {rank}", value)
        return [store.get(f"{key} {peer}").decode() for peer in range(size)]
    except RuntimeError as error:
        raise EngineFailure(f"engine rank {rank}: waiting for {key} of {size} ranks: {error}", ranks=[rank]) from error


def join(
    store: Any, *, rank: int, size: int, device: torch.device, timeout_s: float
) -> GroupReduce | SharedMemoryReduce:
    """Agree with the other ranks on a way to add up.

    Args:
        store: From `connect`.
        rank: This rank.
        size: Number of ranks, more than one.
        device: Where the tensors live that will be summed.
        timeout_s: Limit of every sum.

    Raises:
        EngineFailure: The ranks did not meet in time.
    """
    try:
        if device.type == "cuda":
            return GroupReduce(_nccl(store, rank=rank, size=size))
        segment = _share_memory(store, rank=rank, size=size)
        if segment is not None:
            return SharedMemoryReduce(segment, rank=rank, size=size, timeout_s=timeout_s)
        return GroupReduce(_gloo(store, rank=rank, size=size, timeout_s=timeout_s))
    except RuntimeError as error:
        raise EngineFailure(f"engine rank {rank} could not meet the other {size - 1}: {error}", ranks=[rank]) from error


def _nccl(store: Any, *, rank: int, size: int) -> Any:
    options = _dist.ProcessGroupNCCL.Options()
    # When its own timeout passes, NCCL's watchdog ends the process without a word.  A lost rank is seen by
    # the executor; `interrupt` frees the others.
    options._timeout = timedelta(days=1)
    return _dist.ProcessGroupNCCL(_dist.PrefixStore("nccl", store), rank, size, options)


def _gloo(store: Any, *, rank: int, size: int, timeout_s: float) -> Any:
    return _dist.ProcessGroupGloo(_dist.PrefixStore("gloo", store), rank, size, timedelta(seconds=timeout_s))


def _share_memory(store: Any, *, rank: int, size: int) -> mmap.mmap | None:
    """One segment mapped by all ranks, or None on every rank if any of them could not map it."""
    num_bytes = SharedMemoryReduce.segment_bytes(size)
    host = f"{platform.machine()} {_boot_id()}"
    segment: mmap.mmap | None = None
    path = Path()
    if rank == 0:
        if platform.machine() in ("x86_64", "AMD64") and os.access("/dev/shm", os.W_OK):
            handle, name = tempfile.mkstemp(prefix=f"weightcast-tp-{os.getpid()}-", dir="/dev/shm")
            path = Path(name)
            os.ftruncate(handle, num_bytes)
            segment = mmap.mmap(handle, num_bytes)
            os.close(handle)
        store.set("segment", f"{host}\n{path}")
    else:
        theirs, _, name = store.get("segment").decode().partition("\n")
        if theirs == host and name != ".":
            with contextlib.suppress(OSError):  # same kernel, other container: the segment is not there
                handle = os.open(name, os.O_RDWR)
                segment = mmap.mmap(handle, num_bytes)
                os.close(handle)
    answers = exchange(store, "mapped", "yes" if segment is not None else "no", rank=rank, size=size)
    if rank == 0 and segment is not None:
        path.unlink()  # the mappings keep it alive; a killed engine leaves nothing behind
    return segment if set(answers) == {"yes"} else None


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()
