"""The form of a transport's registration.

Each transport's file exports one ``TransportSpec`` as ``SPEC``, and ``transports/registry.py`` lists them.  Code
outside a transport's file reads the registration; it never compares a transport's name with a string.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from weightcast.comm.ipc import host_id
from weightcast.config import TransportName, UpdateConfig
from weightcast.errors import ConfigError
from weightcast.protocols import Delivery, Sharing, Transport
from weightcast.transports.link import Link
from weightcast.wire.engine_info import EngineInfo, RankInfo
from weightcast.wire.layout import TensorSpec
from weightcast.wire.nccl_settings import NcclSettings

SpecName = TransportName | Literal["ipc+broadcast"]
# The engines that a transport reaches: "head" those on the host of the trainer's head, "trainers" those on any host
# with a trainer rank, "replicas" those on any host whose trainer ranks hold all weights together.
Reach = Literal["anywhere", "head", "trainers", "replicas"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the trainer and the engines run, as far as the choice of a transport needs it.

    Attributes:
        places: UUID of each trainer rank's device; the first is the head's.
        hosts: Id of each trainer rank's host; empty if all run on this one.
        nccl: Each trainer rank's settings of NCCL, None for one without; empty if they are not known.
        whole_on: Returns the hosts whose trainer ranks hold all weights together; asked only if there are several.
        shared_folder: True if the caller named a folder for ``disk``.
        unmapped: URLs of engines that could not map memory of the trainer.
    """

    infos: Mapping[str, EngineInfo]
    device: torch.device
    places: Sequence[str]
    hosts: Sequence[str] = ()
    nccl: Sequence[NcclSettings | None] = ()
    whole_on: Callable[[], Collection[str]] = frozenset
    shared_folder: bool = False
    primitive: str = "auto"
    keep_mapped: bool = False
    unmapped: Collection[str] = frozenset()

    def beyond(self, reach: Reach) -> str | None:
        """URL of the first engine that is out of reach; None if there is none."""
        if reach == "anywhere":
            return None
        covered = self._trainer_hosts
        if reach == "head":
            covered = frozenset(self.hosts[:1]) or covered
        elif reach == "replicas" and len(covered) > 1:
            covered = self._whole_hosts
        # Each rank can read memory of its own host, if that has whole buckets.  Otherwise all read that of one host.
        each = reach == "trainers"
        return next(
            (
                url
                for url, info in self.infos.items()
                if not covered.issuperset(info.hosts if each and info.on_several_hosts else (info.host_id,))
                or (info.on_several_hosts and not each)
            ),
            None,
        )

    def near_hosts(self, info: EngineInfo) -> tuple[str, ...]:
        """The hosts of an engine's ranks on which there are trainer ranks, each once."""
        return tuple(host for host in dict.fromkeys(info.hosts) if host in self._trainer_hosts)

    def near_ranks(self, info: EngineInfo) -> tuple[int, ...]:
        """The ranks on those hosts, of an engine whose ranks are on several; otherwise none."""
        near = self.near_hosts(info) if info.on_several_hosts else ()
        return tuple(rank for rank, host in enumerate(info.hosts) if host in near)

    def ranks_on(self, host: str) -> Sequence[int]:
        """The trainer ranks on a host; all of them if they run on one host."""
        if not self.on_many_hosts:
            return range(len(self.places))
        return [rank for rank, its in enumerate(self.hosts) if its == host]

    def fillers_on(self, host: str) -> Sequence[int]:
        """The trainer ranks on a host that fill whole buckets for engines there.

        The first does, and all of them if others than the first share the engines' GPUs.
        """
        ranks = self.ranks_on(host)
        colocated = "cuda" in self.devices or any(self.places[rank] in self.devices for rank in ranks[1:])
        return ranks if self.device.type == "cuda" and colocated else ranks[:1]

    def sees(self, rank: RankInfo, host: str, *, every: bool) -> bool:
        """True if a rank on a host may map a bucket of trainer ranks there; with ``every``, memory of each of them."""
        if not rank.visible or host not in self._trainer_hosts:
            return True
        ranks = self.ranks_on(host) if every else self.fillers_on(host)
        needed, seen = {self.places[trainer] for trainer in ranks}, {"cpu", *rank.visible}
        return needed <= seen if every else not needed.isdisjoint(seen)

    def all_see(self, *, every: bool = False) -> bool:
        """True if no engine rank is known not to see the trainer's GPUs; as ``sees``."""
        return not any(self._blind(every=every))

    def check_seen(self, *, every: bool = False) -> None:
        """Raises ConfigError if an engine rank does not see the trainer's GPUs, so that it cannot map their memory."""
        for url, info, rank in self._blind(every=every):
            theirs = dict.fromkeys(self.places[trainer] for trainer in self.ranks_on(rank.host_id or info.host_id))
            raise ConfigError(
                f"{info.named(rank.rank)} of {url} cannot map the trainer's memory: its process sees only "
                f"{', '.join(rank.visible)}, and the trainer runs on {', '.join(theirs)}; nothing was sent",
                hint="add the trainer's GPUs to the engine's CUDA_VISIBLE_DEVICES, or use broadcast: "
                'transport="broadcast", --via broadcast',
            )

    def _blind(self, *, every: bool) -> Iterator[tuple[str, EngineInfo, RankInfo]]:
        for url, info in self.infos.items():
            for rank, host in zip(info.ranks, info.hosts, strict=True):
                if not self.sees(rank, host, every=every):
                    yield url, info, rank

    def reads_on(self, url: str) -> tuple[str, ...]:
        """For each rank of an engine, the host whose trainer ranks' memory it can read; empty for none."""
        info, on_gpu = self.infos[url], self.device.type == "cuda"
        if url in self.unmapped:
            return ("",) * len(info.ranks)
        return tuple(
            host
            if host in self._trainer_hosts
            and rank.device != "cuda"
            and (rank.device != "cpu") == on_gpu
            and self.sees(rank, host, every=True)
            else ""
            for rank, host in zip(info.ranks, info.hosts, strict=True)
        )

    def is_whole(self, host: str) -> bool:
        """True if the trainer ranks on a host hold all weights together."""
        if not self.on_many_hosts:
            return host in self._trainer_hosts
        return host in self._whole_hosts

    @property
    def on_many_hosts(self) -> bool:
        return len(set(self.hosts)) > 1

    @cached_property
    def _trainer_hosts(self) -> frozenset[str]:
        return frozenset(self.hosts) or frozenset((host_id(),))

    @cached_property
    def _whole_hosts(self) -> frozenset[str]:
        return frozenset(self.whole_on())

    @cached_property
    def devices(self) -> frozenset[str]:
        return frozenset(rank.device for info in self.infos.values() for rank in info.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Everything that a transport is built from.

    Attributes:
        in_flight: Buckets that may be announced to all targets of the update before the first answer: 1 or 2.
        address: Returns an address of this process that every target can reach.
    """

    links: Sequence[Link]
    specs: Sequence[TensorSpec]
    device: torch.device
    config: UpdateConfig
    bucket_bytes: int
    num_trainers: int
    in_flight: int
    cell_ranks: int
    address: Callable[[], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSpec:
    """The registration of one transport.

    Attributes:
        name: The transport's name in ``UpdateConfig.transport``, or that of several which ``"auto"`` has put together.
        offered_as: The transport that engines name in their description if they take this one; None for its own name.
        build: Builds the transport; nothing is sent yet.
        scattered: True if shards are not gathered: each trainer rank fills its own parts of a bucket.
        exchanges: True if every trainer rank sends its parts to engine ranks, in a group of all of them.
        relays: True if engine ranks of one role then pass on to each other what trainer ranks send.
        mapped: True if there are no buckets: engine ranks read the trainer ranks' own memory.
        cells: Most engine ranks in each of the process groups that they join, unless the caller asks for another
            number; 0 if they join none.
        primitives: Transports of which one takes the place of this one, best first.
        primitive: Name among ``primitives``, if this is one of them; empty otherwise.
        legs: True if each engine rank reads the buffers of trainer ranks on its own host, and gets from the others what
            these send.
        by_rank: True if engine ranks on hosts with trainer ranks map buffers there, and the others of the same engine
            do not.
        mixes: True if another transport may send the same gathered buckets to other targets of the update.
        large_buckets: True if larger buckets than usual are faster on GPUs, because engines map them.
        sharing: The kind of handle that engines get to a buffer; None takes the kind that the adapter names.
        suits: Returns True if ``transport="auto"`` may choose this transport.  The first that suits wins.
        check: Raises ConfigError if the transport cannot work with this placement.
        slow: Returns the reason why another transport is faster with this placement; empty if none is known to be.
        lacks: Returns what this process or an engine has not installed for this transport; empty if nothing is missing.
    """

    name: SpecName
    build: Callable[[Wiring], Transport]
    delivery: Delivery
    offered_as: TransportName | None = None
    reach: Reach = "anywhere"
    scattered: bool = False
    exchanges: bool = False
    relays: bool = False
    mapped: bool = False
    cells: int = 0
    primitives: tuple[TransportSpec, ...] = ()
    primitive: str = ""
    legs: bool = False
    by_rank: bool = False
    mixes: bool = False
    large_buckets: bool = False
    sharing: Sharing | None = None
    suits: Callable[[Placement], bool] = lambda _: False
    check: Callable[[Placement], None] = lambda _: None
    slow: Callable[[Placement], str] = lambda _: ""
    lacks: Callable[[EngineInfo], str] = lambda _: ""

    def offered_by(self, info: EngineInfo) -> bool:
        """True if an engine takes updates by this transport."""
        return (self.offered_as or self.name) in info.transports

    @property
    def shares_memory(self) -> bool:
        """True if engine ranks map the trainer's buffers, so each engine GPU needs a buffer of its own."""
        return self.by_rank or self.legs or self.delivery in ("memory", "handles")
