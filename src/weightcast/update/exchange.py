"""Sends one trainer rank's parts of each bucket to the engine ranks that keep them, for ``direct`` by messages.

Pieces for one engine rank that are small, or have gaps in the bucket, are packed into one buffer; large ones are sent
from where they lie.  The messages of one bucket are on their way while the next bucket is filled.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weightcast.comm.group_moves import Move, Relay, chains
from weightcast.comm.rendezvous import Invited
from weightcast.comm.update_group import UpdateGroup
from weightcast.errors import WeightcastError
from weightcast.exporters.held_parts import region
from weightcast.update.packs import PackPlan, Packs, Parts
from weightcast.wire.bucket import Bucket
from weightcast.wire.pieces import decode_wanted

_BUFFERS = 2


@dataclass(slots=True)
class _Cell:
    """One group, and this rank's messages in it.

    Attributes:
        told: The words of each engine rank: what it wants.
        hosts: The host whose memory each of them reads, as in ``Invited.reads``.
        kinds: For each engine rank that this rank sends to, by rank of the group: that host, and the kind.
    """

    group: UpdateGroup
    told: Sequence[bytes]
    hosts: Sequence[str]
    kinds: dict[int, tuple[str, int]] = field(default_factory=dict[int, "tuple[str, int]"])
    under_way: deque[tuple[str, list[Any]]] = field(default_factory=deque[tuple[str, list[Any]]])
    failed: WeightcastError | None = None


class Exchange:
    """This trainer rank's end of the groups of all cells, and its messages.

    A failure is kept for ``failures`` and not raised, so that all trainer ranks stay in step.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_trainers: int,
        device: torch.device,
        timeout_s: float,
        chains: bool = False,
        host: str = "",
    ) -> None:
        """Nothing is joined yet; ``timeout_s`` limits each wait.  ``chains`` sends to the first of each chain only."""
        self._rank = rank
        self._num_trainers = num_trainers
        self._device = device
        self._timeout_s = timeout_s
        self._host = host
        self._chains = chains
        # By name of their group, in an order that is the same on all ranks: NCCL connects two ranks at their first
        # message, and ranks that begin with different cells would wait for each other.
        self._cells: dict[str, _Cell] = {}
        # By the host whose memory the engine ranks read: the packs, and what the ranks want, by number of the kind.
        self._packs: dict[str, Packs] = {}
        self._words: dict[str, tuple[bytes, ...]] = {}
        self._buffers: list[torch.Tensor] = []

    def join(self, invitations: Sequence[Invited]) -> dict[str, str]:
        """Joins groups, on ranks other than the head; returns the failures by name of the group."""
        failures: dict[str, str] = {}

        def join(invited: Invited) -> None:
            try:
                group = UpdateGroup.join(
                    host=invited.host,
                    port=invited.port,
                    name=invited.group,
                    token=invited.token,
                    rank=self._rank,
                    world_size=invited.world_size,
                    device=self._device,
                    timeout_s=self._timeout_s,
                    tells=b"",
                )
                joined[invited.group] = group
            except WeightcastError as error:
                failures[invited.group] = str(error)

        joined: dict[str, UpdateGroup] = {}
        # All at once: a group that does not come about must not keep this rank away from the others.
        threads = [
            threading.Thread(target=join, args=(one,), name="weightcast-join", daemon=True) for one in invitations
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return failures | self.use({one: joined[one.group] for one in invitations if one.group in joined})

    def use(self, groups: Mapping[Invited, UpdateGroup]) -> dict[str, str]:
        """Takes groups that were joined, and reads what each engine rank wants; returns the failures likewise."""
        failures: dict[str, str] = {}
        for invited, group in groups.items():
            try:
                told = group.told(range(self._num_trainers, group.world_size))
                for words in dict.fromkeys(told):
                    decode_wanted(words)
            except WeightcastError as error:
                group.abort(str(error))
                failures[invited.group] = str(error)
                continue
            hosts = invited.reads or ("",) * len(told)
            self._cells[invited.group] = _Cell(group, told, hosts)
        self._sort()
        return failures

    def keep(self, names: Collection[str]) -> None:
        """Leaves all groups but these."""
        gone = [name for name in self._cells if name not in names]
        for name in gone:
            self._cells.pop(name).group.close()
        if gone:
            self._buffers.clear()  # a message that was given up may still be read from there
            self._sort()

    def _sort(self) -> None:
        """Numbers the kinds of the engine ranks of all cells."""
        words: dict[str, dict[bytes, int]] = {}
        for cell in self._cells.values():
            places = chains(cell.told, self._num_trainers) if self._chains else [Relay()] * len(cell.told)
            cell.kinds = {}
            for rank, (one, host, place) in enumerate(
                zip(cell.told, cell.hosts, places, strict=True), self._num_trainers
            ):
                if not place.upstream and not (host and host == self._host):
                    alike = words.setdefault(host, {})
                    cell.kinds[rank] = host, alike.setdefault(one, len(alike))
        known, self._words = self._words, {host: tuple(alike) for host, alike in words.items()}
        self._packs = {
            host: self._packs[host] if known.get(host) == alike else Packs([decode_wanted(one) for one in alike])
            for host, alike in self._words.items()
        }

    @property
    def failures(self) -> dict[str, str]:
        """The cells in which messages failed, by name of the group."""
        return {name: str(cell.failed) for name, cell in self._cells.items() if cell.failed is not None}

    def begin(self) -> None:
        """Starts an update: every cell gets all buckets."""
        for cell in self._cells.values():
            cell.failed = None

    def send(self, bucket: Bucket, parts: Mapping[str, Parts]) -> None:
        """Starts to send this rank's parts of a bucket to all cells that are well, then waits for the bucket before.

        ``parts`` are those for the engine ranks that read memory on each host; the host is empty for those that read
        none.
        """
        index = bucket.layout.index
        cells = [cell for cell in self._cells.values() if cell.failed is None]
        if not cells:
            return
        plans = {host: packs.plan(bucket.layout, parts[host]) for host, packs in self._packs.items()}
        packed = self._pack(bucket, plans)
        for cell in cells:
            try:
                sends = _sends(bucket, plans, packed, cell.kinds)
                cell.under_way.append((f"bucket {index}", cell.group.start_moves(sends)))
            except WeightcastError as error:
                cell.failed = error
                cell.under_way.clear()
        self._finish(1)

    def drain(self) -> None:
        """Waits until every bucket on its way has arrived."""
        self._finish(0)

    def _finish(self, rest: int) -> None:
        """Waits until so many buckets are on their way to each cell."""
        for cell in self._cells.values():
            while len(cell.under_way) > rest:
                what, works = cell.under_way.popleft()
                try:
                    cell.group.finish_moves(works, what=what, timeout_s=self._timeout_s)
                except WeightcastError as error:
                    cell.failed = cell.failed or error
                    cell.under_way.clear()

    def abort(self, reason: str) -> None:
        """Ends all waits of the groups; the next attempt makes others."""
        for cell in self._cells.values():
            cell.group.abort(reason)
            cell.under_way.clear()

    def close(self) -> None:
        """Leaves the groups and frees the buffers; safe to call twice."""
        self.keep(())
        self._buffers.clear()

    def _pack(self, bucket: Bucket, plans: Mapping[str, PackPlan]) -> dict[str, torch.Tensor]:
        """The small parts of a bucket put together, by the host whose memory their engine ranks read."""
        sizes = [plan.packed_bytes for plan in plans.values()]
        room = self._room(bucket.layout.index, sum(sizes))
        packed = dict(zip(plans, room[: sum(sizes)].split(sizes), strict=True))
        for host, plan in plans.items():
            self._packs[host].pack(bucket, plan, packed[host])
        return packed

    def _room(self, index: int, size_bytes: int) -> torch.Tensor:
        """One of two pack buffers, used in turn."""
        while len(self._buffers) < _BUFFERS:
            self._buffers.append(torch.empty(0, dtype=torch.uint8, device=self._device))
        turn = index % _BUFFERS
        if self._buffers[turn].numel() < size_bytes:
            self._buffers[turn] = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._buffers[turn] = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        return self._buffers[turn]


def _sends(
    bucket: Bucket,
    plans: Mapping[str, PackPlan],
    packed: Mapping[str, torch.Tensor],
    kinds: Mapping[int, tuple[str, int]],
) -> list[Move]:
    sends: list[Move] = []
    for peer, (host, kind) in kinds.items():
        message, start = plans[host].messages[kind], plans[host].starts[kind]
        if message.packed_bytes:
            sends.append(Move(peer, packed[host][start : start + message.packed_bytes]))
        for piece in message.pieces:
            if piece.straight:
                view = region(bucket, bucket.layout.slots[piece.slot], piece.box)
                first = view.data_ptr() - bucket.data.data_ptr()
                sends.append(Move(peer, bucket.data[first : first + piece.size_bytes]))
    return sends
