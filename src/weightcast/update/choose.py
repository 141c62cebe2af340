"""Everything that the head decides before anything moves: targets, transport, and whether the weights fit.

``Plan`` belongs to one membership.  ``retarget`` makes a new one, which inherits the links of targets that stay.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from weightcast.adapters.registry import adapter_for
from weightcast.comm.update_group import local_address_towards
from weightcast.config import Target, UpdateConfig
from weightcast.errors import ConfigError, WeightcastError
from weightcast.fleet.roster import Roster
from weightcast.protocols import Exporter, Sharing, Transport
from weightcast.transports.blame import raise_together
from weightcast.transports.link import Link, in_flight_to
from weightcast.transports.preflight import (
    check_first_version,
    check_fits,
    check_pause,
    check_places,
    check_proof,
    check_scattered,
    choose_receivers,
    choose_transport,
    warn_hazards,
)
from weightcast.transports.spec import Placement, TransportSpec, Wiring
from weightcast.update.messages import Choice
from weightcast.watch.listeners import Events
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import Packing, TensorSpec

log = logging.getLogger("weightcast.update.choose")

Probed = dict[str, EngineInfo | WeightcastError]  # by URL


class Plan:
    """The targets, their links and the transport that reaches them."""

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
    ) -> None:
        """Nothing is asked yet.

        Args:
            targets: The engines.
            roster: The record of every engine's health.
            config: The caller's settings.
            exporter: The source of the weights.
            specs: The tensors that will be sent.
            places: UUID of each trainer rank's device; the first is the head's.
            links: Links that an earlier plan hands on, by URL.
            events: Told of every message to a target.
        """
        self.urls = tuple(target.url for target in targets)
        self.links = dict(links or {})
        self._events = events if events is not None else Events()
        self.receivers: tuple[int, ...] = (0,)
        self._config = config
        self._exporter = exporter
        self._specs = tuple(specs)
        self._places = tuple(places)
        self._roster = roster
        self._transport: TransportSpec | None = None
        self._packing = Packing()
        self._zero_copy = False

    @property
    def gathers(self) -> bool:
        """True if a bucket is gathered from several trainer ranks."""
        return len(self._places) > 1

    @property
    def transport(self) -> TransportSpec:
        """The chosen transport; ``choose`` comes first."""
        assert self._transport is not None, "choose() comes first"
        return self._transport

    def choose(self) -> Choice:
        """Probes every target; chooses the transport and everything that it needs.

        Raises:
            ConfigError: The weights do not fit an engine, or no transport reaches all of them.
            TargetUnreachable, TargetRejected, TargetsFailed: Engines do not answer, or refuse.
        """
        infos = self.probe(self.urls)
        healthy = {url: info for url, info in infos.items() if isinstance(info, EngineInfo)}
        if self._config.on_failure == "raise" or not healthy:
            raise_together([info for info in infos.values() if not isinstance(info, EngineInfo)])
        if self._roster.current is None:
            check_first_version(healthy, self._config)
        for link in self.links.values():
            link.planned = False
            link.opens = slice(0, 0)
        links = [self.link(url, info) for url, info in healthy.items()]
        for link in links:
            check_fits(link, self._specs)
        placement = self._placement(healthy)
        spec = self._transport = self._choose_transport(links, placement)
        check_places(spec, placement)
        self.receivers = choose_receivers(spec, placement)
        self._packing = links[0].adapter.packing
        opens: dict[Sharing, int] = {"weightcast": 0, "remote": 0, "torch": 0, "ring": 0}
        for link in links:
            self._check(link)
            self._packing = self._packing.also(link.adapter.packing)
            first = opens[link.sharing]
            opens[link.sharing] += link.info.tp_size
            link.opens = slice(first, opens[link.sharing])
        shares = spec.shares_memory
        # A copy hides behind the link of a GPU; on the host it takes the cores and the memory that the sending needs.
        on_host = spec.zero_copy and self._exporter.device.type == "cpu" and not self.gathers
        self._zero_copy = on_host and hasattr(self._exporter, "lend") and in_flight_to(links) > 1
        return Choice(
            zero_copy=self._zero_copy,
            transport=spec.name,
            scattered=spec.scattered,
            exchanges=spec.exchanges,
            mapped=spec.mapped,
            receivers=self.receivers,
            packing=self._packing,
            ways=tuple({link.sharing for link in links}) if shares else (),
            opens=opens["torch"] if shares else 0,
            ring_opens=opens["ring"] if shares else 0,
            served=max((info.version for info in healthy.values() if info.version is not None), default=None),
        )

    def kept_links(self, roster: Roster) -> dict[str, Link]:
        """Returns copies of the links to targets that stay when the membership changes."""
        return {url: replace(link) for url, link in self.links.items() if roster.knows(url, link.client)}

    def probe(self, urls: Sequence[str], *, hasty: bool = False, since: float | None = None) -> Probed:
        """Asks targets for their description; returns each target's description or error."""
        found = self._roster.look(urls, hasty=hasty, since=since)
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
        """Builds the chosen transport for these links."""
        return self.transport.build(
            Wiring(
                links=links,
                specs=self._specs,
                device=self._exporter.device,
                config=self._config,
                num_trainers=len(self._places),
                address=lambda: _address_for(links),
            )
        )

    def _choose_transport(self, links: Sequence[Link], placement: Placement) -> TransportSpec:
        """The transport; ``"auto"`` passes over one that these tensors cannot go by."""
        asked = self._config.transport
        spec = choose_transport(asked, placement)
        if asked != "auto" or not spec.scattered:
            return spec
        try:
            for link in links:
                check_scattered(link, self._specs, self._config, self._exporter)
        except ConfigError as error:
            log.info("%s is passed over: %s", spec.name, error)
            return choose_transport(asked, placement, without=(spec.name,))
        return spec

    def _placement(self, infos: Mapping[str, EngineInfo]) -> Placement:
        return Placement(
            infos=infos,
            device=self._exporter.device,
            places=self._places,
            shared_folder=self._config.disk_folder is not None,
            primitive=self._config.direct_by,
            keep_mapped=self._config.keep_mapped,
        )

    def _check(self, link: Link) -> None:
        """Checks that the target can be updated by the chosen transport."""
        check_pause(link, self._config.pause)
        warn_hazards(link)
        check_proof(link, self._config.require, scores=hasattr(self._exporter, "logprobs"))
        spec = self.transport
        if spec.scattered:
            check_scattered(link, self._specs, self._config, self._exporter)
        link.adapter.check(self._specs, delivery=spec.delivery, bucket_bytes=self._config.bucket_bytes)
        link.sharing = spec.sharing or link.adapter.sharing
        link.planned = True

    def _check_late(self, link: Link) -> None:
        """Checks a target that was away, or was another engine, when the transport was chosen."""
        check_fits(link, self._specs)
        spec = choose_transport(self.transport.name, self._placement({link.url: link.info}))
        if spec is not self.transport:
            raise ConfigError(
                f"{link.url} would be reached by {spec.name} over {spec.primitive}, and the update goes over "
                f"{self.transport.primitive}",
                hint="call retarget() with the targets as they are now",
            )
        self._check(link)

    def _check_still_fits(self, link: Link) -> None:
        """Checks that buckets and handles were planned for an engine like this one."""
        check_pause(link, self._config.pause)
        opens = len(range(1 << 30)[link.opens])
        shares = self.transport.shares_memory and link.sharing in ("torch", "ring")
        other = self._packing.also(link.adapter.packing) != self._packing
        other = other or (self._zero_copy and link.adapter.in_flight < 2)
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


def _address_for(links: Sequence[Link]) -> str:
    """Returns an address of this process that every target can reach."""
    addresses = {local_address_towards(link.client.target.host, 80) for link in links}
    outside = [address for address in addresses if not address.startswith("127.") and address != "::1"]
    return sorted(outside or addresses)[0]


def _is_same(before: EngineInfo, now: EngineInfo) -> bool:
    """Returns True if this is the same start of the same engine, as far as the engine can tell."""
    return before.incarnation == now.incarnation and before.tp_size == now.tp_size and before.engine == now.engine
