"""Chains of engine ranks that pass a trainer's pieces on, so that trainer ranks send each piece once.

Engine ranks that want the same boxes of the source tensors get the same bytes.  In the order of the group they are a
chain: the trainer ranks send to the first one, it passes on what it has received to the second one, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Relay(msgspec.Struct, frozen=True, array_like=True):
    """Place of an engine rank in its chain, by ranks of the group.  Rank 0 is a trainer rank's, and stands for none.

    Attributes:
        upstream: The rank that passes pieces on to this one; 0 if it gets them from the trainer ranks.
        downstream: The rank that this one passes pieces on to; 0 if it is the last.
    """

    upstream: int = 0
    downstream: int = 0


def chains(wanted: Sequence[bytes], first_rank: int) -> list[Relay]:
    """Returns the place of each engine rank.

    Args:
        wanted: The boxes that each engine rank wants (``encode_wanted``), in order of rank.
        first_rank: Group rank of the first engine rank; at least 1.
    """
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
