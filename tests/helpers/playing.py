"""Plays the trainer ranks of a job in one process, one after the other, and counts the bytes that they exchange."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from weightcast.comm.trainer_group import Move, TrainerGroup
from weightcast.digest.copies import host_bytes


class Waiting(Exception):
    """The rank waits for a message that no rank has sent yet."""


class Game:
    """Messages between ranks that are played one after the other.

    A rank that would wait is stopped, and later played again from its start, so what a rank does must be repeatable.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.hosts = ("here",) * world_size  # shared by all ranks
        self.gathered: list[dict[int, bytes]] = []
        self.told: list[bytes] = []
        self.moved: dict[tuple[int, int, int], torch.Tensor] = {}  # by source, target and number

    @property
    def head_bytes(self) -> int:
        """Bytes that the head received and sent."""
        into = sum(len(message) for messages in self.gathered for rank, message in messages.items() if rank)
        return into + sum(map(len, self.told)) * (self.world_size - 1)

    @property
    def rank_bytes(self) -> int:
        """Most bytes that another rank received and sent."""
        most = max(sum(len(g.get(rank, b"")) for g in self.gathered) for rank in range(1, self.world_size))
        return most + sum(map(len, self.told))

    def play(self, act: Callable[[int, TrainerGroup], Any], ranks: Iterable[int] = ()) -> dict[int, Any]:
        """Results of ``act(rank, group)`` on each of these ranks; on all ranks if none are named.

        An exception of a rank is its result.
        """
        wanted = list(ranks) or list(range(self.world_size))
        results: dict[int, Any] = {}
        waiting = [*range(1, self.world_size), 0]  # the head hears the others, so it comes last
        for _ in range(8):
            for rank in list(waiting):
                try:
                    results[rank] = act(rank, cast(TrainerGroup, _Rank(self, rank)))
                except Waiting:
                    continue
                except Exception as error:  # noqa: BLE001
                    results[rank] = error
                waiting.remove(rank)
            if not any(rank in waiting for rank in (0, *wanted)):
                break
            if 0 not in waiting:
                waiting = [rank for rank in waiting if rank in wanted]
        return {rank: results[rank] for rank in wanted}


class _Rank:
    """The part of ``TrainerGroup`` that a played rank needs."""

    def __init__(self, game: Game, rank: int) -> None:
        self.rank, self.world_size, self.device = rank, game.world_size, torch.device("cpu")
        self.hosts = game.hosts
        self._game = game
        self._gathers = self._broadcasts = 0
        self._moves = Counter[tuple[int, int]]()

    @property
    def is_head(self) -> bool:
        return self.rank == 0

    def gather_bytes(self, payload: bytes, *, timeout_s: float | None = None) -> list[bytes] | None:
        if len(self._game.gathered) == self._gathers:
            self._game.gathered.append({})
        messages = self._game.gathered[self._gathers]
        self._gathers += 1
        assert messages.setdefault(self.rank, payload) == payload, "the rank is not repeatable"
        if self.rank:
            return None
        if len(messages) < self.world_size:
            raise Waiting
        return [messages[rank] for rank in range(self.world_size)]

    def add_up(self, values: torch.Tensor, *, timeout_s: float) -> torch.Tensor | None:
        told = self.gather_bytes(host_bytes(values))
        if told is None:
            return None
        return torch.stack([torch.frombuffer(bytearray(one), dtype=torch.int64) for one in told]).sum(0)

    def move(self, sends: Sequence[Move], receives: Sequence[Move], *, what: str) -> None:
        for peer, data in sends:
            self._game.moved[self._next_move(self.rank, peer)] = data.clone()
        coming = [(self._next_move(peer, self.rank), data) for peer, data in receives]
        if any(key not in self._game.moved for key, _ in coming):
            raise Waiting
        for key, data in coming:
            data.copy_(self._game.moved[key])

    def _next_move(self, source: int, target: int) -> tuple[int, int, int]:
        self._moves[source, target] += 1
        return source, target, self._moves[source, target]

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        number = self._broadcasts
        self._broadcasts += 1
        if not self.rank and len(self._game.told) == number:
            assert payload is not None
            self._game.told.append(payload)
        if len(self._game.told) == number:
            raise Waiting
        return self._game.told[number]


def mesh_of(ranks: torch.Tensor, rank: int) -> DeviceMesh:
    """A mesh without process groups, as one of its ranks sees it."""
    return DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)
