"""The plan of the updates to come: by what each target gets the weights, and which trainer ranks fill buckets for it.

The head makes it at ``connect`` (``update/choose.py``), and every trainer rank hears it.  It never changes.  Where a
target comes back as another engine or a transport fails, the head makes another plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Literal

import msgspec

from weightcast.protocols import Sharing
from weightcast.report import LegReport
from weightcast.wire.blobs import hash_of
from weightcast.wire.layout import Packing, TensorSpec

# What carries bytes from a trainer rank to an engine rank: "mapped" (the engine reads the weights where the trainer
# keeps them), "buffer" (it reads a shared bucket), "group" (NCCL or gloo), "rdma" (it reads through NIXL), "file".
CarrierName = Literal["mapped", "buffer", "group", "rdma", "file"]
_MEMORY: frozenset[CarrierName] = frozenset(("mapped", "buffer", "rdma"))


def reads_memory(carriers: Collection[str]) -> bool:
    """True if engine ranks read memory of trainer ranks."""
    return not _MEMORY.isdisjoint(carriers)


class TargetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How one target gets the weights.

    Attributes:
        transport: Name of the transport; empty for a target that was not planned for.
        variant, carriers, gathers, chains, cells: As ``TransportSpec``.
        sharing: Form of the handles to a shared buffer.
        near: Engine ranks that join no group, because they read all in memory of their own host, where others do;
            otherwise empty.
        reads: For each engine rank, the host whose trainer ranks' memory it reads, empty for none; no entries unless
            each rank gets its share over legs of its own.
        opens: First and end of the target's part of torch's handles to a buffer.
        legs: The way to each rank, from each trainer rank; as ``TargetReport.legs``.
    """

    url: str = ""
    transport: str = ""
    variant: str = ""
    carriers: tuple[CarrierName, ...] = ()
    gathers: bool = True
    chains: bool = False
    cells: int = 0
    sharing: Sharing = "weightcast"
    near: tuple[int, ...] = ()
    reads: tuple[str, ...] = ()
    opens: tuple[int, int] = (0, 0)
    legs: tuple[LegReport, ...] = ()

    @property
    def reads_memory(self) -> bool:
        """True if engine ranks read memory of trainer ranks."""
        return reads_memory(self.carriers)

    @property
    def reads_remotely(self) -> bool:
        """True if they read it through NIXL."""
        return self.sharing == "remote"


class UpdatePlan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The plan of the updates to come, the same on every trainer rank.

    Attributes:
        transport: Name of the transport; several names joined by ``+`` if targets are reached in different ways.
        targets: The targets that were there when it was made.
        bucket_bytes: Size of a bucket, in bytes.
        packing: Rules for buckets that every engine can read.
        receivers: The trainer ranks that fill a bucket.
        reading_hosts: Hosts on which engines read trainer ranks' own parts, so that each part is served there; empty if
            one rank serves it to all engines.
        leg_hosts: Hosts on which engine ranks read trainer ranks' own parts and get the others in messages, and an
            empty one for engine ranks that get all in messages; empty in another update.
        opens: Number of engine processes that open a buffer in torch's way.
        ring_opens: Number of engine processes that open the storage of all buffers.
        cell_limit: Most engine ranks in a cell, unless the caller asked for another number.
        cells: URLs of the targets in each cell of a transport that has cells.
        cast: Numbers of the exporter's tensors that are cast on the way, by the dtype that engines keep.
        casts_in_place: True if engine ranks that read weights where the trainer keeps them cast them too; otherwise
            the trainer casts them into buckets.
    """

    transport: str = ""
    targets: tuple[TargetPlan, ...] = ()
    bucket_bytes: int = 0
    packing: Packing = Packing()
    receivers: tuple[int, ...] = (0,)
    reading_hosts: tuple[str, ...] = ()
    leg_hosts: tuple[str, ...] = ()
    opens: int = 0
    ring_opens: int = 0
    cell_limit: int = 0
    cells: tuple[tuple[str, ...], ...] = ()
    cast: dict[str, tuple[int, ...]] = {}
    casts_in_place: bool = False

    @cached_property
    def scattered(self) -> bool:
        """True if shards are not gathered: each trainer rank fills its own parts of a bucket."""
        return not all(target.gathers for target in self.targets)

    @cached_property
    def mapped(self) -> bool:
        """True if engine ranks read the trainer ranks' own memory, so that there are buckets only for the rest."""
        return any("mapped" in target.carriers for target in self.targets)

    @cached_property
    def exchanges(self) -> bool:
        """True if every trainer rank sends its parts to engine ranks, in groups of all of them."""
        return self.scattered and any("group" in target.carriers for target in self.targets)

    @cached_property
    def chains(self) -> bool:
        """True if engine ranks pass on to each other what trainer ranks send."""
        return any(target.chains for target in self.targets)

    @cached_property
    def sharings(self) -> frozenset[Sharing]:
        """The kinds of handles to the buffers that engines read."""
        return frozenset(target.sharing for target in self.targets if target.reads_memory)

    @cached_property
    def name(self) -> str:
        """The plan's hash: two plans with one name are the same."""
        return hash_of(msgspec.json.encode(self))

    def travelling(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """The exporter's tensors in the dtypes in which they travel."""
        found = list(specs)
        for dtype, numbers in self.cast.items():
            for number in numbers:
                found[number] = msgspec.structs.replace(found[number], dtype=dtype)
        return tuple(found)


def label_of(names: Iterable[str]) -> str:
    """Returns the label of several transports: each name once, in order, joined by ``+``."""
    return "+".join(dict.fromkeys(part for name in names for part in name.split("+")))
