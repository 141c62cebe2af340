"""Counts the bytes that a trainer rank gives to process groups."""

from __future__ import annotations

from typing import Any

import torch

from weightcast.comm import group_moves, update_group
from weightcast.comm.group_moves import Move


class Sent:
    """Counts the bytes of messages that this rank gives to a process group, where they leave this package."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._start = group_moves.start_moves
        group_moves.start_moves = update_group.start_moves = self._counting  # the second one is called on CPUs

    def _counting(self, group: Any, device: torch.device, sends: list[Move], *rest: Any) -> Any:
        self.size_bytes += sum(move.data.numel() for move in sends)
        return self._start(group, device, sends, *rest)
