"""Folds the answers of an engine's ranks into one answer.  Arithmetic only."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weightcast.digest.definition import add_partial, as_signed, finish_all, key_of, unequal
from weightcast.wire.box import Box, are_disjoint
from weightcast.wire.messages import Held, RankAck


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """The tensors that all ranks keep together.

    Attributes:
        digests: Finished digest of each source tensor that is kept whole, by name.
        broken: Names whose parts do not make up the tensor, or differ between ranks that keep the same part.
    """

    digests: dict[str, str] = field(default_factory=dict[str, str])
    broken: tuple[str, ...] = ()

    def unmatched(self, expected: Mapping[str, str]) -> list[str]:
        """Names whose digest is another than expected, or missing."""
        return unequal(expected, self.digests)


def fold_resident(acks: Sequence[RankAck]) -> Resident:
    """Adds up the partial digests of all ranks.

    A box that several ranks keep (replicated weights, a tensor used in two places) counts once, and has one sum.
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
    """The sum of a tensor's parts; None if they do not make up the tensor, or ranks differ in a part."""
    spec = found[0].spec
    boxes: dict[Box, int] = {}
    for held in found:
        if held.spec != spec or boxes.setdefault(held.box, held.total) != held.total:
            return None
    if sum(box.numel for box in boxes) != spec.numel or not are_disjoint(boxes):
        return None
    return functools.reduce(add_partial, boxes.values())


def fold_received(acks: Sequence[RankAck]) -> tuple[int, tuple[str, ...]]:
    """Number of ranks that received what rank 0 received, and the names on which the others differ."""
    one = acks[0]
    differing = {name: None for ack in acks for name in one.received if ack.received.get(name) != one.received[name]}
    agreeing = sum(ack.received_all == one.received_all and ack.received == one.received for ack in acks)
    return agreeing, tuple(differing)


def failures(acks: Sequence[RankAck]) -> tuple[tuple[int, ...], str]:
    """The ranks that failed and their errors: one text if all errors are equal."""
    failed = [ack for ack in acks if not ack.ok]
    texts = list(dict.fromkeys(ack.error for ack in failed))
    if len(texts) == 1 and len(failed) == len(acks):
        return tuple(ack.rank for ack in failed), texts[0]
    return tuple(ack.rank for ack in failed), "; ".join(f"rank {ack.rank}: {ack.error}" for ack in failed)


def group_failed(acks: Sequence[RankAck]) -> bool:
    """True if ranks failed, and only because their process group did."""
    failed = [ack for ack in acks if not ack.ok]
    return bool(failed) and all(ack.group_failed for ack in failed)


def union(names_of_ranks: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The names that any rank gives, each once, in order."""
    return tuple(dict.fromkeys(name for names in names_of_ranks for name in names))


def costs(acks: Sequence[RankAck]) -> dict[str, Any]:
    """Seconds and bytes of the rank that took most, and the steps of all ranks."""
    return {
        "load_s": max(ack.load_s for ack in acks),
        "verify_s": max(ack.verify_s for ack in acks),
        "peak_extra_bytes": max(ack.peak_extra_bytes for ack in acks),
        "steps": tuple(step for ack in acks for step in ack.steps),
    }
