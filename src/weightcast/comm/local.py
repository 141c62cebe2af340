"""The trainer ranks among themselves: small messages, tensors from rank to rank, and who failed.

The groups are our own, so that giving them up leaves the trainer's groups alone.  Every message goes from one
rank to one rank, because only then does a deadline know whose silence it was.  Knows bytes and ranks; it does
not know what a weight, a bucket or an engine is.

Small messages (``broadcast_bytes``, ``gather_bytes``, ``barrier``, ...) and tensors (``move``, ``all_gather``)
travel in groups of their own, so one thread may use the first while another uses the second.  Within each of
the two, one thread at a time, and the same calls in the same order on every rank.

After any failure the group is of no further use: every later call raises ``TrainerRankFailed`` at once, on
every rank.  Close it and connect a new one.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NoReturn

import msgspec
import torch
import torch.distributed as dist

from weightcast.comm import left_behind
from weightcast.comm.rollcall import RollCall, Verdict, meet
from weightcast.errors import ConfigError, TrainerRankFailed

_MAX_MESSAGE_BYTES = 1 << 30
_TAGS = 1 << 30
# How long to look for the culprit after a wait has failed: ranks enter a step at different times, so their
# deadlines pass at different times too.
_MAX_PATIENCE_S = 3.0
_MAX_ABORT_S = 10.0


@dataclass(frozen=True, slots=True)
class Move:
    """One message of a batch.

    Attributes:
        peer: The other rank.
        tensor: Contiguous, not empty, any dtype and shape, on the group's device.
    """

    peer: int
    tensor: torch.Tensor


class TrainerGroup:
    """All ranks of the training job, or this process alone.  Made by ``TrainerGroup.connect``.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
        device: Where this rank's tensors live.
        timeout_s: Deadline of every call, in seconds.
    """

    def __init__(self, *, device: torch.device, timeout_s: float, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.timeout_s = timeout_s
        self._receivers: tuple[int, ...] = (0,)
        self._control: dist.ProcessGroup | None = None
        self._data: dist.ProcessGroup | None = None
        self._launch: _Launch | None = None
        self._nccl = False
        self._rollcall: RollCall | None = None
        self._failure: str | None = None
        self._closed = False
        self._steps = 0
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    @classmethod
    def connect(cls, device: torch.device, *, timeout_s: float) -> TrainerGroup:
        """Meet the other trainer ranks.  Collective over all ranks of ``torch.distributed``, if it is initialised.

        Args:
            device: Where this rank's tensors live.
            timeout_s: Deadline of this and of every later call, in seconds.

        Raises:
            TrainerRankFailed: A rank did not come; the message names it.
        """
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(device=device, timeout_s=timeout_s)
        group = cls(device=device, timeout_s=timeout_s, rank=dist.get_rank(), world_size=dist.get_world_size())
        # The store that every rank of the job shares already; torch has no public name for it.
        store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        prefix, missing = meet(store, rank=group.rank, world_size=group.world_size, timeout_s=timeout_s)
        if missing:
            raise TrainerRankFailed(
                f"{_ranks(missing)} did not come to connect within {timeout_s:g} s",
                hint="connecting is collective: every trainer rank must take part",
            )
        group._rollcall = RollCall(store, prefix=prefix, rank=group.rank)
        group._control = _new_group("gloo", timedelta(seconds=timeout_s))
        devices = group.all_gather_bytes(_device_identity(device).encode())
        # NCCL wants a GPU for each rank.  Where ranks share one, tensors go through host memory.
        group._nccl = all(devices) and len(set(devices)) == len(devices)
        if group._nccl:
            group._data = _new_group("nccl", timedelta(days=1))
            # The first operation of an NCCL group must be one that every rank takes part in.
            data, ones = group._data, [torch.ones(1, device=device)]
            group._run_nccl(lambda: [data.allreduce(ones)], "NCCL to connect")
        else:
            group._data = _new_group("gloo", timedelta(seconds=timeout_s))
        return group

    @property
    def is_head(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @property
    def receivers(self) -> tuple[int, ...]:
        """The ranks that have a bucket, in order; ``(0,)`` unless set.  Must be the same on every rank."""
        return self._receivers

    @receivers.setter
    def receivers(self, ranks: Sequence[int]) -> None:
        chosen = tuple(sorted(set(ranks)))
        if not chosen or chosen[0] < 0 or chosen[-1] >= self.world_size:
            raise ConfigError(f"receivers {list(ranks)} are not ranks of a group of {self.world_size}")
        self._receivers = chosen

    @property
    def uses_nccl(self) -> bool:
        """True if tensors travel through NCCL, which ``all_gather`` needs."""
        return self._nccl

    # -- small messages

    def broadcast_bytes(self, payload: bytes | None, *, timeout_s: float | None = None) -> bytes:
        """The head's bytes on every rank.

        Args:
            payload: On the head what to say; ignored elsewhere.
            timeout_s: Deadline if not the group's own; ranks that wait for a head at work need more patience.

        Raises:
            TrainerRankFailed: A rank is gone or did not take part in time.
        """
        if not self.is_head:
            [message] = self._receive_bytes([0], "the head to say what is next", timeout_s or self.timeout_s)
            return message
        if payload is None:
            raise ValueError("the head has to say something")
        self._send_bytes(range(1, self.world_size), payload, "a message to be taken", timeout_s or self.timeout_s)
        return payload

    def gather_bytes(self, payload: bytes, *, timeout_s: float | None = None) -> list[bytes] | None:
        """Every rank's bytes, in order of rank, on the head; None elsewhere.

        Raises:
            TrainerRankFailed: A rank is gone or did not take part in time; the message names it.
        """
        limit_s = timeout_s or self.timeout_s
        if self.is_head:
            return [payload, *self._receive_bytes(range(1, self.world_size), "a message", limit_s)]
        self._send_bytes([0], payload, "a message to be taken", limit_s)
        return None

    def all_gather_bytes(self, payload: bytes, *, timeout_s: float | None = None) -> list[bytes]:
        """Every rank's bytes, in order of rank, on every rank.

        Raises:
            TrainerRankFailed: A rank is gone or did not take part in time.
        """
        parts = self.gather_bytes(payload, timeout_s=timeout_s)
        sizes = msgspec.json.encode([len(part) for part in parts]) if parts is not None else None
        ends = msgspec.json.decode(self.broadcast_bytes(sizes, timeout_s=timeout_s), type=list[int])
        joined = self.broadcast_bytes(b"".join(parts) if parts is not None else None, timeout_s=timeout_s)
        return [joined[start:end] for start, end in itertools.pairwise(itertools.accumulate(ends, initial=0))]

    def barrier(self, what: str, *, timeout_s: float | None = None) -> None:
        """Return when every rank is here.

        Args:
            what: Why, the same on every rank: ranks that meet for different reasons are an error.
            timeout_s: Deadline if not the group's own.

        Raises:
            TrainerRankFailed: A rank is gone, did not come in time, or came for something else.
        """
        said = self.gather_bytes(what.encode(), timeout_s=timeout_s)
        strays = [rank for rank, name in enumerate(said or ()) if name != what.encode()]
        if said is not None and strays:
            self.abort(f"{_ranks(strays)} came for {said[strays[0]].decode()!r} and not for {what!r}")
            self._check()
        self.broadcast_bytes(b"", timeout_s=timeout_s)

    # -- tensors

    def move(self, sends: Sequence[Move], receives: Sequence[Move], *, what: str) -> None:
        """Send and receive a batch of tensors.  Returns when every tensor may be read or written again.

        Every pair of ranks must list what goes between them in the same order; apart from that any order
        works.  On a GPU the batch follows what the current stream did before.

        Args:
            sends: What this rank gives.
            receives: Where what this rank gets is to be written.
            what: What is moved, for the error.

        Raises:
            TrainerRankFailed: A rank is gone or did not take part in time.
        """
        if not sends and not receives:
            return
        group = self._use(self._data)
        if self._nccl:
            batch = [dist.P2POp(dist.isend, _raw(move.tensor), move.peer, group) for move in sends]
            batch += [dist.P2POp(dist.irecv, _raw(move.tensor), move.peer, group) for move in receives]
            self._run_nccl(lambda: dist.batch_isend_irecv(batch), what)
            return
        deadline = time.monotonic() + self.timeout_s
        bounced: list[tuple[torch.Tensor, torch.Tensor]] = []
        works: list[tuple[int, dist.Work]] = []
        for move in receives:
            raw = _raw(move.tensor)
            if raw.is_cuda:
                bounced.append((raw, torch.empty(raw.shape, dtype=torch.uint8)))
                raw = bounced[-1][1]
            works.append((move.peer, self._post(group.recv, raw, move.peer, self._received[move.peer], what)))
            self._received[move.peer] += 1
        for move in sends:
            raw = _raw(move.tensor).cpu()
            works.append((move.peer, self._post(group.send, raw, move.peer, self._sent[move.peer], what)))
            self._sent[move.peer] += 1
        for peer, work in works:
            self._wait(peer, work, what, deadline)
        for target, raw in bounced:
            target.copy_(raw)

    def all_gather(self, tensors: Sequence[torch.Tensor], *, what: str) -> None:
        """Complete tensors of which rank r holds the r-th of ``world_size`` equal parts, in place.  NCCL only.

        Args:
            tensors: Contiguous, this rank's part written already; the same list on every rank.
            what: What is gathered, for the error.

        Raises:
            TrainerRankFailed: A rank is gone or did not take part in time.
        """
        if not tensors:
            return
        group = self._use(self._data)
        assert self._nccl, "all_gather needs NCCL"
        wholes = [_raw(tensor) for tensor in tensors]
        parts = [whole.chunk(self.world_size)[self.rank] for whole in wholes]
        self._run_nccl(lambda: [group.allgather_into_tensor_coalesced(wholes, parts)], what)

    # -- the end

    def abort(self, reason: str = "no reason given") -> None:
        """Give up: every wait in this group ends, on every rank.  The trainer's own groups are untouched.

        Safe to call twice and from another thread.

        Args:
            reason: What went wrong here, for the error on the other ranks.
        """
        if self._failure is not None:
            return
        self._failure = f"trainer rank {self.rank} gave up: {reason}"
        if self._rollcall is not None and not self._closed:
            self._rollcall.verdict((), reason=reason, patience_s=1.0)
            self._hang_up()

    def close(self) -> None:
        """Let go of the groups.  Safe to call twice, and after the trainer has destroyed its own."""
        self._closed = True
        groups, self._data, self._control = (self._data, self._control), None, None
        for group in groups:
            if group is not None and dist.is_initialized():
                with suppress(ValueError):  # destroyed before, by abort or by the trainer
                    dist.destroy_process_group(group)

    # -- inside

    def _use(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        self._check()
        if group is None:
            raise TrainerRankFailed("this group of trainer ranks is closed")
        return group

    def _check(self) -> None:
        if self._failure is not None:
            raise TrainerRankFailed(self._failure)

    def _send_bytes(self, peers: Sequence[int], payload: bytes, what: str, limit_s: float) -> None:
        if not peers:
            return
        group, tag, deadline = self._use(self._control), self._next_tag(), time.monotonic() + limit_s
        if len(payload) > _MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(payload)} bytes is too long")
        size = torch.tensor([len(payload)], dtype=torch.int64)
        body = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else None
        works: list[tuple[int, dist.Work]] = []
        for peer in peers:
            works.append((peer, self._post(group.send, size, peer, tag, what)))
            if body is not None:
                works.append((peer, self._post(group.send, body, peer, tag + 1, what)))
        for peer, work in works:
            self._wait(peer, work, what, deadline)

    def _receive_bytes(self, peers: Sequence[int], what: str, limit_s: float) -> list[bytes]:
        if not peers:
            return []
        group, tag, deadline = self._use(self._control), self._next_tag(), time.monotonic() + limit_s
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in peers]
        works = [self._post(group.recv, size, peer, tag, what) for peer, size in zip(peers, sizes, strict=True)]
        messages: list[bytes] = []
        for peer, work, size in zip(peers, works, sizes, strict=True):
            self._wait(peer, work, what, deadline)
            num_bytes = int(size.item())
            if not 0 <= num_bytes <= _MAX_MESSAGE_BYTES:
                self._fail([peer], f"a message, and it announced one of {num_bytes} bytes")
            body = torch.empty(num_bytes, dtype=torch.uint8)
            if num_bytes:
                self._wait(peer, self._post(group.recv, body, peer, tag + 1, what), what, deadline)
            messages.append(ctypes.string_at(body.data_ptr(), num_bytes) if num_bytes else b"")
        return messages

    def _next_tag(self) -> int:
        self._steps += 1
        return 2 * self._steps % _TAGS

    def _post(
        self,
        operation: Callable[[list[torch.Tensor], int, int], dist.Work | None],
        tensor: torch.Tensor,
        peer: int,
        tag: int,
        what: str,
    ) -> dist.Work:
        try:
            work = operation([tensor], peer, tag % _TAGS)
        except RuntimeError:  # the connection is closed already
            self._fail([peer], what)
        assert work is not None
        return work

    def _wait(self, peer: int, work: dist.Work, what: str, deadline: float) -> None:
        try:
            # 0 would mean "no limit" to torch.
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError:
            self._fail([peer], what, timed_out=time.monotonic() >= deadline)

    def _run_nccl(self, launch: Callable[[], Sequence[dist.Work]], what: str) -> None:
        """Launch NCCL operations on the current stream and wait until they are complete.

        NCCL has no deadline of its own: not on the device, nor on the host, where the first message between two
        ranks waits for both to connect.  So a thread launches, which may be left behind.
        """
        deadline = time.monotonic() + self.timeout_s
        stream = torch.cuda.current_stream(self.device)
        done = torch.cuda.Event()

        def work() -> None:
            with torch.cuda.stream(stream):
                for one in launch():
                    one.wait()  # for the stream, not for the host
                done.record(stream)

        at_work = self._launch = _Launch(work)
        while not (at_work.launched and done.query()):
            self._check()  # given up by another thread
            if time.monotonic() > deadline:
                self._fail(self._others(), what, timed_out=True)
            if at_work.error is not None:
                self._fail(self._others(), f"{what} ({at_work.error})")
            time.sleep(0.00005)
        self._launch = None  # it holds the buffers

    def _others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def _fail(self, suspects: Sequence[int], what: str, *, timed_out: bool = False) -> NoReturn:
        """Find the culprit, end every other wait in the group, raise."""
        self._check()
        rollcall = self._rollcall
        assert rollcall is not None
        patience_s = min(_MAX_PATIENCE_S, max(self.timeout_s / 4, 0.5))
        verdict = rollcall.verdict(suspects, reason=f"waited for {what}", patience_s=patience_s)
        how = f"did not answer within {self.timeout_s:g} s" if timed_out else "closed its connection"
        self._failure = f"{_blame(verdict, suspects, how)}; rank {self.rank} was waiting for {what}"
        self._hang_up()
        raise TrainerRankFailed(self._failure)

    def _hang_up(self) -> None:
        data, control = self._data, self._control
        if self._nccl and data is not None:
            self._data = None
            abort = partial(_abort_nccl, data)
            # An abort frees the communicator.  Under a thread that is still connecting inside NCCL that corrupts the
            # heap (seen with NCCL 2.28), and nothing is on the device yet: that thread does it when it comes out.
            if self._launch is None or not self._launch.afterwards(abort):
                # It waits for NCCL's own threads, and they may wait for the rank that is lost.
                left_behind.start(abort, name="weightcast-abort").join(_MAX_ABORT_S)
            data = None
        for group in (data, control):
            if group is None:
                continue
            # Gloo's own abort ends no wait.  A receive that times out does: it closes every connection of the
            # group, which ends the waits of this process and of its peers.
            for peer in self._others():
                with suppress(RuntimeError):
                    group.recv([torch.empty(1, dtype=torch.uint8)], peer, _TAGS + 1).wait(timedelta(milliseconds=1))


class _Launch:
    """Does something on a thread that may be left behind, and keeps what went wrong."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._guard = threading.Lock()
        self._inside = True
        self._after: Callable[[], None] | None = None
        self.launched = False
        self.error: RuntimeError | None = None
        left_behind.start(self._run, name="weightcast-nccl")

    def afterwards(self, act: Callable[[], None]) -> bool:
        """Have the thread do this when the work is over; False if it is over already."""
        with self._guard:
            if self._inside:
                self._after = act
            return self._inside

    def _run(self) -> None:
        try:
            self._work()
            self.launched = True
        except RuntimeError as error:  # which torch's own errors are
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


def _ranks(ranks: Sequence[int]) -> str:
    return f"trainer rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _blame(verdict: Verdict, suspects: Sequence[int], how: str) -> str:
    if verdict.quit:
        return "; ".join(f"trainer rank {rank} gave up: {reason}" for rank, reason in sorted(verdict.quit.items()))
    if not verdict.silent:
        return f"{_ranks(sorted(suspects))} {how}, and every rank was waiting for another"
    if verdict.store_lost:
        return f"{_ranks(verdict.silent)} {how}, nor does the job's store, which rank 0 usually holds"
    if set(verdict.silent) <= set(suspects):
        return f"{_ranks(verdict.silent)} {how}"
    return f"{_ranks(verdict.silent)} fell silent"


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor; no copy.  Backends differ in the dtypes they know, bytes they all know."""
    return tensor.view(-1).view(torch.uint8)


def _device_identity(device: torch.device) -> str:
    """What tells this GPU from every other in the job; empty if NCCL cannot use the device."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _new_group(backend: str, timeout: timedelta) -> dist.ProcessGroup:
    # By default torch ends the whole process when an NCCL operation of any group fails or passes the group's
    # limit.  We have deadlines of our own, far shorter than the limit we give it, and want to say who failed.
    with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
        try:
            group = dist.new_group(backend=backend, timeout=timeout)
        except RuntimeError as error:  # which torch's own errors are
            raise TrainerRankFailed(
                f"trainer ranks have met, but could not make a {backend} group within {timeout.total_seconds():g} s: "
                f"{str(error).splitlines()[0]}",
                hint="a rank has died since, or is too busy for so short a timeout_s",
            ) from error
    assert isinstance(group, dist.ProcessGroup)  # of all ranks, so this one is a member
    return group


@contextmanager
def _environment(name: str, value: str) -> Generator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
