"""Digest sums that trainer ranks take of what they hold, before any of it is gathered.

A digest is a sum over the boxes of a tensor.  So each trainer rank sums its own shards, one rank adds the sums of all,
and the result is what engines must answer for what they received.  Nothing between the trainer's own memory and the
engine's is left out: the gather among the trainer ranks, the copy into a bucket, the wire.

This module knows ranks, slots and numbers.  Exporters know how each tensor is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from weightcast.wire.layout import BucketLayout


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor whose bytes differ between trainer ranks, in groups that agree, the lowest rank's first.

    If it was ``gathered``, the last group received its bytes from the first; else a replica has diverged.
    """

    name: str
    ranks: tuple[tuple[int, ...], ...]
    gathered: bool = False

    def __str__(self) -> str:
        who = [_ranks(group) for group in self.ranks]
        if self.gathered:
            return f"{self.name}: {who[-1]} received other bytes than the trainer ranks hold"
        return f"{self.name}: {' and '.join(who)} hold different values"


@dataclass(frozen=True, slots=True)
class Folded:
    """The sums of all trainer ranks for one bucket: int64 ``[slots]`` on the CPU, to be read mod 2**64.

    ``known`` is false for a slot that no rank has summed at its source.
    """

    sums: torch.Tensor
    known: torch.Tensor
    mismatches: tuple[Mismatch, ...] = ()

    @staticmethod
    def unknown(layout: BucketLayout) -> Folded:
        """The sums of a bucket that no rank has summed."""
        count = len(layout.slots)
        return Folded(torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.bool))


class SourceSums:
    """The sums that one rank takes in one update.  They stay on their devices until ``values`` is asked for.

    ``finite`` is the bucket that was filled last, if all its values were seen to be finite when they were summed.
    """

    def __init__(self) -> None:
        self.finite: BucketLayout | None = None
        self._count = 0
        self._taken: list[tuple[torch.Tensor, torch.Tensor]] = []

    def reserve(self, count: int) -> Taker:
        """Reserves the next ``count`` sums, each 0 until something is added to it."""
        first = self._count
        self._count += count
        return Taker(self, first)

    def add(self, places: torch.Tensor, sums: torch.Tensor) -> None:
        """Add ``sums``, int64 ``[len(places)]`` on any device, to places: int64, likewise, on the CPU."""
        self._taken.append((places, sums))

    def values(self) -> torch.Tensor:
        """All sums in order, int64 on the CPU.  Waits for the devices."""
        found = torch.zeros(self._count, dtype=torch.int64)
        by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for taken in self._taken:
            by_device.setdefault(taken[1].device, []).append(taken)
        for some in by_device.values():  # one copy to the host for each device
            places = torch.cat([places for places, _ in some])
            found.index_add_(0, places, torch.cat([sums for _, sums in some]).cpu())
        return found


@dataclass(frozen=True, slots=True)
class Taker:
    """The places of one bucket among all sums of a rank."""

    sums: SourceSums
    first: int

    def add(self, places: torch.Tensor, sums: torch.Tensor) -> None:
        """Add ``sums``, int64 ``[len(places)]``, to these places of the bucket: int64, likewise, on the CPU."""
        self.sums.add(places + self.first, sums)


@dataclass(slots=True)
class Ledger:
    """Which rank sums which part of a bucket, and in which order.  Every rank makes the same one.

    A *group* is one part that several ranks may hold: their sums must be equal.  A group with a slot counts once
    towards the sum of that slot.  A group without one is only compared: the memory that a sent value is computed from.
    """

    num_slots: int
    _names: list[str] = field(default_factory=list[str])
    _slots: list[int] = field(default_factory=list[int])
    _rows: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    _table: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # made by ``prepare``
    _each_once: bool = False  # one rank sums each slot, in their order; made likewise

    def group(self, name: str, slot: int | None) -> int:
        """A new group: a part of the tensor ``name``, counted in ``slot`` if that is given."""
        self._names.append(name)
        self._slots.append(-1 if slot is None else slot)
        return len(self._names) - 1

    def expect(self, rank: int, group: int) -> int:
        """Adds that the rank sums the group; returns the place of that sum among the rank's own of this bucket."""
        mine = self._rows.setdefault(rank, [])
        mine.append(group)
        return len(mine) - 1

    def count(self, rank: int) -> int:
        """How many sums a rank takes of this bucket."""
        return len(self._rows.get(rank, ()))

    def prepare(self, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Works out what ``fold`` needs for the sums of so many ranks; nothing is expected after that."""
        if self._table is None:
            self._table = self._tabulate(num_ranks)
        return self._table

    def fold(self, answers: Sequence[torch.Tensor]) -> Folded:
        """Adds the sums of all ranks; those of each rank, in order, are int64 ``[count(rank)]`` on the CPU."""
        groups, firsts, slots = self.prepare(len(answers))
        values = torch.cat(list(answers))
        known = torch.ones(self.num_slots, dtype=torch.bool)
        if self._each_once:
            return Folded(values, known)
        counted = (slots >= 0) & (firsts < len(groups))
        totals = torch.zeros(self.num_slots, dtype=torch.int64).index_add_(0, slots[counted], values[firsts[counted]])
        wrong = groups[values != values[firsts[groups]]].unique().tolist() if len(groups) else []
        mismatches = tuple(self._mismatch(group, answers) for group in wrong)
        return Folded(totals, known, mismatches)

    def _tabulate(self, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The group of each sum, the first sum of each group (the one that counts), and the slot of each group."""
        listed = [group for rank in range(num_ranks) for group in self._rows.get(rank, ())]
        groups, count = torch.tensor(listed, dtype=torch.int64), len(self._names)
        firsts = torch.full((count,), len(groups), dtype=torch.int64).scatter_reduce_(
            0, groups, torch.arange(len(groups)), "amin"
        )
        slots = torch.tensor(self._slots, dtype=torch.int64)
        in_order = torch.arange(self.num_slots)
        self._each_once = torch.equal(groups, in_order) and torch.equal(slots, in_order)
        return groups, firsts, slots

    def _mismatch(self, group: int, answers: Sequence[torch.Tensor]) -> Mismatch:
        by_value: dict[int, list[int]] = {}
        for rank, answer in enumerate(answers):
            mine = self._rows.get(rank, ())
            if group in mine:
                by_value.setdefault(int(answer[mine.index(group)]), []).append(rank)
        return Mismatch(self._names[group], tuple(tuple(ranks) for ranks in by_value.values()))


def _ranks(ranks: Sequence[int]) -> str:
    return f"trainer rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
