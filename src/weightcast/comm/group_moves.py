"""Point-to-point messages among the members of an update group, all of one batch in flight at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

_TAGS = 1 << 29  # below the tag by which a group hangs up


class Move(NamedTuple):
    """One message: the other member's rank, and contiguous uint8 memory that is not empty."""

    peer: int
    data: torch.Tensor


class Tags:
    """Numbers the messages between this member and each other one, the same at both ends.

    Gloo matches messages by tag, and messages with one tag may overtake each other.
    """

    def __init__(self) -> None:
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def of_send(self, peer: int) -> int:
        """The tag of the next message to a member."""
        self._sent[peer] += 1
        return self._sent[peer] % _TAGS

    def of_receive(self, peer: int) -> int:
        """The tag of the next message from a member."""
        self._received[peer] += 1
        return self._received[peer] % _TAGS


def start_moves(
    group: Any, device: torch.device, sends: Sequence[Move], receives: Sequence[Move], tags: Tags
) -> list[Any]:
    """Starts a batch in a process group of torch; returns handles, or raises torch's RuntimeError if a peer is gone."""
    if not sends and not receives:
        return []
    if device.type == "cuda":
        # One launch for all of them: NCCL would else wait for the first one before it starts the second.
        group._start_coalescing()
        for peer, data in receives:
            group.recv([data], peer, 0)
        for peer, data in sends:
            group.send([data], peer, 0)
        return [group._end_coalescing()]
    works = [group.recv([data], peer, tags.of_receive(peer)) for peer, data in receives]
    works += [group.send([data], peer, tags.of_send(peer)) for peer, data in sends]
    return works
