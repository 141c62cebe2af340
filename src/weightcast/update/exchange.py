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

from weightcast.comm.group_moves import Move
from weightcast.comm.invited import Invited
from weightcast.comm.relays import Relay, chains
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
        kinds: Kind of each engine rank that trainer ranks send to, by rank of the group.
        due: Index of the bucket that it gets next.
        again: Number of buckets that were sent before, to a group that failed.
    """

    group: UpdateGroup
    told: Sequence[bytes]
    kinds: dict[int, int] = field(default_factory=dict[int, int])
    due: int = 0
    again: int = 0
    under_way: deque[tuple[str, list[Any]]] = field(default_factory=deque[tuple[str, list[Any]]])
    failed: WeightcastError | None = None


class Exchange:
    """This trainer rank's end of the groups of all cells, and its messages.

    A failure is kept for ``failures`` and not raised, so that all trainer ranks stay in step.
    """

    def __init__(
        self, *, rank: int, num_trainers: int, device: torch.device, timeout_s: float, relays: bool = False
    ) -> None:
        """Nothing is joined yet; ``timeout_s`` limits each wait.  ``relays`` sends to the first of each chain only."""
        self._rank = rank
        self._num_trainers = num_trainers
        self._device = device
        self._timeout_s = timeout_s
        self._cells: dict[str, _Cell] = {}  # by name of their group
        self._packs = Packs(())
        self._words: tuple[bytes, ...] = ()  # what engine ranks want, by number of the kind
        self._relays = relays
        self._buffers: list[torch.Tensor] = []
        self.sent_bytes = self.resent_bytes = 0

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
            self._cells[invited.group] = _Cell(group, told, due=invited.first, again=invited.begun)
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
        words = tuple(dict.fromkeys(one for cell in self._cells.values() for one in cell.told))
        if words != self._words:
            self._words, self._packs = words, Packs([decode_wanted(one) for one in words])
        kinds = {one: number for number, one in enumerate(words)}
        for cell in self._cells.values():
            told = cell.told
            places = chains(told, self._num_trainers) if self._relays else [Relay()] * len(told)
            cell.kinds = {
                rank: kinds[one]
                for rank, (one, place) in enumerate(zip(told, places, strict=True), self._num_trainers)
                if not place.upstream
            }

    @property
    def failures(self) -> dict[str, str]:
        """The cells in which messages failed, by name of the group."""
        return {name: str(cell.failed) for name, cell in self._cells.items() if cell.failed is not None}

    def begin(self) -> None:
        """Starts an update: every cell gets all buckets."""
        for cell in self._cells.values():
            cell.failed = None
            cell.due = cell.again = 0
        self.sent_bytes = self.resent_bytes = 0

    def send(self, bucket: Bucket, parts: Parts) -> None:
        """Starts to send this rank's parts of a bucket to the cells that need it, then waits for the bucket before."""
        index = bucket.layout.index
        cells = [cell for cell in self._cells.values() if cell.failed is None and cell.due <= index]
        if not cells:
            return
        plan = self._packs.plan(bucket.layout, parts)
        packed = self._room(index, plan.packed_bytes)
        self._packs.pack(bucket, plan, packed)
        for cell in cells:
            cell.due = index + 1
            try:
                sends = self._sends(bucket, plan, packed, cell.kinds)
                cell.under_way.append((f"bucket {index}", cell.group.start_moves(sends)))
                size_bytes = sum(move.data.numel() for move in sends)
                self.sent_bytes += size_bytes
                self.resent_bytes += size_bytes if index < cell.again else 0
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

    def _sends(self, bucket: Bucket, plan: PackPlan, packed: torch.Tensor, kinds: Mapping[int, int]) -> list[Move]:
        sends: list[Move] = []
        for peer, kind in kinds.items():
            message, start = plan.messages[kind], plan.starts[kind]
            if message.packed_bytes:
                sends.append(Move(peer, packed[start : start + message.packed_bytes]))
            for piece in message.pieces:
                if piece.straight:
                    view = region(bucket, bucket.layout.slots[piece.slot], piece.box)
                    first = view.data_ptr() - bucket.data.data_ptr()
                    sends.append(Move(peer, bucket.data[first : first + piece.size_bytes]))
        return sends

    def _room(self, index: int, size_bytes: int) -> torch.Tensor:
        """One of two pack buffers, used in turn."""
        while len(self._buffers) < _BUFFERS:
            self._buffers.append(torch.empty(0, dtype=torch.uint8, device=self._device))
        turn = index % _BUFFERS
        if self._buffers[turn].numel() < size_bytes:
            self._buffers[turn] = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._buffers[turn] = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        return self._buffers[turn]
