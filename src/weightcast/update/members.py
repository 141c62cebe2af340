"""The targets of one membership: their links, and the plan by which they are updated.

``retarget`` makes a new one, which inherits the links of targets that stay.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from weightcast.adapters.registry import adapter_for
from weightcast.config import Target
from weightcast.errors import ConfigError, WeightcastError
from weightcast.fleet.roster import Roster
from weightcast.report import count_of
from weightcast.transports.blame import raise_together
from weightcast.transports.carriers import Carriers
from weightcast.transports.link import Link, in_flight_to
from weightcast.transports.plan import TargetPlan, UpdatePlan
from weightcast.transports.preflight import (
    check_fits,
    check_proof,
    check_scores,
    choose_pause,
    tell_served,
    warn_hazards,
)
from weightcast.transports.registry import spec_of
from weightcast.transports.spec import Sender
from weightcast.update.choose import Planner
from weightcast.watch.listeners import Events
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import TensorSpec

log = logging.getLogger("weightcast.update.members")

Probed = dict[str, EngineInfo | WeightcastError]  # by URL


class Members:
    """The targets, a link to each that was there, and the plan of their updates.

    Attributes:
        plan: The plan that every trainer rank has heard; ``choose`` and ``give_way`` make others.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        roster: Roster,
        planner: Planner,
        links: Mapping[str, Link] | None = None,
        events: Events | None = None,
    ) -> None:
        """Nothing is asked yet; ``links`` are those that an earlier membership hands on, by URL."""
        self.urls = tuple(target.url for target in targets)
        self.links = dict(links or {})
        self.plan = UpdatePlan()
        self._planner = planner
        self._roster = roster
        self._events = events if events is not None else Events()

    @property
    def gathers(self) -> bool:
        """True if a bucket is gathered from several trainer ranks."""
        return len(self._planner.places) > 1 and not self.plan.scattered

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors in the dtypes in which they travel."""
        return self.plan.travelling(self._planner.specs)

    def label(self, links: Sequence[Link]) -> str:
        """Names of the transports that reach these targets, or those of the plan."""
        return self._planner.label(link.plan for link in links) or self.plan.transport

    def choose(self) -> UpdatePlan:
        """Probes every target and plans their updates.

        It raises ConfigError if weights do not fit an engine or no transport reaches all, else the errors of targets.
        """
        config = self._planner.config
        infos = self.probe(self.urls)
        healthy = {url: info for url, info in infos.items() if isinstance(info, EngineInfo)}
        if config.on_failure == "raise" or not healthy:
            raise_together([info for info in infos.values() if not isinstance(info, EngineInfo)])
        if self._roster.current is None:
            check_scores(config, self._planner.exporter)
            tell_served(healthy, config)
        return self._make([self.link(url, info) for url, info in healthy.items()])

    def give_way(self, failures: Mapping[str, WeightcastError], *, if_all: bool) -> dict[str, str]:
        """Leaves the transports that failed for targets; returns a remark for each for which there is another one.

        None, and nothing is left, if ``if_all`` and one of them must fail.
        """
        planner, words = self._planner, dict[str, str]()
        for url, failure in failures.items():
            link = self.links.get(url)
            found = planner.give_way(link, failure) if link is not None else None
            if found is not None:
                planner, words[url] = found
        if if_all and len(words) != len(failures):
            return {}
        self._planner = planner
        return words

    def choose_again(self) -> UpdatePlan:
        """Plans for the targets that were planned for, asking nothing, without the transports that failed."""
        return self._make([link for link in self.links.values() if link.planned])

    def divide_cells(self) -> bool:
        """Makes cells small from the next attempt on, unless the caller asked for a size or they are."""
        planner = self._planner.with_small_cells()
        if self._planner.config.cell_ranks is not None or planner == self._planner:
            return False
        self._planner = planner
        self.plan = msgspec.structs.replace(self.plan, cell_limit=planner.cell_limit)
        return True

    def kept_links(self, roster: Roster) -> dict[str, Link]:
        """Returns copies of the links to targets that stay when the membership changes."""
        return {url: replace(link) for url, link in self.links.items() if roster.knows(url, link.client)}

    def probe(self, urls: Sequence[str], *, hasty: bool = False, since: float | None = None) -> Probed:
        """Asks targets for their description; returns each target's description or error."""
        return self._added(self._roster.look(urls, hasty=hasty, since=since))

    async def probe_hastily(self, url: str) -> EngineInfo | WeightcastError:
        """As ``probe`` of one target with ``hasty``, on the event loop."""
        return self._added(await self._roster.look_on_loop([url], hasty=True))[url]

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
                    check_fits([link], self._planner.specs)
                    check_proof([link], self._planner.config)
                    target = self._planner.plan_late(self.plan, link)
                    warn_hazards(link)
                    link.plan = target
                link.pause = choose_pause(link, self._planner.config.pause)
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
            link = Link(client=self._roster.client(url), adapter=adapter_for(info), info=info, events=self._events)
            self.links[url] = link
        link.info = info
        link.adapter.renew(info)
        return link

    def build_carriers(self, links: Sequence[Link]) -> Carriers:
        """Builds the head's end of everything that carries the weights to these targets."""
        config, exporter = self._planner.config, self._planner.exporter
        sender = Sender(
            config=config,
            device=exporter.device,
            specs=self.specs,
            num_ranks=len(self._planner.places),
            in_flight=in_flight_to(links),
        )
        by_spec = dict.fromkeys((link.plan.transport, link.plan.variant) for link in links)
        groups = {one: [link for link in links if (link.plan.transport, link.plan.variant) == one] for one in by_spec}
        return Carriers(spec_of(*one).build(its, self.plan, sender) for one, its in groups.items())

    def _make(self, links: Sequence[Link]) -> UpdatePlan:
        config = self._planner.config
        for link in self.links.values():
            link.plan = TargetPlan()
        plan = self._planner.plan(links)
        check_proof(links, config)
        for link, target in zip(links, plan.targets, strict=True):
            link.pause = choose_pause(link, config.pause)
            warn_hazards(link)
            link.plan = target
        for dtype, numbers in plan.cast.items():
            log.info("%s to be sent in %s, which every engine keeps", count_of(len(numbers), "tensor"), dtype)
        self.plan = plan
        return plan

    def _check_still_fits(self, link: Link) -> None:
        """Checks that buckets and handles were planned for an engine like this one."""
        target, plan = link.plan, self.plan
        shares = target.reads_memory and target.sharing in ("torch", "ring")
        other = plan.packing.also(link.adapter.packing) != plan.packing
        other = other or (target.reads_memory and bool(plan.sharings) and target.sharing not in plan.sharings)
        if other or (shares and target.opens[1] - target.opens[0] != link.info.tp_size):
            raise ConfigError(
                f"{link.url} is another engine than the buckets were planned for: {link.info.engine}, "
                f"{link.info.tp_size} ranks",
                hint="call retarget() with the targets as they are now",
            )

    def _added(self, found: Probed) -> Probed:
        return {
            url: self._add_break_off(url, info) if isinstance(info, EngineInfo) else info for url, info in found.items()
        }

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


def _is_same(before: EngineInfo, now: EngineInfo) -> bool:
    """Returns True if this is the same start of the same engine, as far as the engine can tell."""
    return before.incarnation == now.incarnation and before.tp_size == now.tp_size and before.engine == now.engine
