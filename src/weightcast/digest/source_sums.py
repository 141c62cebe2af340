"""Digest sums that trainer ranks take of what they hold, before any of it is gathered.

A digest is a sum over the boxes of a tensor.  So each trainer rank sums its own shards, the sums of all ranks are added
up, and the result is what engines must answer for what they received.  Nothing between the trainer's own memory and the
engine's is left out: the gather among the trainer ranks, the copy into a bucket, the wire.

A rank knows by itself which sums it takes.  A part that several ranks hold counts once, at the first of them, and all
of them compare its sum.  They do that with one number, the balance: the first rank adds a hash of what it compares for
each other rank, and each of these subtracts its own.  Over all ranks it is 0 if all replicas are equal.

This module knows ranks, slots and numbers.  Exporters know how each tensor is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import NamedTuple

import torch

from weightcast.digest.copies import host_bytes


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


class Compared(NamedTuple):
    """A part of the tensor ``name`` whose sums must be equal on all of ``ranks``, which are in order.

    Attributes:
        slot: Number of the slot to which the first rank adds the sum; None if the part is only compared.
        gathered: True for a whole slot as each rank received it: the sum must be that of the slot.
    """

    name: str
    ranks: tuple[int, ...]
    slot: int | None
    gathered: bool = False


class Alike(NamedTuple):
    """Parts of one bucket that the same ranks compare.

    Attributes:
        numbers: Numbers of the parts among ``SumPlaces.compared``, int64.
        ranks_hash: Hash of the ranks.
    """

    ranks: tuple[int, ...]
    numbers: torch.Tensor
    ranks_hash: bytes


class SumPlaces:
    """The places of one rank's sums of one bucket, worked out once.

    The first places are the totals: one for each slot, then any others that all ranks have.  What ranks add there is
    added up over all ranks.  A part that is compared has a place of its own behind them.
    """

    def __init__(self, rank: int, num_slots: int, more_totals: int = 0) -> None:
        self.rank = rank
        self.num_slots = num_slots
        self.num_totals = num_slots + more_totals
        self.compared: list[Compared] = []

    @property
    def count(self) -> int:
        """Number of places."""
        return self.num_totals + len(self.compared)

    def place(self, name: str, slot: int | None, ranks: Sequence[int], *, gathered: bool = False) -> int:
        """The place of this rank's sum of a part that ``ranks`` sum, of which it is one; see ``Compared``."""
        if len(ranks) == 1 and slot is not None and not gathered:
            return slot
        self.compared.append(Compared(name, tuple(ranks), slot, gathered))
        return self.count - 1

    def prepare(self) -> None:
        """Works out what ``SourceSums`` needs; no place is added after that."""
        _ = self.alike, self._counted, self._received

    @cached_property
    def alike(self) -> list[Alike]:
        """The parts that are compared, by the ranks that compare them; in the same order on each of these."""
        same: dict[int, list[int]] = {}  # by object first: to hash thousands of ranks for each part takes long
        for number, one in enumerate(self.compared):
            same.setdefault(id(one.ranks), []).append(number)
        numbers: dict[tuple[int, ...], list[int]] = {}
        for some in same.values():
            numbers.setdefault(self.compared[some[0]].ranks, []).extend(some)
        return [Alike(ranks, torch.tensor(sorted(some)), _hash_of(ranks)) for ranks, some in numbers.items()]

    @cached_property
    def _counted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Places of what is compared and added to a slot by this rank, and the slots."""
        found = [
            (self.num_totals + number, one.slot)
            for number, one in enumerate(self.compared)
            if one.slot is not None and one.ranks[0] == self.rank and not one.gathered
        ]
        places, slots = torch.tensor(found, dtype=torch.int64).view(-1, 2).unbind(1)
        return places, slots

    @cached_property
    def _received(self) -> list[tuple[int, int]]:
        """Place and slot of each slot that is summed as it was received."""
        found = ((self.num_totals + number, one) for number, one in enumerate(self.compared))
        return [(place, one.slot) for place, one in found if one.gathered and one.slot is not None]

    def totals(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's share of the totals, given its sums: int64 ``[count]`` on the CPU."""
        if not self.compared:
            return values
        places, slots = self._counted
        return values[: self.num_totals].index_add(0, slots, values[places])

    def balance(self, bucket: int, values: torch.Tensor) -> int:
        """This rank's share of the balance of the bucket with this number."""
        found = 0
        for ranks, numbers, ranks_hash in self.alike:
            # Two parts of equal shapes may be exchanged on a rank, so bucket, ranks and order are hashed too.
            salt = ranks_hash + bucket.to_bytes(8, "little")
            compared = host_bytes(values[self.num_totals + numbers])
            word = int.from_bytes(blake2b(compared, digest_size=8, salt=salt).digest(), "little")
            found += word * (len(ranks) - 1) if ranks[0] == self.rank else -word
        return found

    def received_otherwise(self, values: torch.Tensor, totals: torch.Tensor) -> bool:
        """True if this rank received a slot with another sum than its total, given the totals of all ranks."""
        return any(bool(values[place] != totals[slot]) for place, slot in self._received)

    def mismatches(self, alike: Alike, sums: torch.Tensor, totals: torch.Tensor | None) -> Iterator[Mismatch]:
        """The parts that differ, given the sums of all ranks that compare them: int64 ``[ranks, numbers]``.

        ``totals`` are those of all ranks, on the head.
        """
        compared = [self.compared[number] for number in alike.numbers.tolist()]
        right = sums[0].clone()
        for number, one in enumerate(compared):
            if one.gathered and totals is not None:
                right[number] = totals[one.slot]
        for number in (sums != right).any(0).nonzero()[:, 0].tolist():
            by_value: dict[int, list[int]] = {}
            for rank, value in zip(alike.ranks, sums[:, number].tolist(), strict=True):
                by_value.setdefault(value, []).append(rank)
            if compared[number].gathered:
                by_value.pop(int(right[number]), None)
                others = sorted(rank for ranks in by_value.values() for rank in ranks)
                yield Mismatch(compared[number].name, (tuple(others),), gathered=True)
            else:
                yield Mismatch(compared[number].name, tuple(map(tuple, by_value.values())))


class Taker:
    """Takes this rank's sums of one bucket in one update.

    ``finite`` is set to True if all values of the bucket were seen to be finite when they were summed.
    """

    def __init__(self, taken: list[tuple[torch.Tensor, torch.Tensor]], places: torch.Tensor) -> None:
        """``places`` are those of the bucket among all that is ``taken``."""
        self.finite = False
        self._taken = taken
        self._places = places

    def add(self, places: torch.Tensor, sums: torch.Tensor) -> None:
        """Adds ``sums``, int64 ``[len(places)]`` on any device, to places: int64, likewise, on the CPU."""
        self._taken.append((self._places[places], sums))

    def part(self, places: torch.Tensor) -> Taker:
        """Takes the sums of a part of the bucket, given the place here of each place there, as ``join`` does."""
        return Taker(self._taken, self._places[places])


class SourceSums:
    """The sums that one rank takes in one update.  They stay on their devices until they are asked for.

    ``takers`` has one for each bucket.
    """

    def __init__(self, places: Sequence[SumPlaces]) -> None:
        self.places = places
        self._taken: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._counts = [one.count for one in places]
        self._size = sum(self._counts)
        self.takers = [Taker(self._taken, mine) for mine in torch.arange(self._size).split(self._counts)]

    @cached_property
    def values(self) -> Sequence[torch.Tensor]:
        """The sums of each bucket, int64 on the CPU.  Waits for the devices; nothing is taken after that."""
        found = torch.zeros(self._size, dtype=torch.int64)
        by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for taken in self._taken:
            by_device.setdefault(taken[1].device, []).append(taken)
        for some in by_device.values():  # one copy to the host for each device
            places = torch.cat([places for places, _ in some])
            found.index_add_(0, places, torch.cat([sums for _, sums in some]).cpu())
        self._taken.clear()
        return found.split(self._counts)

    def to_add_up(self) -> torch.Tensor:
        """This rank's share of the balance and of all totals, int64 on the CPU: ranks add it up mod 2**64."""
        each = list(zip(self.places, self.values, strict=True))
        balance = sum(places.balance(number, values) for number, (places, values) in enumerate(each))
        first = torch.tensor([(balance + 2**63) % 2**64 - 2**63])
        return torch.cat([first, *(places.totals(values) for places, values in each)])


@dataclass(frozen=True, slots=True)
class AllSums:
    """The sums of all trainer ranks; the head has them.

    Attributes:
        own: This rank's sums; None if it took none.
        totals: The totals of each bucket, int64 on the CPU, to be read mod 2**64; empty on other ranks.
        buckets: Sums of the slots of each bucket that other ranks took of their own buckets, by rank.
        differ: True if replicas differ, or a rank received other bytes than the ranks hold.
    """

    own: SourceSums | None = None
    totals: Sequence[torch.Tensor] = ()
    buckets: dict[int, list[torch.Tensor]] = field(default_factory=dict[int, list[torch.Tensor]])
    differ: bool = False

    @staticmethod
    def of(own: SourceSums, added: torch.Tensor, buckets: dict[int, list[torch.Tensor]]) -> AllSums:
        """Reads on the head what all ranks had ``to_add_up``."""
        balance, *totals = added.split([1, *(one.num_totals for one in own.places)])
        each = zip(own.places, own.values, totals, strict=True)
        differ = bool(balance) or any(places.received_otherwise(values, mine) for places, values, mine in each)
        return AllSums(own, totals, buckets, differ)

    @property
    def sources(self) -> list[torch.Tensor]:
        """The sums of the slots of each bucket."""
        places = self.own.places if self.own is not None else ()
        return [totals[: one.num_slots] for one, totals in zip(places, self.totals, strict=True)]


def join(
    rank: int, num_slots: int, parts: Sequence[tuple[SumPlaces, Sequence[int], Callable[[str], str]]]
) -> tuple[SumPlaces, list[torch.Tensor]]:
    """Joins the places of parts of a bucket.

    Args:
        parts: Places of each part, the numbers of its slots in the bucket, and its tensors' names there by theirs.  A
            slot without a number becomes a total behind all slots.

    Returns:
        The places of the bucket; and for each part the place there of each of its places.
    """
    more = sum(places.num_totals - len(numbers) for places, numbers, _ in parts)
    joint, found, last = SumPlaces(rank, num_slots, more), list[torch.Tensor](), num_slots
    for places, numbers, rename in parts:
        size = places.num_totals - len(numbers)
        totals, first = [*numbers, *range(last, last + size)], joint.count
        last += size
        joint.compared += [
            one._replace(name=rename(one.name), slot=None if one.slot is None else totals[one.slot])
            for one in places.compared
        ]
        found.append(torch.tensor([*totals, *range(first, joint.count)], dtype=torch.int64))
    return joint, found


@lru_cache(maxsize=256)
def _hash_of(ranks: tuple[int, ...]) -> bytes:
    return blake2b(repr(ranks).encode(), digest_size=8).digest()


def _ranks(ranks: Sequence[int]) -> str:
    return f"trainer rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
