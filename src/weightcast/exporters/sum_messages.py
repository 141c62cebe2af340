"""Encodes the digest sums that a trainer rank took of its shards, and combines all ranks' sums on the head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from weightcast.digest.copies import host_bytes
from weightcast.digest.source_sums import Folded
from weightcast.errors import TrainerRankFailed
from weightcast.protocols import PlannedBucket
from weightcast.wire.layout import BucketLayout


def encode(sources: torch.Tensor, buckets: Sequence[torch.Tensor]) -> bytes:
    """Encodes one rank's message to the head, 8 bytes for each sum.  ``buckets`` is empty if the head needs none."""
    return host_bytes(torch.cat([sources, *(sums.cpu() for sums in buckets)]))


def decode(
    planned: Sequence[PlannedBucket], messages: Sequence[bytes]
) -> tuple[list[Folded], dict[int, list[torch.Tensor]]]:
    """Combines the messages of all ranks, in order of rank.

    Returns:
        The combined sums of each bucket, in order.  The bucket sums of each rank that sent them, by rank.

    Raises:
        TrainerRankFailed: A rank sent another number of sums than its part of the model needs.
    """
    rest = [torch.frombuffer(bytearray(message), dtype=torch.int64) if message else _NONE for message in messages]
    folded: list[Folded] = []
    for one in planned:
        counts = [one.count(rank) for rank in range(len(rest))]
        short = [rank for rank, count in enumerate(counts) if len(rest[rank]) < count]
        if short:
            raise TrainerRankFailed(
                f"trainer rank {short[0]} sent too few sums of its shards: its model has changed since it was prepared"
            )
        folded.append(one.fold([answer[:count] for answer, count in zip(rest, counts, strict=True)]))
        rest = [answer[count:] for answer, count in zip(rest, counts, strict=True)]
    return folded, dict(_buckets([one.layout for one in planned], rest))


_NONE = torch.zeros(0, dtype=torch.int64)


def _buckets(layouts: Sequence[BucketLayout], rest: Sequence[torch.Tensor]) -> Iterator[tuple[int, list[torch.Tensor]]]:
    sizes = [len(layout.slots) for layout in layouts]
    for rank, answer in enumerate(rest):
        if len(answer) not in (0, sum(sizes)):
            raise TrainerRankFailed(
                f"trainer rank {rank} sent {len(answer)} sums of its buckets, and they have {sum(sizes)} slots: "
                "its model has changed since it was prepared"
            )
        if len(answer):
            yield rank, list(answer.split(sizes))
