"""Where trainer ranks and engine ranks run, and which of them reach each other's memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from weightcast.comm.ipc import host_id
from weightcast.errors import ConfigError
from weightcast.wire.engine_info import EngineInfo, RankInfo
from weightcast.wire.layout import TensorSpec
from weightcast.wire.nccl_settings import NcclSettings

# The engines that a transport reaches: "head" those on the host of the trainer's head, "trainers" those on any host
# with a trainer rank, "replicas" those on any host whose trainer ranks hold all weights together.
Range = Literal["anywhere", "head", "trainers", "replicas"]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Where the trainer and the engines run, as far as the choice of a transport needs it.

    Attributes:
        places: UUID of each trainer rank's device; the first is the head's.
        hosts: Id of each trainer rank's host; empty if all run on this one.
        nccl: Each trainer rank's settings of NCCL, None for one without; empty if they are not known.
        variant: The variant of a transport that a test has asked for; ``"auto"`` for the first that suits.
        whole_on: Returns the hosts whose trainer ranks hold all weights together; asked only if there are several.
        specs: The tensors in the dtypes in which they travel; empty if they are not known.
        cell_ranks: As ``UpdateConfig.cell_ranks``.
        shared_folder: True if the caller named a folder for ``disk``.
        unmapped: URLs of engines that could not map memory of the trainer.
    """

    infos: Mapping[str, EngineInfo]
    device: torch.device
    places: Sequence[str]
    hosts: Sequence[str] = ()
    nccl: Sequence[NcclSettings | None] = ()
    whole_on: Callable[[], Collection[str]] = frozenset
    specs: Sequence[TensorSpec] = ()
    cell_ranks: int | None = None
    shared_folder: bool = False
    variant: str = "auto"
    keep_mapped: bool = False
    unmapped: Collection[str] = frozenset()

    def beyond(self, reach: Range) -> str | None:
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

    @cached_property
    def shares_memory(self) -> bool:
        """True if each engine rank's device is that of every trainer rank on its host."""
        return all(
            rank.device == self.places[trainer]
            for info in self.infos.values()
            for rank, host in zip(info.ranks, info.hosts, strict=True)
            for trainer in self.ranks_on(host)
        )

    @property
    def on_many_hosts(self) -> bool:
        return len(set(self.hosts)) > 1

    @property
    def trainer_hosts(self) -> Sequence[str]:
        """Id of each trainer rank's host."""
        return self.hosts or (host_id(),) * len(self.places)

    @cached_property
    def _trainer_hosts(self) -> frozenset[str]:
        return frozenset(self.trainer_hosts)

    @cached_property
    def _whole_hosts(self) -> frozenset[str]:
        return frozenset(self.whole_on())

    @cached_property
    def devices(self) -> frozenset[str]:
        return frozenset(rank.device for info in self.infos.values() for rank in info.ranks)
