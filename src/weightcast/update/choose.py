"""Everything that the head decides before anything moves: which targets take part, and whether the weights fit.

``Plan`` belongs to one membership.  ``retarget`` makes a new one, which inherits the links of targets that stay.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from weightcast.adapters.registry import adapter_for
from weightcast.comm.update_group import local_address_towards
from weightcast.config import Target, UpdateConfig
from weightcast.errors import ConfigError, WeightcastError
from weightcast.fleet.roster import Roster
from weightcast.protocols import Casting, Exporter, Sharing, Transport
from weightcast.report import LegReport, count_of
from weightcast.transports.blame import raise_together
from weightcast.transports.cells import FEW_RANKS, MANY_RANKS, cells_of, most_ranks
from weightcast.transports.link import Link, in_flight_to
from weightcast.transports.mixed import MixedTransport
from weightcast.transports.preflight import (
    check_fits,
    check_places,
    check_proof,
    check_scattered,
    check_scores,
    choose_pause,
    choose_receivers,
    tell_served,
    warn_hazards,
)
from weightcast.transports.spec import Placement, TransportSpec, Wiring
from weightcast.update.bucket_memory import choose_bucket_bytes
from weightcast.update.messages import Choice
from weightcast.update.reach import Reach
from weightcast.watch.listeners import Events
from weightcast.wire.casts import best_sent
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import Packing, TensorSpec
from weightcast.wire.nccl_settings import NcclSettings

log = logging.getLogger("weightcast.update.choose")

Probed = dict[str, EngineInfo | WeightcastError]  # by URL


class Plan:
    """The targets, their links and the transport that reaches each of them.

    Attributes:
        reach: The transport that reaches each target.
        receivers: The trainer ranks that fill buckets.
        cell_limit: Most engine ranks in a cell, unless the caller asked for another number.
        cast: As ``UpdateReport.cast``.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        roster: Roster,
        config: UpdateConfig,
        exporter: Exporter,
        specs: Sequence[TensorSpec],
        places: Sequence[str],
        links: Mapping[str, Link] | None = None,
        events: Events | None = None,
        hosts: Sequence[str] = (),
        *,
        free_bytes: int = 0,
        nccl: Sequence[NcclSettings | None] = (),
    ) -> None:
        """Nothing is asked yet.

        Args:
            places: UUID of each trainer rank's device; the first is the head's.
            links: Links that an earlier plan hands on, by URL.
            hosts: Id of each trainer rank's host; empty if all run on this one.
            free_bytes: GPU memory that each trainer rank may still take, where it is smallest; 0 if it is not known.
            nccl: Each trainer rank's settings of NCCL; empty if they are not known.
        """
        self.urls = tuple(target.url for target in targets)
        self.links = dict(links or {})
        self._events = events if events is not None else Events()
        self.receivers: tuple[int, ...] = (0,)
        self._config = config
        self._exporter = exporter
        self._own = self._specs = tuple(specs)
        self._places = tuple(places)
        self._reading_hosts: tuple[str, ...] = ()
        self._leg_hosts: tuple[str, ...] = ()
        self._roster = roster
        self.reach = Reach(config, exporter, specs, places, hosts, nccl)
        self._sharings: frozenset[Sharing] = frozenset()
        self._packing = Packing()
        self._free_bytes = free_bytes
        self._bucket_bytes = 0
        self.cell_limit = MANY_RANKS
        self.cast: dict[str, int] = {}

    @property
    def gathers(self) -> bool:
        """True if a bucket is gathered from several trainer ranks."""
        return len(self._places) > 1

    def most_ranks(self, spec: TransportSpec) -> int:
        """The most engine ranks in a cell of a transport."""
        return most_ranks(spec, self._config.cell_ranks, self.cell_limit)

    def divide_cells(self) -> None:
        """Makes cells small from the next attempt on, unless the caller asked for a size."""
        self.cell_limit = FEW_RANKS

    def legs_to(self, link: Link) -> tuple[LegReport, ...]:
        """The way to each rank of a target that was chosen for, from each trainer rank; as ``TargetReport.legs``."""
        spec, place = self.reach.of(link.url), self.reach.placement({link.url: link.info})
        ranks, trainers = tuple(range(link.info.tp_size)), range(len(self._places))
        if spec.legs:
            return tuple(legs_of(place, link))
        if spec.by_rank:
            near = {
                host: tuple(rank for rank in link.near if link.info.hosts[rank] == host) for host in link.info.hosts
            }
            read = [
                LegReport(ranks=some, by="ipc", trainers=tuple(sorted(set(self.receivers) & set(place.ranks_on(host)))))
                for host, some in near.items()
                if some
            ]
            return *read, LegReport(ranks=link.members, by="broadcast", trainers=(0,))
        if not spec.scattered:
            return ()
        if spec.reach == "replicas":
            trainers = place.ranks_on(link.info.host_id)
        return (LegReport(ranks=ranks, by=spec.primitive, trainers=tuple(trainers)),)

    def choose(self) -> Choice:
        """Probes every target; chooses the transport and everything that it needs.

        It raises ConfigError if weights do not fit an engine or no transport reaches all, else the errors of targets.
        """
        infos = self.probe(self.urls)
        healthy = {url: info for url, info in infos.items() if isinstance(info, EngineInfo)}
        if self._config.on_failure == "raise" or not healthy:
            raise_together([info for info in infos.values() if not isinstance(info, EngineInfo)])
        if self._roster.current is None:
            check_scores(self._config, self._exporter)
            tell_served(healthy, self._config)
        return self._choose_for(healthy)

    def choose_again(self) -> Choice:
        """As ``choose``, asking nothing, for the targets that were planned for, without transports that failed."""
        return self._choose_for({url: link.info for url, link in self.links.items() if link.planned})

    def _choose_for(self, healthy: Mapping[str, EngineInfo]) -> Choice:
        for link in self.links.values():
            link.planned = False
            link.opens = slice(0, 0)
        links = [self.link(url, info) for url, info in healthy.items()]
        check_fits(links, self._own)
        self._send_as(links)
        placement = self.reach.placement(healthy)
        chosen = self.reach.choose(links, placement)
        spec = self.reach.best
        if spec.mapped:  # engines read what the trainer keeps
            self._send_as(())
        self.receivers = (0,)
        for one, urls in chosen.items():
            its = replace(placement, infos={url: healthy[url] for url in urls})
            one.check(its)
            check_places(one, its)
            self.receivers = tuple(sorted({*self.receivers, *choose_receivers(one, its)}))
        self._packing = links[0].adapter.packing
        for link in links:
            self._packing = self._packing.also(link.adapter.packing)
        self._bucket_bytes = choose_bucket_bytes(
            self._config,
            self._exporter,
            self._specs,
            packing=self._packing,
            world_size=len(self._places),
            large=self._gains_from_large_buckets(links),
            free_bytes=self._free_bytes,
        )
        opens: dict[Sharing, int] = {"weightcast": 0, "remote": 0, "torch": 0, "ring": 0}
        check_proof(links, self._config)
        for link in links:
            self._check(link)
            if not self.reach.of(link.url).shares_memory:
                continue
            first = opens[link.sharing]
            opens[link.sharing] += link.info.tp_size
            link.opens = slice(first, opens[link.sharing])
        sharing = [link for link in links if self.reach.of(link.url).shares_memory]
        ways = self._sharings = frozenset(link.sharing for link in sharing)
        bound = [
            host
            for link in sharing
            for host in placement.near_hosts(link.info)
            if self.reach.of(link.url).by_rank or self.reach.of(link.url).reach != "anywhere"
        ]
        self._reading_hosts = tuple(dict.fromkeys(bound)) if placement.on_many_hosts else ()
        read = dict.fromkeys(host for link in links for host in link.reads if host)
        self._leg_hosts = (*read, "") if spec.legs else ()
        return Choice(
            bucket_bytes=self._bucket_bytes,
            transport=self.reach.label(links),
            scattered=spec.scattered,
            exchanges=spec.exchanges,
            relays=spec.relays,
            mapped=spec.mapped,
            receivers=self.receivers,
            reading_hosts=self._reading_hosts,
            leg_hosts=self._leg_hosts,
            packing=self._packing,
            ways=tuple(ways),
            opens=opens["torch"],
            ring_opens=opens["ring"],
            cells=cells_of(links, self.reach.of, self.most_ranks),
            served=max((info.version for info in healthy.values() if info.version is not None), default=None),
            cast=self._cast(),
        )

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors in the dtypes in which they travel."""
        return self._specs

    def _send_as(self, links: Sequence[Link]) -> None:
        """Sends tensors in the smaller dtypes that all these engines keep, unless the caller chose their dtypes."""
        may_cast = self._config.wire_dtype is None and isinstance(self._exporter, Casting) and self._exporter.casts
        tables = [(*link.adapter.specs(), *link.info.optional) for link in links]
        self._specs = best_sent(self._own, tables) if may_cast else self._own
        self.reach.specs = self._specs

    def _cast(self) -> dict[str, tuple[int, ...]]:
        """As ``Choice.cast``."""
        found: dict[str, list[int]] = {}
        for number, (own, sent) in enumerate(zip(self._own, self._specs, strict=True)):
            if sent.dtype != own.dtype:
                found.setdefault(sent.dtype, []).append(number)
        for dtype, numbers in found.items():
            log.info("%s to be sent in %s, which every engine keeps", count_of(len(numbers), "tensor"), dtype)
        self.cast = {dtype: len(numbers) for dtype, numbers in found.items()}
        return {dtype: tuple(numbers) for dtype, numbers in found.items()}

    def kept_links(self, roster: Roster) -> dict[str, Link]:
        """Returns copies of the links to targets that stay when the membership changes."""
        return {url: replace(link) for url, link in self.links.items() if roster.knows(url, link.client)}

    def probe(self, urls: Sequence[str], *, hasty: bool = False, since: float | None = None) -> Probed:
        """Asks targets for their description; returns each target's description or error."""
        return self._added(self._roster.look(urls, hasty=hasty, since=since))

    async def probe_hastily(self, url: str) -> EngineInfo | WeightcastError:
        """As ``probe`` of one target with ``hasty``, on the event loop."""
        return self._added(await self._roster.look_on_loop([url], hasty=True))[url]

    def _added(self, found: Probed) -> Probed:
        return {
            url: self._add_break_off(url, info) if isinstance(info, EngineInfo) else info for url, info in found.items()
        }

    def links_for(self, infos: Mapping[str, EngineInfo | WeightcastError]) -> tuple[list[Link], Probed]:
        """Returns links to the targets that the plan still fits, and the errors of the others by URL."""
        links: list[Link] = []
        failed: Probed = {}
        for url, info in infos.items():
            if not isinstance(info, EngineInfo):
                failed[url] = info
                continue
            link = self.link(url, info)
            try:
                if not link.planned:
                    self._check_late(link)
                self._check_still_fits(link)
            except WeightcastError as error:
                failed[url] = error
                continue
            links.append(link)
        return links, failed

    def link(self, url: str, info: EngineInfo) -> Link:
        """Returns the target's link; a new one if the engine is another than before, or has restarted."""
        link = self.links.get(url)
        if link is None or not _is_same(link.info, info):
            # Buffers were exported for so many processes; an engine that has restarted with as many opens them again.
            opens = link.opens if link is not None and link.info.tp_size == info.tp_size else slice(0, 0)
            link = Link(
                client=self._roster.client(url), adapter=adapter_for(info), info=info, opens=opens, events=self._events
            )
            self.links[url] = link
        link.info = info
        link.adapter.renew(info)
        return link

    def build_transport(self, links: Sequence[Link]) -> Transport:
        """Builds the transport of these links: one, or one for each group of targets."""
        in_flight = in_flight_to(links)
        parts = list[Transport]()
        for spec in self.reach.of_each(links):
            its = [link for link in links if self.reach.of(link.url) is spec]
            wiring = Wiring(
                links=its,
                specs=self._specs,
                device=self._exporter.device,
                config=self._config,
                bucket_bytes=self._bucket_bytes,
                num_trainers=len(self._places),
                in_flight=in_flight,
                cell_ranks=self.most_ranks(spec),
                address=partial(_address_for, its),
            )
            parts.append(spec.build(wiring))
        return parts[0] if len(parts) == 1 else MixedTransport(parts)

    def _gains_from_large_buckets(self, links: Sequence[Link]) -> bool:
        """True if every target maps buckets on a GPU with our receiver, and so takes no memory for them."""
        return self._exporter.device.type == "cuda" and all(
            self.reach.of(link.url).large_buckets and link.adapter.sharing == "weightcast" for link in links
        )

    def _check(self, link: Link) -> None:
        """Checks that the target can be updated by the transport that was chosen for it."""
        link.pause = choose_pause(link, self._config.pause)
        warn_hazards(link)
        spec = self.reach.of(link.url)
        if spec.scattered:
            check_scattered(link, self._specs, self._config, self._exporter)
        link.adapter.check(self._specs, delivery=spec.delivery, bucket_bytes=self._bucket_bytes)
        link.sharing = spec.sharing or link.adapter.sharing
        place = self.reach.placement({link.url: link.info})
        reads = spec.shares_memory and not spec.scattered
        link.near = place.near_ranks(link.info) if reads else ()
        link.reads = place.reads_on(link.url) if spec.legs else ()
        if spec.legs:
            link.near = tuple(rank for rank, host in enumerate(link.reads) if host and place.is_whole(host))
        link.planned = True

    def _check_late(self, link: Link) -> None:
        """Checks a target that was away, or was another engine, when the transport was chosen."""
        check_fits([link], self._own)
        check_proof([link], self._config)
        self._check_cast(link)
        # Where trainer ranks run on several hosts, buffers were planned for those that had engines.
        place = self.reach.placement({link.url: link.info})
        near = place.near_hosts(link.info)
        planned = not self._reading_hosts or (bool(near) and set(near) <= set(self._reading_hosts))
        if self._leg_hosts:
            planned = set(place.reads_on(link.url)) <= set(self._leg_hosts)
        self.reach.choose_late(link, planned=planned)
        self._check(link)

    def _check_cast(self, link: Link) -> None:
        """Refuses a target that may keep more of a tensor than is sent, which others decided at ``connect``."""
        kept = {spec.name: spec.dtype for spec in (*link.adapter.specs(), *link.info.optional)}
        for own, sent in zip(self._own, self._specs, strict=True):
            if sent.dtype != own.dtype and kept.get(sent.name) != sent.dtype:
                raise ConfigError(
                    f"{sent.name} travels in {sent.dtype}, which the engines kept at connect(), and {link.url} keeps "
                    f"{kept.get(sent.name, 'it in a dtype that is not known')}: it would get rounded values",
                    hint=f"call retarget() with the targets as they are now, or connect with wire_dtype={own.dtype!r}",
                )

    def _check_still_fits(self, link: Link) -> None:
        """Checks that buckets and handles were planned for an engine like this one."""
        link.pause = choose_pause(link, self._config.pause)
        opens = len(range(1 << 30)[link.opens])
        sharing = self.reach.of(link.url).shares_memory
        shares = sharing and link.sharing in ("torch", "ring")
        other = self._packing.also(link.adapter.packing) != self._packing
        other = other or (sharing and bool(self._sharings) and link.sharing not in self._sharings)
        if other or (shares and opens != link.info.tp_size):
            raise ConfigError(
                f"{link.url} is another engine than the buckets were planned for: {link.info.engine}, "
                f"{link.info.tp_size} ranks",
                hint="call retarget() with the targets as they are now",
            )

    def _add_break_off(self, url: str, info: EngineInfo) -> EngineInfo:
        """Adds to an engine's description that an update of it broke off, which a stock engine does not know."""
        link = self.links.get(url)
        if link is None or not _is_same(link.info, info) or not link.mixed:
            return info
        return msgspec.structs.replace(
            info,
            state="quarantined",
            message="an update of it broke off: it may hold parts of two versions; send it a full update",
        )


def legs_of(place: Placement, link: Link) -> Iterator[LegReport]:
    """The legs to the ranks of a target that reads memory of trainer ranks on its hosts, and gets messages beside."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(link.reads):
        ranks.setdefault(host, []).append(rank)
    for host, some in ranks.items():
        near = tuple(place.ranks_on(host)) if host else ()
        far = tuple(rank for rank in range(len(place.places)) if rank not in near)
        if near:
            yield LegReport(ranks=tuple(some), by="memory", trainers=near)
        if far and not (host and place.is_whole(host)):
            yield LegReport(ranks=tuple(some), by="messages", trainers=far)


def _address_for(links: Sequence[Link]) -> str:
    """Returns an address of this process that every target can reach."""
    addresses = {local_address_towards(link.client.target.host, 80) for link in links}
    outside = [address for address in addresses if not address.startswith("127.") and address != "::1"]
    return sorted(outside or addresses)[0]


def _is_same(before: EngineInfo, now: EngineInfo) -> bool:
    """Returns True if this is the same start of the same engine, as far as the engine can tell."""
    return before.incarnation == now.incarnation and before.tp_size == now.tp_size and before.engine == now.engine
