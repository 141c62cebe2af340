"""Brings one engine rank a bucket, or its share of it, out of trainer ranks' buffers or memory, or in messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch

from weightcast.comm.group_moves import Move
from weightcast.errors import Refused, WeightcastError
from weightcast.receiver.bucket_copies import BucketCopies, ExchangePlan
from weightcast.receiver.loader import Loader
from weightcast.receiver.sources.broadcast import GroupSource, Passing
from weightcast.receiver.sources.ipc import SharedMemorySource
from weightcast.receiver.sources.remote import RemoteMemorySource
from weightcast.runtime.streams import wait_for_streams
from weightcast.wire.answers import NOTHING_TAKEN, Taken
from weightcast.wire.blobs import hash_of
from weightcast.wire.bucket_sources import (
    BroadcastSource,
    ExchangeSource,
    IpcSource,
    MappedSource,
    OwnLegs,
    PartialBuffer,
    RemoteSource,
    ScatteredSource,
    Source,
)
from weightcast.wire.layout import BucketLayout
from weightcast.wire.messages import Open
from weightcast.wire.pieces import Wanted, encode_wanted

_PASSING_ROOMS = 2
_PASS_S = 1.0  # after an update, for what is still being passed on; then its group ends
RankSource = IpcSource | BroadcastSource | ScatteredSource | RemoteSource | ExchangeSource | MappedSource | OwnLegs


@dataclass(slots=True)
class _Room:
    """A receive buffer, and what is being sent out of it."""

    data: torch.Tensor
    passing: Passing | None = None


@dataclass(slots=True)
class Shares:
    """Reads buckets and shares out of memory on this host, out of messages, or out of memory on any host.

    Attributes:
        taken: As ``RankAck.taken``.
    """

    loader: Loader
    memory: SharedMemorySource
    groups: GroupSource
    device: torch.device
    remote: RemoteMemorySource = field(init=False)
    taken: Taken = NOTHING_TAKEN
    _rooms: list[_Room] = field(default_factory=list)
    _turn: int = 0
    _named: tuple[Wanted, str] | None = None

    def __post_init__(self) -> None:
        self.remote = RemoteMemorySource(self.device)

    def begin(self) -> None:
        """Starts an update, of which nothing was taken."""
        self.taken = NOTHING_TAKEN

    def _took(self, *, in_place: int = 0, in_buffers: int = 0, in_messages: int = 0) -> None:
        self.taken = self.taken[0] + in_place, self.taken[1] + in_buffers, self.taken[2] + in_messages

    def wanted(self) -> bytes:
        """The boxes that this rank must get, for the trainer ranks."""
        return encode_wanted(self.loader.copier.wanted)

    def prepare(self, layout: BucketLayout, source: Source) -> None:
        """Maps the memory of a source, and works out the copies of this rank's share; nothing is read.

        Raises:
            Refused, MappingFailed: As ``take``.
        """
        if isinstance(source, IpcSource):
            self.loader.place(self.memory.read(layout, source.handles))
        elif isinstance(source, ScatteredSource | MappedSource):
            memories, plan = self._in_memory(layout, source)
            if not self.memory.far(memories):
                self.loader.copier.place(memories, plan, self.loader.staging)

    def _in_memory(
        self, layout: BucketLayout, source: ScatteredSource | MappedSource
    ) -> tuple[list[torch.Tensor], BucketCopies]:
        """The mapped memory of a source, and the copies out of it."""
        copier = self.loader.copier
        if isinstance(source, MappedSource):
            memories = self.memory.read_memories(source.memories)
            return memories, copier.plan_mapped(layout, source.parts, memories)
        memories = self.memory.read_parts(layout, source.buffers)
        return memories, copier.plan(layout, tuple(buffer.parts for buffer in source.buffers))

    def take(
        self,
        layout: BucketLayout,
        source: RankSource,
        session: Open,
        *,
        interrupted: Callable[[], bool],
    ) -> float:
        """Reads and loads a bucket, or the share of it; returns when its bytes had arrived, by ``time.monotonic``.

        ``interrupted`` is True once the update is over.  It raises Refused then, or if the parts are not the whole
        bucket exactly once; MappingFailed or RemoteReadFailed if a trainer rank's buffer cannot be mapped or read;
        DeadlineExceeded or GroupFailed if a trainer rank fell silent or died.
        """
        copies, timeout_s = self.loader.copies, session.timeout_s
        summed = session.verify != "none" or bool(copies)
        if isinstance(source, IpcSource | BroadcastSource):
            return self._take_whole(layout, source, session, summed=summed, interrupted=interrupted)
        if copies:
            name, original = next(iter(copies.items()))
            raise Refused(
                f"{name} must equal {original}, which no rank compares when each reads only its own share",
                hint='use another transport: transport="auto"',
            )
        copier = self.loader.copier
        if isinstance(source, OwnLegs):
            return self._take_legs(layout, source, timeout_s=timeout_s, summed=summed, interrupted=interrupted)
        if isinstance(source, ScatteredSource | MappedSource):
            memories, plan = self._in_memory(layout, source)
            if interrupted():
                raise Refused("interrupted")
            arrived = time.monotonic()
            self.loader.load_from(memories, plan, far=self.memory.far(memories), summed=summed)
            wait_for_streams(self.device, *(memory.device for memory in memories))
            read_bytes = sum(plan.read_bytes)
            if isinstance(source, MappedSource):
                self._took(in_place=read_bytes)
            else:
                self._took(in_buffers=read_bytes)
            return arrived
        if isinstance(source, RemoteSource):
            plan = copier.plan_exchange(layout, tuple(buffer.parts for buffer in source.buffers), read=True)
            received = self.remote.read(
                layout, source.buffers, plan, wanted=self._name(), timeout_s=timeout_s, interrupted=interrupted
            )
            arrived = time.monotonic()
            self.loader.load_from([received], plan.copies, summed=summed)
            wait_for_streams(self.device)
            self._took(in_buffers=plan.size_bytes)
            return arrived
        told = self.loader.plan.parts
        if not told:
            raise Refused(f"bucket {layout.index} comes in messages, and the session's plan has no parts of it")
        plan = copier.plan_exchange(layout, told[layout.index])
        relay = self.groups.relay(source.group)
        room = self._room(plan.size_bytes, passed_on=bool(relay.downstream), timeout_s=timeout_s)
        received, whole = room.data, room.data[: plan.size_bytes]
        if relay.upstream:
            receives = [Move(relay.upstream, whole)] if plan.size_bytes else []
        else:
            receives = _receives(plan, received)
        passes = [Move(relay.downstream, whole)] if relay.downstream and plan.size_bytes else []
        what = f"bucket {layout.index}"
        with _left_on_failure(room):
            room.passing = self.groups.receive(source.group, receives, passes, what=what, timeout_s=timeout_s)
        arrived = time.monotonic()
        self.loader.load_from([received], plan.copies, summed=summed)
        wait_for_streams(self.device)
        self._took(in_messages=plan.size_bytes)
        return arrived

    def _take_whole(
        self,
        layout: BucketLayout,
        source: IpcSource | BroadcastSource,
        session: Open,
        *,
        summed: bool,
        interrupted: Callable[[], bool],
    ) -> float:
        """As ``take``, of a bucket that this rank reads or receives whole."""
        if isinstance(source, IpcSource):
            bucket = self.memory.read(layout, source.handles)
        else:  # into a buffer; that of the next bucket is entered if its size is known
            following = session.bucket_sizes[layout.index + 1 : layout.index + 2]
            bucket = self.groups.read(
                layout,
                source.group,
                timeout_s=session.timeout_s,
                next_bytes=following[0] if following else 0,
                patience_s=session.lease_s,  # the trainer may gather for longer than a wait may take
            )
        if interrupted():
            raise Refused("interrupted")
        arrived = time.monotonic()
        self.loader.load(bucket, summed=summed)
        if isinstance(source, IpcSource):
            # The trainer may overwrite its buffer as soon as it has our answer.  A buffer on another GPU is summed
            # there.
            wait_for_streams(self.device, bucket.data.device)
        else:
            self.groups.release(bucket)
        return arrived

    def _take_legs(
        self, layout: BucketLayout, source: OwnLegs, *, timeout_s: float, summed: bool, interrupted: Callable[[], bool]
    ) -> float:
        """As ``take``, out of buffers of this host and messages from other hosts."""
        near = [(rank, leg.parts, leg.handle) for rank, leg in enumerate(source.legs) if leg.handle is not None]
        parts = tuple(leg.parts for leg in source.legs)
        plan = self.loader.copier.plan_exchange(layout, parts, near=tuple(rank for rank, _, _ in near))
        buffers = [PartialBuffer(handle=handle, parts=own) for _, own, handle in near]
        here = self.memory.read_parts(layout, buffers)  # before anything is received: a refusal comes at once
        room = self._room(plan.size_bytes, passed_on=False, timeout_s=timeout_s)
        receives = _receives(plan, room.data)
        if receives and source.group is None:
            raise Refused(f"bucket {layout.index} has parts that are in no memory of this host, and names no group")
        if receives:
            assert source.group is not None
            with _left_on_failure(room):
                self.groups.receive(source.group, receives, what=f"bucket {layout.index}", timeout_s=timeout_s)
        if interrupted():
            raise Refused("interrupted")
        arrived = time.monotonic()
        far = {1 + number for number in self.memory.far(here)}
        self.loader.load_from([room.data, *here], plan.copies, far=far, summed=summed)
        wait_for_streams(self.device, *(memory.device for memory in here))
        self._took(in_buffers=sum(plan.copies.read_bytes[1:]), in_messages=plan.size_bytes)
        return arrived

    def trim(self) -> None:
        """Frees the receive buffers."""
        for room in self._rooms:
            with suppress(WeightcastError):  # a rank that does not get what is passed on says so itself
                self._free(room, _PASS_S)
        self._rooms.clear()
        self.remote.close()

    def unmap(self) -> None:
        """Lets go of the trainer ranks' memory."""
        self.memory.close()
        self.remote.close()

    def _name(self) -> str:
        """Name of the boxes that this rank wants."""
        wanted = self.loader.copier.wanted
        if self._named is None or self._named[0] is not wanted:
            self._named = wanted, hash_of(encode_wanted(wanted))
        return self._named[1]

    def _room(self, size_bytes: int, *, passed_on: bool, timeout_s: float) -> _Room:
        """A receive buffer; one of two in turn if a bucket is passed on while the next one comes."""
        self._turn = (self._turn + 1) % _PASSING_ROOMS if passed_on else 0
        while len(self._rooms) <= self._turn:
            self._rooms.append(_Room(torch.empty(0, dtype=torch.uint8, device=self.device)))
        room = self._rooms[self._turn]
        self._free(room, timeout_s)
        if room.data.numel() < size_bytes:
            # The old memory goes before the new comes.
            room.data = torch.empty(0, dtype=torch.uint8, device=self.device)
            room.data = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        return room

    def _free(self, room: _Room, timeout_s: float) -> None:
        passing, room.passing = room.passing, None
        if passing is not None:
            self.groups.finish(passing, timeout_s=timeout_s)


@contextmanager
def _left_on_failure(room: _Room) -> Generator[None]:
    """Takes other memory after a failed receive: gloo may go on writing to this, which it keeps alive."""
    try:
        yield
    except BaseException:
        room.data = room.data.new_empty(0)
        raise


def _receives(plan: ExchangePlan, received: torch.Tensor) -> list[Move]:
    """The messages of a plan, each with its place in the receive buffer."""
    return [
        Move(rank, received[start + first : start + first + size_bytes])
        for rank, (message, start) in enumerate(zip(plan.messages, plan.starts, strict=True))
        for first, size_bytes in message.runs
    ]
