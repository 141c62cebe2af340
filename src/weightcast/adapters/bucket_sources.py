"""The source of a bucket, as engines with our receiver are told it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weightcast.comm.shared_buckets import Shared
from weightcast.runtime.lru import Lru
from weightcast.wire.bucket_sources import (
    BroadcastSource,
    ByRankSource,
    IpcSource,
    Leg,
    LegsSource,
    MappedPart,
    MappedSource,
    MemoryHandle,
    PartialBuffer,
    RankLegs,
    RanksMemory,
    RemoteBuffer,
    RemoteSource,
    ScatteredSource,
    Source,
)

_KEPT_BYTES = 64 << 20
_PART_BYTES = 512
_Parted = ScatteredSource | RemoteSource | MappedSource
_kept: Lru[tuple[object, ...], tuple[tuple[Shared, ...], _Parted]] = Lru(_KEPT_BYTES)


def source_of(shared: Sequence[Shared], group: str | None = None) -> Source:
    """Returns the source of a bucket.

    It is broadcast in ``group``, else read through its handles.  With handles for some ranks, the others take part in
    the broadcast.
    """
    if any(item.leg for item in shared):
        return _legs(shared, group)
    if any(item.ranks for item in shared):
        return ByRankSource(near=_by_host(shared), group=group)
    if group is not None:
        return BroadcastSource(group=group)
    if any(item.mapped or item.parts for item in shared):
        return _parted(shared)
    return IpcSource(handles=tuple(item.memory for item in shared if item.memory is not None))


def _by_host(shared: Sequence[Shared]) -> tuple[RanksMemory, ...]:
    """The handles of each host, with the engine ranks that are there."""
    handles: dict[tuple[int, ...], list[MemoryHandle]] = {}
    for item in shared:
        if item.memory is not None:
            handles.setdefault(item.ranks, []).append(item.memory)
    return tuple(RanksMemory(ranks=ranks, handles=tuple(found)) for ranks, found in handles.items())


def _legs(shared: Sequence[Shared], group: str | None) -> LegsSource:
    legs: dict[tuple[int, ...], list[Leg]] = {}
    for item in shared:
        legs.setdefault(item.ranks, []).append(Leg(parts=item.parts, handle=item.memory))
    return LegsSource(
        ranks=tuple(RankLegs(ranks=ranks, legs=tuple(found)) for ranks, found in legs.items()), group=group
    )


def _parted(shared: Sequence[Shared]) -> _Parted:
    """The source whose parts several trainer ranks have: the same object for the same ``shared``."""
    key = tuple(map(id, shared))
    known = _kept.get(key)
    if known is None:
        known = tuple(shared), _joined(shared)  # kept alive, so that their ids stay their own
        _kept.put(key, known, _PART_BYTES * (1 + sum(len(item.parts) + len(item.mapped) for item in shared)))
    return known[1]


def _joined(shared: Sequence[Shared]) -> _Parted:
    if any(item.mapped for item in shared):
        return _mapped(shared)
    remote = tuple(
        RemoteBuffer(memory=item.remote, parts=item.parts, packs=item.packs)
        for item in shared
        if item.remote is not None and item.parts
    )
    if remote:
        return RemoteSource(buffers=remote)
    buffers = (
        PartialBuffer(handle=item.memory, parts=item.parts) for item in shared if item.memory is not None and item.parts
    )
    return ScatteredSource(buffers=tuple(buffers))


def _mapped(shared: Sequence[Shared]) -> MappedSource:
    """One list of all trainer ranks' memories, and of the parts in them."""
    memories: list[MemoryHandle] = []
    parts: list[MappedPart] = []
    for item in shared:
        shift = len(memories)
        parts += (
            [msgspec.structs.replace(part, memory=part.memory + shift) for part in item.mapped]
            if shift
            else item.mapped
        )
        memories += item.memories
    return MappedSource(memories=tuple(memories), parts=tuple(parts))
