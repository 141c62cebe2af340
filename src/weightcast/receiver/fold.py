"""The answers of an engine's ranks, folded into what the trainer needs to know.  Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weightcast.wire.digest import add_partial, finish
from weightcast.wire.messages import Held, RankAck


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """What all ranks keep together.

    Attributes:
        digests: Finished digest of each source tensor that is kept whole, by name.
        broken: Names whose parts do not make up the tensor, or differ between ranks that keep the same part.
        holders: Ranks that keep a part of the tensor, by name.
    """

    digests: dict[str, str] = field(default_factory=dict[str, str])
    broken: tuple[str, ...] = ()
    holders: dict[str, set[int]] = field(default_factory=dict[str, set[int]])

    def unmatched(self, expected: Mapping[str, str]) -> list[str]:
        """Names that are kept otherwise than expected, or not at all."""
        return [name for name, digest in expected.items() if self.digests.get(name) != digest]

    def ranks_holding(self, names: Sequence[str]) -> set[int]:
        """Ranks that keep a part of any of these tensors."""
        return {rank for name in names for rank in self.holders.get(name, set())}


def fold_resident(acks: Sequence[RankAck]) -> Resident:
    """Add up the partial digests of all ranks.

    Boxes that several ranks keep (replicated weights, a tensor used in two places) must have one sum, and count once.
    """
    parts: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], Held]] = {}
    holders: dict[str, set[int]] = {}
    broken: dict[str, None] = {}
    for ack in acks:
        for held in ack.held:
            name = held.spec.name
            holders.setdefault(name, set()).add(ack.rank)
            boxes = parts.setdefault(name, {})
            known = boxes.setdefault((held.box_offset, held.box_shape), held)
            if known.total != held.total or known.spec != held.spec:
                broken[name] = None
    digests: dict[str, str] = {}
    for name, boxes in parts.items():
        spec = next(iter(boxes.values())).spec
        total = 0
        for held in boxes.values():
            total = add_partial(total, held.total)
        if sum(math.prod(shape) for _, shape in boxes) != spec.numel or _overlap(list(boxes)):
            broken[name] = None
        if name not in broken:
            digests[name] = finish(total, dtype=spec.torch_dtype, shape=spec.shape)
    return Resident(digests=digests, broken=tuple(broken), holders=holders)


def fold_received(acks: Sequence[RankAck]) -> tuple[dict[str, str], int, tuple[str, ...]]:
    """Rank 0's digests of what arrived, how many ranks agree with them, and the names on which the others do not."""
    first = acks[0].received
    differing = {name: None for ack in acks for name in first if ack.received.get(name) != first[name]}
    return first, sum(ack.received == first for ack in acks), tuple(differing)


def failures(acks: Sequence[RankAck]) -> tuple[tuple[int, ...], str]:
    """The ranks that failed, and what they said: one text if all say the same."""
    failed = [ack for ack in acks if not ack.ok]
    texts = list(dict.fromkeys(ack.error for ack in failed))
    if len(texts) == 1 and len(failed) == len(acks):
        return tuple(ack.rank for ack in failed), texts[0]
    return tuple(ack.rank for ack in failed), "; ".join(f"rank {ack.rank}: {ack.error}" for ack in failed)


def group_failed(acks: Sequence[RankAck]) -> bool:
    """True if ranks failed, and only because their process group did."""
    failed = [ack for ack in acks if not ack.ok]
    return bool(failed) and all(ack.group_failed for ack in failed)


def _overlap(boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    return any(
        all(a < c + d and c < a + b for a, b, c, d in zip(*first, *second, strict=True))
        for index, first in enumerate(boxes)
        for second in boxes[:index]
        if first[0]
    )
