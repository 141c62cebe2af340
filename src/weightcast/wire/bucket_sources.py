"""Sources of a bucket: the place from which an engine reads it.  A transport adds its own here.

``transport`` of each class is the name of the transport that sends it, for metrics and log lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from weightcast.errors import Refused
from weightcast.wire.box import Box
from weightcast.wire.fields import GroupName, Label, Rank, Text
from weightcast.wire.layout import MAX_TENSORS, Shape, Size


class MemoryHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bucket buffer that a process on the same host can map.

    Attributes:
        kind: ``cuda`` (a CUDA IPC handle) or ``shm`` (an anonymous shared-memory file of the trainer).
        device: For ``cuda``, the UUID of the GPU; for ``shm``, ``"cpu"``.
        token: Random id of the buffer, because a freed and newly allocated one may have the same handle.  For ``shm``
            it is also the name of the file, so that the file of a process with a reused pid is not taken for this one.
        pid: For ``shm``, the process that holds the file.
        fd: For ``shm``, the file's descriptor in that process.
        handle: For ``cuda``, the handle of the allocation.
        offset_bytes: For ``cuda``, first byte of the buffer in the allocation.
        event: For ``cuda``, the handle of the event after which the buffer is filled; empty if it is filled already.
    """

    kind: Literal["cuda", "shm"]
    device: Text
    size_bytes: Size
    token: Annotated[str, Meta(max_length=64)] = ""
    pid: Annotated[int, Meta(ge=0, le=1 << 32)] = 0
    fd: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    handle: Annotated[bytes, Meta(max_length=256)] = b""
    offset_bytes: Size = 0
    event: Annotated[bytes, Meta(max_length=256)] = b""


class IpcSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ipc"):
    """The bucket is in shared memory of this host.  ``handles`` has one for each trainer rank that filled a buffer."""

    transport: ClassVar[str] = "ipc"

    handles: Annotated[tuple[MemoryHandle, ...], Meta(min_length=1, max_length=4096)]


class BucketPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of one slot's tensor that lies in one of several buffers, at its place in the bucket."""

    slot: Annotated[int, Meta(ge=0, le=MAX_TENSORS)]
    offset: Shape
    shape: Shape

    @property
    def box(self) -> Box:
        return Box(offset=self.offset, shape=self.shape)


BucketParts = Annotated[tuple[BucketPart, ...], Meta(max_length=1 << 22)]


class PartialBuffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The buffer of one trainer rank, which has some parts of a bucket; its other bytes mean nothing."""

    handle: MemoryHandle
    parts: BucketParts


class ScatteredSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="scattered"):
    """The bucket is in shared memory of this host, in the buffers of several trainer ranks.

    The parts of all buffers are every slot exactly once.  An engine rank reads the parts that it keeps.
    """

    transport: ClassVar[str] = "direct"

    buffers: Annotated[tuple[PartialBuffer, ...], Meta(min_length=1, max_length=4096)]


class RemoteMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A bucket buffer in memory that a process of any host can read through NIXL, without help of its owner.

    Attributes:
        agent: Random name of the owner's NIXL agent.
        metadata: The agent's addresses and keys, in NIXL's form.
        address: First byte of the registered memory.  It begins with ``token``.
        token: Random bytes, by which a reader recognises the memory.
        first_byte: First byte of the buffer in the registered memory.
        owner: The owner's host and process id, for errors.
        gpu: Index of the GPU that has the memory, as the owner counts its GPUs; None for memory of the host.
    """

    agent: Label
    metadata: Annotated[bytes, Meta(min_length=1, max_length=1 << 20)]
    address: Annotated[int, Meta(ge=1, le=(1 << 62) - 1)]
    token: Annotated[bytes, Meta(min_length=32, max_length=32)]
    first_byte: Size
    size_bytes: Size
    owner: Label
    gpu: Annotated[int, Meta(ge=0, lt=1 << 16)] | None = None


class Pack(msgspec.Struct, frozen=True, array_like=True):
    """The place at which a trainer rank has put together short runs for the engine ranks that want the same boxes.

    ``wanted`` is the hash of these boxes, as ``encode_wanted`` has them.
    """

    wanted: Annotated[str, Meta(max_length=64)]
    first_byte: Size


class RemoteBuffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The remote buffer of one trainer rank, which has some parts of a bucket; its other bytes mean nothing.

    An engine rank whose boxes have no pack reads every run from its place in the bucket.
    """

    memory: RemoteMemory
    parts: BucketParts
    packs: Annotated[tuple[Pack, ...], Meta(max_length=1 << 16)] = ()


class RemoteSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="remote"):
    """As ``ScatteredSource``, in buffers of trainer ranks on any hosts, which engine ranks read there by RDMA."""

    transport: ClassVar[str] = "direct"

    buffers: Annotated[tuple[RemoteBuffer, ...], Meta(min_length=1, max_length=4096)]


class BroadcastSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="broadcast"):
    """The bucket comes by a broadcast from rank 0 of the named group."""

    transport: ClassVar[str] = "broadcast"

    group: GroupName


class RanksMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shared memory of one host, and the engine ranks on that host."""

    ranks: Annotated[tuple[Rank, ...], Meta(min_length=1, max_length=1 << 20)]
    handles: Annotated[tuple[MemoryHandle, ...], Meta(min_length=1, max_length=4096)]


class ByRankSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="by-rank"):
    """Engine ranks on hosts with trainer ranks read the bucket in shared memory of their own host.

    The other ranks get it by a broadcast in the named group; None if there are no others.
    """

    transport: ClassVar[str] = "ipc+broadcast"

    near: Annotated[tuple[RanksMemory, ...], Meta(min_length=1, max_length=4096)]
    group: GroupName | None = None

    def of(self, rank: int) -> IpcSource | BroadcastSource:
        """Returns the source of one rank; raises ``Refused`` if it has none."""
        for memory in self.near:
            if rank in memory.ranks:
                return IpcSource(handles=memory.handles)
        if self.group is None:
            raise Refused(f"rank {rank} was given neither memory nor a group")
        return BroadcastSource(group=self.group)


class MappedPart(BucketPart, frozen=True, array_like=True, gc=False):
    """A box of one slot's tensor that lies in a trainer rank's own memory.

    Attributes:
        first_byte: First byte of the box in memory number ``memory``.
        stride: Strides there, in elements.
        dtype: Dtype there, one of ``DTYPES``: the slot's, or one that the engine casts to it (``is_copied_cast``).
    """

    memory: Annotated[int, Meta(ge=0, le=1 << 20)]
    first_byte: Size
    stride: Shape
    dtype: Annotated[str, Meta(max_length=32)]


class MappedSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="mapped"):
    """There is no bucket: its tensors lie where the trainer ranks of this host keep them.

    All parts together are every slot exactly once.  The trainer ranks do not write to them until the engine answers.
    """

    transport: ClassVar[str] = "direct"

    memories: Annotated[tuple[MemoryHandle, ...], Meta(min_length=1, max_length=1 << 16)]
    parts: Annotated[tuple[MappedPart, ...], Meta(max_length=1 << 22)]


class ExchangeSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="exchange"):
    """The bucket comes in messages from several members of the named group, the trainer ranks.

    The plan has the parts of each trainer rank (``UpdateTables.parts``); together they are every slot exactly once.  An
    engine rank gets the boxes of them that it wants (``wire/pieces.py``), as it told at the rendezvous.
    """

    transport: ClassVar[str] = "direct"

    group: GroupName


class Leg(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The parts of a bucket that some engine ranks get from one trainer rank.

    They read them in its buffer, in shared memory of their host; without a handle it sends them.
    """

    parts: BucketParts = ()
    handle: MemoryHandle | None = None


class RankLegs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Legs to some ranks of an engine.

    ``legs`` has one for each trainer rank, in order of rank; their parts together are every slot exactly once.
    """

    ranks: Annotated[tuple[Rank, ...], Meta(min_length=1, max_length=1 << 20)]
    legs: Annotated[tuple[Leg, ...], Meta(min_length=1, max_length=4096)]


@dataclass(frozen=True, slots=True)
class OwnLegs:
    """The legs to one rank; ``group`` is as in ``LegsSource``."""

    legs: tuple[Leg, ...]
    group: str | None


class LegsSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="legs"):
    """Each engine rank gets its share of the bucket from trainer ranks on its host by memory, from others in messages.

    ``group`` has all trainer ranks, the first ones, and the engine ranks that get messages; None if no rank of this
    engine gets any.  An engine rank gets the boxes that it wants, as with ``ExchangeSource``.
    """

    transport: ClassVar[str] = "direct"

    ranks: Annotated[tuple[RankLegs, ...], Meta(min_length=1, max_length=4096)]
    group: GroupName | None = None

    def of(self, rank: int) -> OwnLegs:
        """Returns the legs to one rank; raises ``Refused`` if it has none."""
        for some in self.ranks:
            if rank in some.ranks:
                return OwnLegs(some.legs, self.group)
        raise Refused(f"rank {rank} was given no legs")


Source = (
    IpcSource
    | ScatteredSource
    | RemoteSource
    | BroadcastSource
    | ExchangeSource
    | MappedSource
    | ByRankSource
    | LegsSource
)


def group_of(source: Source) -> str | None:
    """Returns the group in which a bucket comes, to some ranks at least; None if it comes in no group."""
    match source:
        case BroadcastSource() | ExchangeSource() | ByRankSource() | LegsSource():
            return source.group
        case _:
            return None
