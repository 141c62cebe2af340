"""A group of all trainer ranks: small messages and tensors from rank to rank, with a deadline on every wait.

The process groups are our own, so aborting them leaves the trainer's groups alone.  Every message goes from one rank to
one rank, because only then does a passed deadline name the rank that was silent.

Small messages (``broadcast_bytes``, ``gather_bytes``, ``barrier``, ...) and tensors (``move``, ``all_gather``) use
separate process groups, so one thread may send messages while another moves tensors.  Within each of the two, only one
thread may call at a time, and every rank makes the same calls in the same order.

After any failure every later call raises ``TrainerRankFailed`` at once, on every rank, until all ranks have called
``renew``.
"""

from __future__ import annotations

import ctypes
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from weightcast.comm.group_moves import NUM_TAGS, Move
from weightcast.comm.ipc import host_id
from weightcast.comm.trainer_failure import FailureNotes, FailureState, meet, name_ranks
from weightcast.comm.trainer_tensors import GlooPeers, GlooTensors, NcclTensors
from weightcast.comm.watchdog import groups_that_end_nothing
from weightcast.errors import ConfigError, TrainerRankFailed

__all__ = ["Move", "TrainerGroup"]

_MAX_MESSAGE_BYTES = 1 << 30
# The first message to a peer has the size and the first bytes of a payload, a second one has the rest of a long one.
_FRAME_BYTES, _SIZE_BYTES = 256, 8
_SHORT_BYTES = _FRAME_BYTES - _SIZE_BYTES
_BRANCHES = 16  # of the tree that sums are added up along: rank 0 with few ranks hears from all of them


class _Seat(msgspec.Struct, frozen=True, array_like=True):
    """Where one rank runs: its GPU's UUID, empty if NCCL cannot use its device; its host's id and name."""

    gpu: str
    host: str
    name: str


class _Seats(msgspec.Struct, frozen=True, array_like=True):
    """Where all ranks run: id and name of each host, and the number of each rank's host, in order of rank."""

    own_gpus: bool
    hosts: tuple[tuple[str, str], ...]
    host_of: tuple[int, ...]


_seat = msgspec.json.Decoder(_Seat)  # made before there are threads
_seats = msgspec.json.Decoder(_Seats)


class TrainerGroup:
    """All ranks of the training job, or this process alone.  Made by ``TrainerGroup.connect``."""

    def __init__(self, *, device: torch.device, timeout_s: float, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._hosts: tuple[str, ...] = ()
        self._failure = FailureState(rank=rank, timeout_s=timeout_s)
        self._messages: GlooPeers | None = None
        self._tensors: GlooTensors | NcclTensors | None = None
        self._closed = False
        self._steps = 0

    @classmethod
    def connect(cls, device: torch.device, *, timeout_s: float) -> TrainerGroup:
        """Meets the other trainer ranks, those of ``torch.distributed`` if it is initialised.  Collective.

        ``timeout_s`` is the deadline of this and every later call.  TrainerRankFailed names a rank that did not come.
        """
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(device=device, timeout_s=timeout_s)
        group = cls(device=device, timeout_s=timeout_s, rank=dist.get_rank(), world_size=dist.get_world_size())
        group._meet(timeout_s)
        return group

    def renew(self, *, timeout_s: float | None = None) -> None:
        """Meets the other ranks again after a failure.  Collective.

        ``timeout_s`` limits the wait for them; None takes the group's own.  Raises as ``connect``, and all may try
        again.
        """
        if self.world_size == 1:
            self._failure.reason = None
            return
        self.abort("it joins the other ranks again")
        self.close()
        try:
            self._meet(timeout_s or self.timeout_s)
        except TrainerRankFailed as error:
            self._failure.reason, self._failure.lost = str(error), True
            raise

    def _meet(self, timeout_s: float) -> None:
        # The store that every rank of the job shares already; torch has no public name for it.
        store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        prefix, missing = meet(store, rank=self.rank, world_size=self.world_size, timeout_s=timeout_s)
        if missing:
            raise TrainerRankFailed(
                f"{name_ranks(missing)} did not come to connect within {timeout_s:g} s",
                hint="connecting is collective: every trainer rank must take part",
            )
        self._failure.reset(FailureNotes(store, prefix=prefix, rank=self.rank), self._hang_up)
        self._closed = False
        self._steps = 0
        self._tensors = None
        self._messages = GlooPeers(_new_group("gloo", timedelta(seconds=self.timeout_s)), self._failure)
        # NCCL needs a GPU for each rank.  Where ranks share one, tensors go through host memory.
        if not self._exchange_seats():
            data = _new_group("gloo", timedelta(seconds=self.timeout_s))
            self._tensors = GlooTensors(data, self._failure)
            return
        self._tensors = over_nccl = NcclTensors(
            _new_group("nccl", timedelta(days=1)),
            failure=self._failure,
            device=self.device,
            rank=self.rank,
            world_size=self.world_size,
        )
        over_nccl.connect()

    def _exchange_seats(self) -> bool:
        """Learns each rank's host; returns True if each rank has a GPU of its own.  Collective."""
        mine = _Seat(_device_identity(self.device), _host_here(), socket.gethostname())
        gathered = self.gather_bytes(msgspec.json.encode(mine))
        told = msgspec.json.encode(_together(gathered)) if gathered is not None else None
        seats = _seats.decode(self.broadcast_bytes(told))
        self._hosts = tuple(seats.hosts[number][0] for number in seats.host_of)
        many = len(seats.hosts) > 1
        self._failure.hosts = tuple(seats.hosts[number][1] for number in seats.host_of) if many else ()
        return seats.own_gpus

    @property
    def hosts(self) -> tuple[str, ...]:
        """Id of each rank's host, in order of rank: ``comm.ipc.host_id``."""
        return self._hosts or (host_id(),)

    @property
    def timeout_s(self) -> float:
        """Deadline of every call, in seconds; may be set."""
        return self._failure.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._failure.timeout_s = timeout_s

    @property
    def failed(self) -> bool:
        """True after a failure, until ``renew``."""
        return self._failure.reason is not None

    @property
    def lost(self) -> bool:
        """True after a failure in which a rank was dead or silent; False where ranks only gave up."""
        return self._failure.lost

    @property
    def is_head(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @property
    def uses_nccl(self) -> bool:
        """True if tensors travel through NCCL, which ``all_gather`` needs."""
        return isinstance(self._tensors, NcclTensors)

    # -- small messages

    def broadcast_bytes(self, payload: bytes | None, *, timeout_s: float | None = None) -> bytes:
        """Returns the head's ``payload``, which is ignored elsewhere, on every rank.

        Ranks that wait for a busy head need a longer ``timeout_s`` than the group's own, which None takes.  It raises
        TrainerRankFailed if a rank is gone or does not take part in time, as every call below does.
        """
        limit_s, tag = timeout_s or self.timeout_s, self._next_tag()
        if not self.is_head:
            [message] = self._receive_bytes([0], "trainer rank 0 to say what is next", limit_s, tag)
            return message
        if payload is None:
            raise ValueError("broadcast_bytes needs a payload on the head")
        self._send_bytes(range(1, self.world_size), payload, "a message to be taken", limit_s, tag)
        return payload

    def gather_bytes(self, payload: bytes, *, timeout_s: float | None = None) -> list[bytes] | None:
        """Returns every rank's bytes, in order of rank, on the head; None elsewhere."""
        limit_s, tag = timeout_s or self.timeout_s, self._next_tag()
        if self.is_head:
            return [payload, *self._receive_bytes(range(1, self.world_size), "a message", limit_s, tag)]
        self._send_bytes([0], payload, "a message to be taken", limit_s, tag)
        return None

    def add_up(self, values: torch.Tensor, *, timeout_s: float | None = None) -> torch.Tensor | None:
        """Returns, on the head, the sum of every rank's ``values``, mod 2**64; None elsewhere.

        The values are int64 on the CPU, as many on every rank.  Each rank adds what up to 16 others send, and passes
        it on.
        """
        limit_s, tag, rank = timeout_s or self.timeout_s, self._next_tag(), self.rank
        peers = range(_BRANCHES * rank + 1, min(_BRANCHES * (rank + 1) + 1, self.world_size))
        for peer, message in zip(peers, self._receive_bytes(peers, "its sums", limit_s, tag), strict=True):
            if len(message) != values.nbytes:
                self.abort(
                    f"trainer rank {peer} sent {len(message) // 8} sums, and trainer rank {rank} has {len(values)}: "
                    "the model of one of them has changed since it was prepared"
                )
                self._failure.check()
            values = values + torch.frombuffer(bytearray(message), dtype=torch.int64)
        if rank == 0:
            return values
        self._send_bytes([(rank - 1) // _BRANCHES], _as_bytes(values.view(torch.uint8)), "its sums", limit_s, tag)
        return None

    def barrier(self, what: str, *, flags: int = 0, timeout_s: float | None = None) -> int:
        """Returns when every rank has called it with the same ``what``: different reasons to meet are an error.

        It returns on every rank the bits that any of them gave as ``flags``, 0 to 9.
        """
        said = self.gather_bytes(b"%d%s" % (flags, what.encode()), timeout_s=timeout_s)
        strays = [rank for rank, name in enumerate(said or ()) if name[1:] != what.encode()]
        if said is not None and strays:
            self.abort(f"{name_ranks(strays)} came for {said[strays[0]][1:].decode()!r} and not for {what!r}")
            self._failure.check()
        together = 0
        for name in said or ():
            together |= int(name[:1])
        return int(self.broadcast_bytes(b"%d" % together, timeout_s=timeout_s))

    # -- tensors

    def move(self, sends: Sequence[Move], receives: Sequence[Move], *, what: str) -> None:
        """Sends and receives a batch of tensors.  Returns when every tensor may be read or written again.

        Every pair of ranks must list what goes between them in the same order; apart from that any order works.  On a
        GPU the batch follows what the current stream did before.
        """
        if sends or receives:
            self._failure.check()
            if self._tensors is None:
                raise TrainerRankFailed("this group of trainer ranks is closed")
            self._tensors.move(sends, receives, what=what)

    def all_gather(self, tensors: Sequence[torch.Tensor], *, what: str) -> None:
        """Completes tensors of which rank r holds the r-th of ``world_size`` equal parts, in place.  NCCL only.

        The tensors are contiguous and the same list on every rank, which has written its part already.
        """
        if tensors:
            self._failure.check()
            assert isinstance(self._tensors, NcclTensors), "all_gather needs NCCL"
            self._tensors.all_gather(tensors, what=what)

    # -- the end

    def abort(self, reason: str = "no reason given") -> None:
        """Ends every wait in this group, on every rank.  The trainer's own groups are untouched.

        Safe to call twice and from another thread.  The error on the other ranks has the reason.
        """
        self._failure.give_up(reason, tell=not self._closed)

    def close(self) -> None:
        """Releases the process groups.  Safe to call twice, and after the trainer has destroyed its own."""
        self._closed = True
        lanes, self._tensors, self._messages = (self._tensors, self._messages), None, None
        for lane in lanes:
            if lane is not None:
                lane.close()

    def _hang_up(self) -> None:
        for lane in (self._tensors, self._messages):
            if lane is not None:
                lane.hang_up()

    def _open_messages(self) -> GlooPeers:
        self._failure.check()
        if self._messages is None:
            raise TrainerRankFailed("this group of trainer ranks is closed")
        return self._messages

    def _send_bytes(self, peers: Sequence[int], payload: bytes, what: str, limit_s: float, tag: int) -> None:
        if not peers:
            return
        lane, deadline = self._open_messages(), time.monotonic() + limit_s
        if len(payload) > _MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(payload)} bytes is too long")
        frame = len(payload).to_bytes(_SIZE_BYTES, "little") + payload[:_SHORT_BYTES]
        parts = [(tag, _as_tensor(frame.ljust(_FRAME_BYTES, b"\0")))]
        if len(payload) > _SHORT_BYTES:
            parts.append((tag + 1, _as_tensor(payload[_SHORT_BYTES:])))
        works = [(peer, lane.send(part, peer, number, what)) for peer in peers for number, part in parts]
        for peer, work in works:
            lane.wait(peer, work, what, deadline)

    def _receive_bytes(self, peers: Sequence[int], what: str, limit_s: float, tag: int) -> list[bytes]:
        if not peers:
            return []
        lane, deadline = self._open_messages(), time.monotonic() + limit_s
        frames = [torch.empty(_FRAME_BYTES, dtype=torch.uint8) for _ in peers]
        works = [lane.receive(frame, peer, tag, what) for peer, frame in zip(peers, frames, strict=True)]
        messages: list[bytes] = []
        for peer, work, frame in zip(peers, works, frames, strict=True):
            lane.wait(peer, work, what, deadline)
            data = _as_bytes(frame)
            num_bytes = int.from_bytes(data[:_SIZE_BYTES], "little")
            if num_bytes > _MAX_MESSAGE_BYTES:
                self._failure.fail([peer], f"a message, and it announced one of {num_bytes} bytes")
            message = data[_SIZE_BYTES : _SIZE_BYTES + num_bytes]
            if num_bytes > _SHORT_BYTES:
                rest = torch.empty(num_bytes - _SHORT_BYTES, dtype=torch.uint8)
                lane.wait(peer, lane.receive(rest, peer, tag + 1, what), what, deadline)
                message += _as_bytes(rest)
            messages.append(message)
        return messages

    def _next_tag(self) -> int:
        self._steps += 1
        return 2 * self._steps % NUM_TAGS


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _as_bytes(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


def _device_identity(device: torch.device) -> str:
    """Returns the GPU's UUID; empty if NCCL cannot use the device."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _host_here() -> str:
    """Returns this host's id; on a system without boot ids, one that no engine has."""
    try:
        return host_id()
    except ConfigError:
        return f"host:{socket.gethostname()}"


def _together(gathered: Sequence[bytes]) -> _Seats:
    seats = [_seat.decode(one) for one in gathered]
    gpus = [seat.gpu for seat in seats]
    names: dict[str, str] = {}
    for seat in seats:
        names.setdefault(seat.host, seat.name)
    numbers = {host: number for number, host in enumerate(names)}
    return _Seats(
        own_gpus=all(gpus) and len(set(gpus)) == len(gpus),
        hosts=tuple(names.items()),
        host_of=tuple(numbers[seat.host] for seat in seats),
    )


def _new_group(backend: str, timeout: timedelta) -> dist.ProcessGroup:
    with groups_that_end_nothing(watched=True):
        try:
            group = dist.new_group(backend=backend, timeout=timeout)
        except RuntimeError as error:  # the class of torch's own errors
            raise TrainerRankFailed(
                f"trainer ranks could not make a {backend} group within {timeout.total_seconds():g} s: "
                f"{str(error).splitlines()[0]}",
                hint="a rank has died since, or is too busy for so short a timeout_s",
            ) from error
    assert isinstance(group, dist.ProcessGroup)  # of all ranks, so this one is a member
    return group
