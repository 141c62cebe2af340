"""Plans the updates to come: by which transport each target is reached, and everything that follows from it.

A ``Planner`` knows the trainer and which transports have failed.  It never changes, and its methods only return: the
same trainer and the same descriptions of engines give the same plan.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from weightcast.config import UpdateConfig
from weightcast.errors import ConfigError, TargetRejected, WeightcastError
from weightcast.protocols import Exporter, Sharing
from weightcast.report import LegReport, format_bytes
from weightcast.transports.blame import is_the_transports
from weightcast.transports.broadcast import BY_RANK
from weightcast.transports.cells import FEW_RANKS, MANY_RANKS, Member, cells_of
from weightcast.transports.link import Link
from weightcast.transports.link_bytes import by_buckets
from weightcast.transports.plan import TargetPlan, UpdatePlan, label_of
from weightcast.transports.preflight import (
    check_fits,
    check_places,
    check_scattered,
    choose_gathered,
    choose_receivers,
    choose_scattered,
    choose_transport,
)
from weightcast.transports.registry import TRANSPORTS, spec_of
from weightcast.transports.spec import TransportSpec
from weightcast.transports.topology import Topology
from weightcast.update.bucket_memory import choose_bucket_bytes
from weightcast.wire.answers import MAPPING_FAILED
from weightcast.wire.casts import best_sent
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import Packing, TensorSpec
from weightcast.wire.nccl_settings import NcclSettings

log = logging.getLogger("weightcast.update.choose")

_Chosen = Mapping[str, TransportSpec]  # by URL
_RETARGET = "call retarget() with the targets as they are now"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """The trainer, as far as a plan needs it, and the transports that failed for targets.

    Attributes:
        specs: The exporter's tensors.
        places: UUID of each trainer rank's device; the first is the head's.
        hosts: Id of each trainer rank's host; empty if all run on this one.
        nccl: Each trainer rank's settings of NCCL; empty if they are not known.
        free_bytes: GPU memory that each trainer rank may still take, where it is smallest; 0 if it is not known.
        failed: Names of the transports that failed for a target, by URL.
        unmapped: URLs of targets that could not map memory, and get messages.
        cell_limit: As ``UpdatePlan.cell_limit``.
    """

    config: UpdateConfig
    exporter: Exporter
    specs: tuple[TensorSpec, ...]
    places: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    nccl: tuple[NcclSettings | None, ...] = ()
    free_bytes: int = 0
    failed: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    unmapped: frozenset[str] = frozenset()
    cell_limit: int = MANY_RANKS

    def topology(self, infos: Mapping[str, EngineInfo], *, unmapped: Collection[str] = ()) -> Topology:
        """Where the trainer ranks and these targets are; ``unmapped`` has more URLs of those that cannot map memory."""
        return Topology(
            infos=infos,
            device=self.exporter.device,
            places=self.places,
            hosts=self.hosts,
            nccl=self.nccl,
            whole_on=self._whole_on,
            specs=self.specs,
            cell_ranks=self.config.cell_ranks,
            shared_folder=self.config.disk_folder is not None,
            variant=self.config.direct_by,
            unmapped=self.unmapped.union(unmapped),
            keep_mapped=self.config.keep_mapped,
        )

    def with_small_cells(self) -> Planner:
        """The same with small cells, unless the caller asked for a size."""
        return replace(self, cell_limit=FEW_RANKS)

    def plan(self, links: Sequence[Link]) -> UpdatePlan:
        """Plans updates of these targets; ConfigError if weights do not fit one or no transport reaches all.

        ``"auto"`` takes a transport that leaves shards where they are only if it suits all targets.  Otherwise each
        target gets the best of those that send gathered buckets.
        """
        check_fits(links, self.specs)
        sent = self._sent(links)
        topology = self.topology({link.url: link.info for link in links})
        chosen = self._choose(links, topology, sent)
        groups = {spec: [link for link in links if chosen[link.url] is spec] for spec in _in_order(chosen.values())}
        best = next(iter(groups))
        receivers = {0}
        for spec, its in groups.items():
            theirs = replace(topology, infos={link.url: link.info for link in its})
            spec.check(theirs)
            check_places(spec, theirs)
            receivers.update(choose_receivers(spec, theirs))
        packing = Packing()
        for link in links:
            packing = packing.also(link.adapter.packing)
        bucket_bytes = choose_bucket_bytes(
            self.config,
            self.exporter,
            sent,
            packing=packing,
            world_size=len(self.places),
            large=self.exporter.device.type == "cuda"
            and all(chosen[link.url].maps_buckets and link.adapter.sharing == "weightcast" for link in links),
            free_bytes=self.free_bytes,
        )
        targets: list[TargetPlan] = []
        opens: dict[Sharing, int] = {"weightcast": 0, "remote": 0, "torch": 0, "ring": 0}
        for link in links:
            target = self._target(link, chosen[link.url], sent, bucket_bytes)
            if target.reads_memory:
                first, opens[target.sharing] = opens[target.sharing], opens[target.sharing] + link.info.tp_size
                target = msgspec.structs.replace(target, opens=(first, opens[target.sharing]))
            targets.append(target)
        bound = [
            host
            for link in links
            if (spec := chosen[link.url]).reads_memory and ((spec.gathers and spec.divides) or spec.reach != "anywhere")
            for host in topology.near_hosts(link.info)
        ]
        read = dict.fromkeys(host for target in targets for host in target.reads if host)
        return UpdatePlan(
            transport=self.label(targets),
            targets=tuple(targets),
            bucket_bytes=bucket_bytes,
            packing=packing,
            receivers=tuple(sorted(receivers)),
            reading_hosts=tuple(dict.fromkeys(bound)) if topology.on_many_hosts else (),
            leg_hosts=(*read, "") if best.divides and not best.gathers else (),
            opens=opens["torch"],
            ring_opens=opens["ring"],
            cell_limit=self.cell_limit,
            cells=cells_of(
                [
                    (
                        spec.cells,
                        [_member(link, target) for link, target in zip(links, targets, strict=True) if link in its],
                    )
                    for spec, its in groups.items()
                ],
                self.config.cell_ranks,
                self.cell_limit,
            ),
            cast=self._cast(sent),
            casts_in_place=best.in_place and casts_in_place(topology),
        )

    def plan_late(self, plan: UpdatePlan, link: Link) -> TargetPlan:
        """How a target gets the weights that was away, or was another engine, when ``plan`` was made.

        ConfigError says that it needs what was not planned.
        """
        self._check_cast(plan, link)
        # Where trainer ranks run on several hosts, buffers were planned for those that had engines.
        topology = self.topology({link.url: link.info})
        near = topology.near_hosts(link.info)
        planned = not plan.reading_hosts or (bool(near) and set(near) <= set(plan.reading_hosts))
        if plan.leg_hosts:
            planned = set(topology.reads_on(link.url)) <= set(plan.leg_hosts)
        spec = self._late(plan, link, topology, planned=planned)
        target = self._target(link, spec, plan.travelling(self.specs), plan.bucket_bytes)
        before = next((one for one in plan.targets if one.url == link.url), None)
        # Buffers were exported for so many processes; an engine that has restarted with as many opens them again.
        if before is not None and before.opens[1] - before.opens[0] == link.info.tp_size:
            target = msgspec.structs.replace(target, opens=before.opens)
        return target

    def give_way(self, link: Link, error: WeightcastError) -> tuple[Planner, str] | None:
        """Leaves a target's transport, which failed for it, for the next best one.

        Only ``transport="auto"`` does so, and ``direct`` from memory to messages.  It is done only if the engine says
        that the transport failed: an engine that is gone is gone for every transport, and another one would not change
        what the engine thinks of the weights.

        Returns a planner without that transport and a remark for the report with the engine's words; None if the target
        must fail.
        """
        spec = self._way_out(link, error)
        if spec is None:
            return None
        url, failed = link.url, link.plan.transport
        if spec.name == failed:
            log.warning("%s: memory gives way to messages: %s", url, error)
            words = f"memory gave way to messages, which stay until retarget(): {error}"
            return replace(self, unmapped=self.unmapped | {url}), words
        log.warning("%s: %s gives way to %s: %s", url, failed, spec.name, error)
        words = f"{failed} gave way to {spec.name}, which stays until retarget(): {error}"
        return replace(self, failed={**self.failed, url: self._failed(url) | {failed}}), words

    def label(self, targets: Iterable[TargetPlan]) -> str:
        """Names of the transports that reach these targets, best first: ``"ipc"`` or ``"ipc+broadcast"``."""
        return label_of(spec.name for spec in _in_order(map(_spec_of, targets)))

    # -- the transport of each target

    def _choose(self, links: Sequence[Link], topology: Topology, sent: Sequence[TensorSpec]) -> _Chosen:
        asked = self.config.transport
        if asked == "auto":
            whole = self._scattered_for_all(links, topology, sent)
        else:
            self._check_keeps(spec_of(asked))
            whole = choose_transport(asked, topology)
        if whole is None:
            return {url: self._best_for(url, info) for url, info in topology.infos.items()}
        if asked == "auto" and not whole.in_place:
            assert whole.link_bytes is not None
            log.info(
                "auto takes %s by %s: it costs the busiest link between hosts %s, and gathered buckets cost it %s",
                whole.name,
                whole.variant,
                format_bytes(whole.link_bytes(topology).cost),
                format_bytes(by_buckets(topology).cost),
            )
        if slow := whole.slow(topology):
            log.warning("%s: %s", ", ".join(topology.infos), slow)
        return dict.fromkeys(topology.infos, whole)

    def _check_keeps(self, spec: TransportSpec) -> None:
        if self.config.keep_mapped and not any(one.in_place for one in (spec, *spec.variants)):
            raise ConfigError(
                f"keep_mapped=True: {spec.name} does not read weights where the trainer keeps them",
                hint='write transport="direct" or transport="auto", or leave keep_mapped out',
            )

    def _scattered_for_all(
        self, links: Sequence[Link], topology: Topology, sent: Sequence[TensorSpec]
    ) -> TransportSpec | None:
        """The transport that leaves shards where they are and suits all targets; None if none does."""
        try:
            spec = choose_scattered(topology, without={name for link in links for name in self._failed(link.url)})
            for link in links:
                check_scattered(link, sent, self.exporter)
        except ConfigError as error:
            log.debug("shards are gathered: %s", error)
            return None
        return spec

    def _best_for(self, url: str, info: EngineInfo, without: Collection[str] = ()) -> TransportSpec:
        """The best transport for one target that may be mixed with others; raises ``ConfigError`` if there is none."""
        topology = self.topology({url: info})
        spec = choose_gathered(topology, without={*self._failed(url), *without})
        if not spec.reads_memory and topology.beyond("trainers") is None:
            try:
                topology.check_seen()
            except ConfigError as why:
                log.info("auto takes %s: %s", spec.name, why)
        return spec

    def _way_out(self, link: Link, error: WeightcastError) -> TransportSpec | None:
        """The transport to which ``give_way`` changes; None if the target must fail."""
        url, info, failed = link.url, link.info, _spec_of(link.plan)
        try:
            if self.config.transport == failed.name:
                if not self._may_send_messages(failed, error):
                    return None
                return choose_transport(failed.name, self.topology({url: info}, unmapped=[url]))
            if self.config.transport == "auto" and is_the_transports(error, link):
                return self._best_for(url, info, {failed.name})
        except ConfigError as why:
            log.info("%s stays with %s: %s", url, failed.name, why)
        return None

    def _may_send_messages(self, failed: TransportSpec, error: WeightcastError) -> bool:
        """True if a target cannot map memory, and its transport has messages too."""
        refused = isinstance(error, TargetRejected) and error.status == MAPPING_FAILED
        many = bool(spec_of(failed.name).variants) and self.config.direct_by == "auto"
        return refused and many and failed.reads_memory

    def _late(self, plan: UpdatePlan, link: Link, topology: Topology, *, planned: bool) -> TransportSpec:
        """The transport of a target that was away: its best one if that needs no buffers that were not planned."""
        chosen = _in_order(map(_spec_of, plan.targets))
        best = chosen[0]
        if self.config.transport == "auto" and best.mixes:
            unplanned = {one.name for one in TRANSPORTS if one.reads_memory and not planned}
            spec = self._best_for(link.url, link.info, unplanned)
            if spec in chosen or not spec.reads_memory:
                return spec
        # Messages reach a late engine too that alone would have been reached otherwise.
        joins = not best.gathers and "group" in best.carriers and (planned or not best.reads_memory)
        if joins and best.offered_by(link.info):
            best.check(topology)
            return best
        if not planned and best.reads_memory:
            raise ConfigError(
                f"{link.url} runs on host {link.info.host_id}, for which no trainer rank fills buckets", hint=_RETARGET
            )
        if best is BY_RANK:
            raise ConfigError(
                f"{link.url} would be reached by {', '.join(link.info.transports)}, and the update goes over "
                f"{BY_RANK.name}",
                hint=_RETARGET,
            )
        spec = choose_transport(best.name, topology)
        if spec is not best:
            raise ConfigError(
                f"{link.url} would be reached by {spec.name} over {spec.variant}, and the update goes over "
                f"{best.variant}",
                hint=_RETARGET,
            )
        return spec

    def _failed(self, url: str) -> frozenset[str]:
        return self.failed.get(url, frozenset())

    def _whole_on(self) -> Collection[str]:
        return self.exporter.whole_on(self.hosts)

    # -- what follows from it

    def _target(self, link: Link, spec: TransportSpec, sent: Sequence[TensorSpec], bucket_bytes: int) -> TargetPlan:
        """How a target gets the weights by this transport; ConfigError if it cannot be updated by it."""
        if not spec.gathers:
            check_scattered(link, sent, self.exporter)
        link.adapter.check(sent, delivery=spec.delivery, bucket_bytes=bucket_bytes)
        topology, info = self.topology({link.url: link.info}), link.info
        near, reads = (), ()
        if spec.reads_memory and spec.gathers:
            near = topology.near_ranks(info)
        elif spec.divides:
            reads = topology.reads_on(link.url)
            near = tuple(rank for rank, host in enumerate(reads) if host and topology.is_whole(host))
        return TargetPlan(
            url=link.url,
            transport=spec.name,
            variant=spec.variant,
            carriers=spec.carriers,
            gathers=spec.gathers,
            chains=spec.chains,
            cells=spec.cells,
            sharing=spec.sharing or link.adapter.sharing,
            near=near,
            reads=reads,
            legs=tuple(_legs(spec, topology, info, near, reads)),
        )

    def _sent(self, links: Sequence[Link]) -> tuple[TensorSpec, ...]:
        """The tensors in the smaller dtypes that all these engines keep, unless the caller chose their dtypes."""
        may_cast = self.config.wire_dtype is None and self.exporter.casts
        tables = [(*link.info.specs, *link.info.optional) for link in links]
        return tuple(best_sent(self.specs, tables)) if may_cast else self.specs

    def _cast(self, sent: Sequence[TensorSpec]) -> dict[str, tuple[int, ...]]:
        """As ``UpdatePlan.cast``."""
        found: dict[str, list[int]] = {}
        for number, (own, one) in enumerate(zip(self.specs, sent, strict=True)):
            if one.dtype != own.dtype:
                found.setdefault(one.dtype, []).append(number)
        return {dtype: tuple(numbers) for dtype, numbers in found.items()}

    def _check_cast(self, plan: UpdatePlan, link: Link) -> None:
        """Refuses a target that may keep more of a tensor than is sent, which others decided at ``connect``."""
        kept = {spec.name: spec.dtype for spec in (*link.info.specs, *link.info.optional)}
        for own, sent in zip(self.specs, plan.travelling(self.specs), strict=True):
            if sent.dtype != own.dtype and kept.get(sent.name) != sent.dtype:
                raise ConfigError(
                    f"{sent.name} travels in {sent.dtype}, which the engines kept at connect(), and {link.url} keeps "
                    f"{kept.get(sent.name, 'it in a dtype that is not known')}: it would get rounded values",
                    hint=f"{_RETARGET}, or connect with wire_dtype={own.dtype!r}",
                )


def casts_in_place(topology: Topology) -> bool:
    """True if float32 masters are best cast by the engine ranks that read them, for engines that keep bfloat16.

    Bytes of each element, with the digest, which both sides sum as they pass:

    ================================  ==================  =======================  ================
    way                               trainer's memory    between the two          engine's memory
    ================================  ==================  =======================  ================
    engine ranks read it and cast     4 to sum it         4                        2
    the trainer casts it to a bucket  4 read, 2 written   2                        2
    ================================  ==================  =======================  ================

    Where both use one memory, all of these are bytes of that memory: 10 each way, 6 and 10 without a digest; and there
    is no bucket to allocate, to fill or to wait for.  Between two GPUs the link has a tenth of the memory's rate, so
    that 2 bytes less over it are worth more than all others.
    """
    return topology.shares_memory


def _spec_of(target: TargetPlan) -> TransportSpec:
    return spec_of(target.transport, target.variant)


def _member(link: Link, target: TargetPlan) -> Member:
    return Member(link.url, link.adapter.meeting, link.info.tp_size - len(target.near))


def _legs(
    spec: TransportSpec, topology: Topology, info: EngineInfo, near: Sequence[int], reads: Sequence[str]
) -> Iterable[LegReport]:
    """The way to each rank of a target, from each trainer rank; as ``TargetReport.legs``."""
    everybody, trainers = tuple(range(info.tp_size)), tuple(range(len(topology.places)))
    first, last = spec.carriers[0], spec.carriers[-1]
    if not spec.divides:
        if spec.gathers:
            hosts = topology.near_hosts(info) or (info.host_id,)
            filling = [rank for host in hosts for rank in topology.fillers_on(host)]
            trainers = tuple(sorted(filling)) if first == "buffer" else (0,)
        elif spec.reach == "replicas":
            trainers = tuple(topology.ranks_on(info.host_id))
        yield LegReport(ranks=everybody, by=first, trainers=trainers)
        return
    if spec.gathers:
        for host in dict.fromkeys(info.hosts[rank] for rank in near):
            ranks = tuple(rank for rank in near if info.hosts[rank] == host)
            yield LegReport(ranks=ranks, by=first, trainers=tuple(topology.fillers_on(host)))
        yield LegReport(ranks=tuple(rank for rank in everybody if rank not in near), by=last, trainers=(0,))
        return
    for host in dict.fromkeys(reads):
        ranks = tuple(rank for rank, its in enumerate(reads) if its == host)
        beside = tuple(topology.ranks_on(host)) if host else ()
        others = tuple(rank for rank in trainers if rank not in beside)
        if beside:
            yield LegReport(ranks=ranks, by=first, trainers=beside)
        if others and not (host and topology.is_whole(host)):
            yield LegReport(ranks=ranks, by=last, trainers=others)


def _in_order(specs: Iterable[TransportSpec]) -> list[TransportSpec]:
    """Each transport once, best first."""
    names = [spec.name for spec in (*TRANSPORTS, BY_RANK)]
    return sorted(dict.fromkeys(specs), key=lambda spec: names.index(spec.name))
