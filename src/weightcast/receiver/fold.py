"""The answers of an engine's ranks, folded into what the trainer needs to know.  Arithmetic only."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from weightcast.wire.digest import add_partial, as_signed, finish_all, key_of, unequal
from weightcast.wire.messages import Held, RankAck


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """What all ranks keep together.

    Attributes:
        digests: Finished digest of each source tensor that is kept whole, by name.
        broken: Names whose parts do not make up the tensor, or differ between ranks that keep the same part.
    """

    digests: dict[str, str] = field(default_factory=dict[str, str])
    broken: tuple[str, ...] = ()

    def unmatched(self, expected: Mapping[str, str]) -> list[str]:
        """Names that are kept otherwise than expected, or not at all."""
        return unequal(expected, self.digests)


def fold_resident(acks: Sequence[RankAck]) -> Resident:
    """Add up the partial digests of all ranks.

    Boxes that several ranks keep (replicated weights, a tensor used in two places) must have one sum, and count once.
    """
    parts: dict[str, list[Held]] = {}
    for ack in acks:
        for held in ack.held:
            parts.setdefault(held.spec.name, []).append(held)
    broken: list[str] = []
    names: list[str] = []
    totals: list[int] = []
    keys: list[int] = []
    for name, found in parts.items():
        spec = found[0].spec
        total = found[0].total if len(found) == 1 and found[0].box_shape == spec.shape else _total(found)
        if total is None:
            broken.append(name)
            continue
        names.append(name)
        totals.append(as_signed(total))
        keys.append(key_of(spec.torch_dtype, spec.shape))
    digests = finish_all(torch.tensor(totals, dtype=torch.int64), torch.tensor(keys, dtype=torch.int64))
    return Resident(digests=dict(zip(names, digests, strict=True)), broken=tuple(broken))


def _total(found: Sequence[Held]) -> int | None:
    """The sum of a tensor's parts; None if they are not the tensor, or ranks differ in one that both keep."""
    spec = found[0].spec
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for held in found:
        if held.spec != spec or boxes.setdefault((held.box_offset, held.box_shape), held.total) != held.total:
            return None
    if sum(math.prod(shape) for _, shape in boxes) != spec.numel or _overlap(list(boxes)):
        return None
    return functools.reduce(add_partial, boxes.values())


def fold_received(acks: Sequence[RankAck]) -> tuple[int, tuple[str, ...]]:
    """How many ranks agree with rank 0 on what arrived, and the names on which the others do not, if they say names."""
    one = acks[0]
    differing = {name: None for ack in acks for name in one.received if ack.received.get(name) != one.received[name]}
    agreeing = sum(ack.received_all == one.received_all and ack.received == one.received for ack in acks)
    return agreeing, tuple(differing)


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
