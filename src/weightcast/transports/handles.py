"""The handles to trainer ranks' buffers that one target gets."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weightcast.comm.ipc import host_id
from weightcast.comm.shared_buckets import Shared
from weightcast.transports.link import Link


def handles_for(link: Link, buffers: Sequence[Shared]) -> list[Shared]:
    """Returns the handles that a target gets, of those to all buffers."""
    plan, info = link.plan, link.info
    if plan.reads:
        return _by_leg(plan.reads, buffers)
    if plan.near:
        return _by_host(plan.near, info.hosts, buffers)
    opens = slice(*plan.opens)
    buffers = [buffer for buffer in buffers if buffer.host in ("", info.host_id)]
    if plan.sharing == "ring":
        return [Shared(memory=buffer.memory, ring=buffer.ring[opens]) for buffer in buffers]
    # What is nobody's alone stays the same object: sources are made and encoded once for each.
    return [
        msgspec.structs.replace(buffer, torch=buffer.torch[opens], ring=()) if buffer.torch or buffer.ring else buffer
        for buffer in buffers
    ]


def _by_host(near: Sequence[int], hosts: Sequence[str], buffers: Sequence[Shared]) -> list[Shared]:
    """The handles of each host, with the ranks that are there; trainer ranks on one host do not name it."""
    found: list[Shared] = []
    for buffer in buffers:
        host = buffer.host or host_id()
        if ranks := tuple(rank for rank in near if hosts[rank] == host):
            found.append(Shared(memory=buffer.memory, ranks=ranks))
    return found


def _by_leg(reads: Sequence[str], buffers: Sequence[Shared]) -> list[Shared]:
    """Returns the legs from each trainer rank to the ranks that read memory of one host, or of none."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(reads):
        ranks.setdefault(host, []).append(rank)
    return [
        Shared(
            memory=buffer.memory if buffer.host == host else None,
            parts=buffer.legs.get(host, ()),
            ranks=tuple(some),
            leg=True,
        )
        for host, some in ranks.items()
        for buffer in buffers
    ]
