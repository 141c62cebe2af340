"""Sums the partial results of the tensor-parallel ranks of one engine, in place.

On one x86 host the ranks use shared memory: a decode step makes two small reductions per layer, and with gloo's sockets
it makes half as many tokens, or fewer.  GPUs use nccl, and everything else gloo.
All ranks choose the mechanism together, so that no rank waits in one while its peers wait in another.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weightcast.errors import DeadlineExceeded, EngineFailure

Reduce = Callable[[torch.Tensor], None]

_dist: Any = dist  # its annotations of stores and backends fit only builds that have all of them

_CHUNK_BYTES = 1 << 20
_FLAG_BYTES = 64  # one cache line per rank, against false sharing
_SPINS = 500  # polls that yield the core, before the wait starts to sleep
_NAP_S = 50e-6


def no_group(tensor: torch.Tensor) -> None:
    """Fails: this part of a model was built without its peers."""
    raise EngineFailure(f"cannot sum {tuple(tensor.shape)} over ranks: the model was built without a group")


class GroupReduce:
    """Sums through a process group: nccl, or gloo where ranks do not share memory."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __call__(self, tensor: torch.Tensor) -> None:
        """Replaces `tensor` with the sum over all ranks."""
        self._group.allreduce([tensor]).wait()

    def close(self) -> None:
        """Leaves the group; a sum under way fails."""
        with contextlib.suppress(RuntimeError):  # a broken group cannot be aborted again
            self._group.abort()


class SharedMemoryReduce:
    """Sums through a memory segment that all ranks have mapped.

    Each rank owns a counter and two slots.  In round n it writes slot ``n % 2``, sets its counter to n and waits for
    the others' counters.  It writes the slot again in round n + 2, which starts only after every rank has finished
    round n, so one wait per round is enough.  Counters are aligned 8-byte words; the protocol relies on x86 keeping
    stores in order.
    """

    def __init__(self, segment: mmap.mmap, *, rank: int, size: int, timeout_s: float) -> None:
        data = torch.frombuffer(segment, dtype=torch.uint8)
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._flags = memoryview(segment)[: size * _FLAG_BYTES].cast("q")[:: _FLAG_BYTES // 8]
        self._slots = data[size * _FLAG_BYTES :].view(2, size, _CHUNK_BYTES)
        self._round = 0
        self._closed = False

    @staticmethod
    def segment_bytes(size: int) -> int:
        """Size of the segment that `size` ranks share, in bytes."""
        return size * (_FLAG_BYTES + 2 * _CHUNK_BYTES)

    def __call__(self, tensor: torch.Tensor) -> None:
        """Replaces `tensor` (contiguous) with the sum over all ranks, the same bits on each."""
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
                if self._closed:
                    raise EngineFailure(f"rank {self._rank} closed during a tensor-parallel sum")
                deadline = deadline or time.monotonic() + self._timeout_s
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        who=f"engine rank {peer}", waiting_for="a tensor-parallel sum", timeout_s=self._timeout_s
                    )
                time.sleep(_NAP_S)

    def close(self) -> None:
        """Makes a sum under way fail; the segment is freed with the last rank."""
        self._closed = True


def connect(rendezvous: str, *, rank: int, timeout_s: float) -> Any:
    """Connects to a TCP store at ``host:port``; ``timeout_s`` limits each operation.  ``EngineFailure`` without it."""
    host, _, port = rendezvous.rpartition(":")
    try:
        tcp = _dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:  # torch.distributed raises subclasses of RuntimeError
        raise EngineFailure(
            f"engine rank {rank} cannot reach the rendezvous at {rendezvous}: {error}", ranks=[rank]
        ) from error
    return _dist.PrefixStore("weightcast-tp", tcp)


def exchange(store: Any, key: str, value: str, *, rank: int, size: int) -> list[str]:
    """Exchanges a value between all ranks, and returns them in rank order; ``EngineFailure`` if one is not in time."""
    try:
        store.set(f"{key} {rank}", value)
        return [store.get(f"{key} {peer}").decode() for peer in range(size)]
    except RuntimeError as error:
        raise EngineFailure(
            f"engine rank {rank} did not get the {key} value of all {size} ranks: {error}", ranks=[rank]
        ) from error


def join(
    store: Any, *, rank: int, size: int, device: torch.device, timeout_s: float
) -> GroupReduce | SharedMemoryReduce:
    """Agrees with the other ranks, at least one, on a mechanism for sums; ``timeout_s`` is the deadline of each sum.

    Raises:
        EngineFailure: The rendezvous did not complete in time.
    """
    try:
        if device.type == "cuda":
            return GroupReduce(_nccl(store, rank=rank, size=size))
        segment = _share_memory(store, rank=rank, size=size)
        if segment is not None:
            return SharedMemoryReduce(segment, rank=rank, size=size, timeout_s=timeout_s)
        gloo = _dist.PrefixStore("gloo", store)
        return GroupReduce(_dist.ProcessGroupGloo(gloo, rank, size, timedelta(seconds=timeout_s)))
    except RuntimeError as error:
        raise EngineFailure(
            f"engine rank {rank}: the rendezvous with the other {size - 1} ranks failed: {error}", ranks=[rank]
        ) from error


def _nccl(store: Any, *, rank: int, size: int) -> Any:
    options = _dist.ProcessGroupNCCL.Options()
    # When its own timeout passes, NCCL's watchdog ends the process silently.  The executor notices a lost rank
    # instead, and `close` frees the others.
    options._timeout = timedelta(days=1)
    return _dist.ProcessGroupNCCL(_dist.PrefixStore("nccl", store), rank, size, options)


def _share_memory(store: Any, *, rank: int, size: int) -> mmap.mmap | None:
    """Maps one segment on all ranks; None on every rank if any of them cannot map it."""
    num_bytes = SharedMemoryReduce.segment_bytes(size)
    segment: mmap.mmap | None = None
    with contextlib.ExitStack() as stack:  # the mappings keep the memory
        if rank == 0:
            name = f"weightcast-tp-{secrets.token_hex(8)}"
            file = os.memfd_create(name)
            stack.callback(os.close, file)
            os.ftruncate(file, num_bytes)
            if platform.machine() in ("x86_64", "AMD64"):
                segment = mmap.mmap(file, num_bytes)
            store.set("segment", f"{name} /proc/{os.getpid()}/fd/{file}")
        else:
            name, path = store.get("segment").decode().split()
            with contextlib.suppress(OSError):
                # On another host, or in another container, the path may be another process's.
                if os.readlink(path).startswith(f"/memfd:{name}"):
                    file = os.open(path, os.O_RDWR)
                    stack.callback(os.close, file)
                    segment = mmap.mmap(file, num_bytes)
        answers = exchange(store, "mapped", "yes" if segment is not None else "no", rank=rank, size=size)
    return segment if set(answers) == {"yes"} else None
