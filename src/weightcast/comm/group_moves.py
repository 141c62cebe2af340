"""Point-to-point messages among the members of a group of torch, all of one batch in flight at once.

Engine ranks that want the same boxes of the source tensors get the same bytes.  In the order of the group they may be a
chain: the trainer ranks send to the first one, it passes on what it has received to the second one, and so on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
import torch

from weightcast.runtime import blocking_threads

_POLL_S = 0.05
NUM_TAGS = 1 << 30
_HANG_UP_TAG = NUM_TAGS + 1


class Relay(msgspec.Struct, frozen=True, array_like=True):
    """Place of an engine rank in its chain: the ranks that pass pieces on to it, and that it passes them on to.

    These are ranks of the group.  Rank 0 is a trainer rank's, and stands for none.
    """

    upstream: int = 0
    downstream: int = 0


def chains(wanted: Sequence[bytes], first_rank: int) -> list[Relay]:
    """Returns the place of each engine rank, given ``encode_wanted`` of each; ``first_rank`` is that of the first."""
    last: dict[bytes, int] = {}
    upstream = [0] * len(wanted)
    downstream = [0] * len(wanted)
    for number, words in enumerate(wanted):
        before = last.get(words)
        if before is not None:
            upstream[number] = first_rank + before
            downstream[before] = first_rank + number
        last[words] = number
    return [Relay(*place) for place in zip(upstream, downstream, strict=True)]


class Move(NamedTuple):
    """One message: the other member's rank, and contiguous memory that is not empty, on the group's device.

    Among trainer ranks it has any dtype and shape; in an update group it is uint8.
    """

    peer: int
    data: torch.Tensor


class Tags:
    """Numbers the messages of two members alike at both ends: those with one tag may overtake each other in gloo."""

    def __init__(self) -> None:
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def of_send(self, peer: int) -> int:
        """The tag of the next message to a member."""
        self._sent[peer] += 1
        return self._sent[peer] % NUM_TAGS

    def of_receive(self, peer: int) -> int:
        """The tag of the next message from a member."""
        self._received[peer] += 1
        return self._received[peer] % NUM_TAGS


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


def start_apart(
    group: Any,
    device: torch.device,
    sends: Sequence[Move],
    receives: Sequence[Move],
    tags: Tags,
    look: Callable[[], None],
) -> list[Any]:
    """As ``start_moves`` on a GPU, but on a thread of its own; ``look`` is called while it waits, and may raise.

    NCCL connects two members at their first message, and waits for the other one with no deadline.  And torch counts
    the batches that a thread has begun: one that fails would hold up each later call of NCCL on the caller's thread, in
    other groups too.
    """
    stream = torch.cuda.current_stream(device)

    def start() -> list[Any]:
        torch.cuda.set_device(device)  # setting these for a block would end on GPU 0, with a context there
        torch.cuda.set_stream(stream)
        return start_moves(group, device, sends, receives, tags)

    return call_apart(start, look)


def call_apart(call: Callable[[], list[Any]], look: Callable[[], None]) -> list[Any]:
    """Calls a function on a thread that is left behind if ``look`` raises; returns or raises what it does."""
    made = blocking_threads.call(call, name="weightcast-start-moves")
    while wait([made], _POLL_S).not_done:
        look()
    return made.result()


def hang_up(group: Any) -> None:
    """Ends every wait of this process and of its peers in a gloo group."""
    # Gloo's own abort ends no wait, and destroying a group waits for operations under way.  A receive that times out
    # closes every connection of the group.
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8)
                group.recv([nothing], peer, _HANG_UP_TAG).wait(timedelta(milliseconds=1))
