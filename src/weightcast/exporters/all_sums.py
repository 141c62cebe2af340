"""Adds up the digest sums of all trainer ranks on the head, and finds the tensors in which they differ."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from weightcast.comm.trainer_group import Move, TrainerGroup
from weightcast.digest.copies import host_bytes
from weightcast.digest.source_sums import Alike, AllSums, Mismatch, SourceSums
from weightcast.errors import TrainerRankFailed

_mismatches = msgspec.json.Decoder(list[Mismatch])


def add_up(
    own: SourceSums, buckets: Sequence[torch.Tensor] | None, group: TrainerGroup, *, timeout_s: float
) -> AllSums:
    """Adds up the sums of all ranks.  Collective; on other ranks than the head the result has their ``own`` alone.

    Args:
        buckets: Sums of the slots of this rank's own buckets; empty if it has none or is the head, and None on every
            rank if nobody needs them.

    Raises:
        TrainerRankFailed: A rank sent another number of sums than its part of the model needs.
    """
    added = group.add_up(own.to_add_up(), timeout_s=timeout_s)
    found: dict[int, list[torch.Tensor]] = {}
    if buckets is not None:
        mine = host_bytes(torch.cat([sums.cpu() for sums in buckets])) if buckets else b""
        told = group.gather_bytes(mine, timeout_s=timeout_s) or ()
        sizes = [places.num_slots for places in own.places]
        found = {rank: _split(rank, message, sizes) for rank, message in enumerate(told) if message}
    return AllSums.of(own, added, found) if added is not None else AllSums(own)


def find_differing(sums: AllSums, group: TrainerGroup, *, timeout_s: float) -> list[Mismatch]:
    """Finds the parts whose sums differ between ranks.  Collective; empty on other ranks than the head.

    The first of the ranks that hold a part hears the sums of the others.
    """
    assert sums.own is not None
    found: list[Mismatch] = []
    for number, (places, values) in enumerate(zip(sums.own.places, sums.own.values, strict=True)):
        totals = sums.totals[number] if group.is_head else None
        sends: list[Move] = []
        heard: list[tuple[Alike, list[torch.Tensor]]] = []
        for alike in places.alike:
            mine = values[places.num_totals + alike.numbers].to(group.device)
            if alike.ranks[0] == group.rank:
                heard.append((alike, [mine, *(torch.empty_like(mine) for _ in alike.ranks[1:])]))
            else:
                sends.append(Move(alike.ranks[0], mine))
        receives = [Move(*move) for alike, all_of in heard for move in zip(alike.ranks[1:], all_of[1:], strict=True)]
        group.move(sends, receives, what="its sums of replicas")
        for alike, all_of in heard:
            found += places.mismatches(alike, torch.stack(all_of).cpu(), totals)
    told = group.gather_bytes(msgspec.json.encode(found), timeout_s=timeout_s) or ()
    together = [one for message in told for one in _mismatches.decode(message)]
    # Where replicas of adapters differ, what ranks receive of them differs too.
    return [one for one in together if not one.gathered] or together


def _split(rank: int, message: bytes, sizes: Sequence[int]) -> list[torch.Tensor]:
    sums = torch.frombuffer(bytearray(message), dtype=torch.int64)
    if len(sums) != sum(sizes):
        raise TrainerRankFailed(
            f"trainer rank {rank} sent {len(sums)} sums of its buckets, and they have {sum(sizes)} slots: "
            "its model has changed since it was prepared"
        )
    return list(sums.split(list(sizes)))
