"""Sends one trainer rank's parts of each bucket to the engine ranks that keep them, for ``direct`` by messages.

Pieces for one engine rank that are small, or have gaps in the bucket, are packed into one buffer; large ones are sent
from where they lie.  The messages of one bucket are on their way while the next bucket is filled.
"""

from __future__ import annotations

from collections import deque
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


class Exchange:
    """This trainer rank's end of the group, and its messages.

    A failure is kept for ``failed`` and not raised, so that all trainer ranks stay in step.
    """

    def __init__(
        self, *, rank: int, num_trainers: int, device: torch.device, timeout_s: float, relays: bool = False
    ) -> None:
        """Nothing is joined yet; ``timeout_s`` limits each wait.  ``relays`` sends to the first of each chain only."""
        self._rank = rank
        self._num_trainers = num_trainers
        self._device = device
        self._timeout_s = timeout_s
        self._group: UpdateGroup | None = None
        self._packs = Packs(())
        self._relays = relays
        self._kinds: dict[int, int] = {}  # of each engine rank that trainer ranks send to, by rank of the group
        self._buffers: list[torch.Tensor] = []
        self._under_way: deque[tuple[str, list[Any]]] = deque()
        self.failed: WeightcastError | None = None
        self.sent_bytes = 0

    def join(self, invited: Invited) -> None:
        """Joins a group, on ranks other than the head.

        Raises:
            DeadlineExceeded, GroupFailed: The others did not come, or the head cannot be reached.
        """
        self.close()
        self.use(
            UpdateGroup.join(
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
        )

    def use(self, group: UpdateGroup) -> None:
        """Takes a group that was joined, and reads what each engine rank wants.

        Raises:
            GroupFailed: The rendezvous is gone.
            WireError: What an engine rank wants cannot be read.
        """
        self._group = group
        told = group.told(range(self._num_trainers, group.world_size))
        kinds = {words: number for number, words in enumerate(dict.fromkeys(told))}
        self._packs = Packs([decode_wanted(words) for words in kinds])
        places = chains(told, self._num_trainers) if self._relays else [Relay()] * len(told)
        self._kinds = {
            rank: kinds[words]
            for rank, (words, place) in enumerate(zip(told, places, strict=True), self._num_trainers)
            if not place.upstream
        }

    def begin(self) -> None:
        """Forgets a failure of the attempt before."""
        self.failed = None
        self.sent_bytes = 0

    def send(self, bucket: Bucket, parts: Parts) -> None:
        """Starts to send this rank's parts of a bucket, then waits for the bucket before."""
        if self.failed is not None:
            return
        try:
            assert self._group is not None
            sends = self._sends(bucket, self._packs.plan(bucket.layout, parts))
            self._under_way.append((f"bucket {bucket.layout.index}", self._group.start_moves(sends)))
            self.sent_bytes += sum(move.data.numel() for move in sends)
        except WeightcastError as error:
            self.failed = error
        self._finish(1)

    def drain(self) -> None:
        """Waits until every bucket on its way has arrived."""
        self._finish(0)

    def _finish(self, rest: int) -> None:
        """Waits until so many buckets are on their way."""
        while len(self._under_way) > rest:
            what, works = self._under_way.popleft()
            try:
                assert self._group is not None
                self._group.finish_moves(works, what=what, timeout_s=self._timeout_s)
            except WeightcastError as error:
                self.failed = self.failed or error
                self._under_way.clear()

    def abort(self, reason: str) -> None:
        """Ends all waits of the group; the next attempt makes another one."""
        if self._group is not None:
            self._group.abort(reason)
        self._under_way.clear()

    def close(self) -> None:
        """Leaves the group and frees the buffers; safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            group.close()
        self._buffers.clear()
        self._under_way.clear()

    def _sends(self, bucket: Bucket, plan: PackPlan) -> list[Move]:
        packed = self._room(bucket.layout.index, plan.packed_bytes)
        self._packs.pack(bucket, plan, packed)
        sends: list[Move] = []
        for peer, kind in self._kinds.items():
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
