"""Folds the answers of an engine's ranks into one answer.  Arithmetic only."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch

from weightcast.digest.definition import key_of
from weightcast.digest.table import EMPTY, DigestTable
from weightcast.errors import Refused
from weightcast.wire.answers import Cause, RankAck
from weightcast.wire.box import Box, tiles
from weightcast.wire.held import HeldPart, HeldTable
from weightcast.wire.layout import TensorSpec


class Resident:
    """The tensors that all ranks keep together.

    In ``broken``, parts do not make up the tensor, or differ between ranks that keep the same part.
    """

    def __init__(self, table: DigestTable, sums: torch.Tensor, broken: Sequence[str] = ()) -> None:
        """Takes the sum of each source tensor whose parts make up a whole, int64 ``[tensors]``."""
        self._table = table
        self._sums = sums
        self.broken = tuple(broken)

    @cached_property
    def digests(self) -> dict[str, str]:
        """Finished digest of each source tensor that is kept whole, by name."""
        found = self._table.by_name(self._sums)
        for name in self.broken:
            found.pop(name, None)
        return found

    def digest_of(self, specs: Sequence[TensorSpec], without: Collection[str] = ()) -> str:
        """``model_digest`` of some tensors, as ``DigestTable.of_some``; empty if one of them is not kept whole."""
        if self.broken and any(spec.name in self.broken and spec.name not in without for spec in specs):
            return ""
        return self._table.of_some(self._sums, specs, without)


NOTHING_KEPT = Resident(EMPTY, EMPTY.keys)


class ResidentFold:
    """Adds up the partial digests of all ranks.  The arithmetic for the ranks' tables of parts is worked out once.

    A box that several ranks keep (replicated weights, a tensor used in two places) counts once, and has one sum.
    """

    def __init__(self) -> None:
        # Of late, for their tables: what the ranks copy has more parts than what they read back, if a loader computes.
        self._known: list[tuple[list[HeldTable], _Folding]] = []

    def fold(self, acks: Sequence[RankAck]) -> Resident:
        """Folds the answers of all ranks, one each."""
        tables = [ack.parts for ack in acks]
        folding = next(
            (one for of, one in self._known if len(of) == len(tables) and all(map(operator.is_, of, tables))), None
        )
        if folding is None:
            folding = _Folding([part for table in tables for part in table])
            self._known = [(tables, folding), *self._known[:1]]
        return folding.fold([ack.held.totals for ack in acks])


class _Folding:
    """The arithmetic for one list of parts: a *group* is a box of a tensor, which one or several ranks keep."""

    def __init__(self, parts: Sequence[HeldPart]) -> None:
        by_name: dict[str, list[int]] = {}
        for number, part in enumerate(parts):
            by_name.setdefault(part.spec.name, []).append(number)
        names: list[str] = []
        self._broken: list[str] = []
        keys: list[int] = []
        firsts: list[int] = []  # of each group, the number of the first part
        tensors: list[int] = []  # of each group
        members: list[tuple[int, int]] = []  # number and group of each part
        for name, numbers in by_name.items():
            spec = parts[numbers[0]].spec
            groups: dict[Box, int] = {}
            for number in numbers:
                groups.setdefault(parts[number].box, number)
            alike = all(parts[number].spec == spec for number in numbers)
            if not alike or not tiles(groups, Box(offset=(0,) * len(spec.shape), shape=spec.shape)):
                self._broken.append(name)
                continue
            place = {box: len(firsts) + index for index, box in enumerate(groups)}
            members += [(number, place[parts[number].box]) for number in numbers]
            firsts += groups.values()
            tensors += [len(names)] * len(groups)
            names.append(name)
            keys.append(key_of(spec.torch_dtype, spec.shape))
        self._table = DigestTable(names, torch.tensor(keys, dtype=torch.int64))
        self._firsts, self._tensors = (torch.tensor(some, dtype=torch.int64) for some in (firsts, tensors))
        self._members = torch.tensor(members, dtype=torch.int64).view(-1, 2)

    def fold(self, totals: Sequence[torch.Tensor]) -> Resident:
        if not self._table.names:
            return Resident(EMPTY, EMPTY.keys, self._broken)
        values = torch.cat(list(totals))
        numbers, groups = self._members.unbind(1)
        differing = self._tensors[groups[values[numbers] != values[self._firsts[groups]]]].unique().tolist()
        sums = torch.zeros_like(self._table.keys).index_add_(0, self._tensors, values[self._firsts])
        wrong = [self._table.names[number] for number in differing]
        return Resident(self._table, sums, (*self._broken, *wrong))


def suspects(acks: Sequence[RankAck]) -> dict[str, tuple[int, ...]]:
    """The ranks that may be at fault if a tensor is not what was sent, by its name, unless all ranks may be.

    Where ranks differ in a part that they all keep, those whose sum most of them do not have; else all that keep a part
    of the tensor.
    """
    keepers: dict[str, dict[Box, dict[int, list[int]]]] = {}
    for ack in acks:
        for part, total in zip(ack.parts, ack.held.totals.tolist(), strict=True):
            keepers.setdefault(part.spec.name, {}).setdefault(part.box, {}).setdefault(total, []).append(ack.rank)
    found: dict[str, tuple[int, ...]] = {}
    for name, boxes in keepers.items():
        differing = [
            ranks
            for by_total in boxes.values()
            for ranks in by_total.values()
            if 2 * len(ranks) <= sum(map(len, by_total.values()))
        ]
        kept = [ranks for by_total in boxes.values() for ranks in by_total.values()]
        named = tuple(sorted({rank for ranks in differing or kept for rank in ranks}))
        if len(named) < len(acks):
            found[name] = named
    return found


def failures(acks: Sequence[RankAck]) -> tuple[tuple[int, ...], str]:
    """The ranks that failed and their errors: one text if all errors are equal."""
    failed = [ack for ack in acks if not ack.ok]
    texts = list(dict.fromkeys(ack.error for ack in failed))
    if len(texts) == 1 and len(failed) == len(acks):
        return tuple(ack.rank for ack in failed), texts[0]
    return tuple(ack.rank for ack in failed), "; ".join(f"rank {ack.rank}: {ack.error}" for ack in failed)


def check_all(acks: Sequence[RankAck]) -> None:
    """Raises ``Refused``, with the ranks' words, if one failed."""
    ranks, error = failures(acks)
    if ranks:
        raise Refused(error)


def cause_of(acks: Sequence[RankAck]) -> Cause:
    """The part that failed, if it is the same on every rank that failed; else ``engine``."""
    causes: set[Cause] = {ack.cause for ack in acks if not ack.ok}
    return causes.pop() if len(causes) == 1 else "engine"


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
