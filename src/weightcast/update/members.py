"""The targets of one membership, and the plan by which they are updated.  ``retarget`` makes a new one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec

from weightcast.adapters.registry import adapter_for
from weightcast.errors import ConfigError, WeightcastError
from weightcast.protocols import Cell
from weightcast.report import count_of
from weightcast.transports.blame import raise_together
from weightcast.transports.carriers import Carriers
from weightcast.transports.link import Link, in_flight_to, leave_all
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
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import TensorSpec, total_bytes

log = logging.getLogger("weightcast.update.members")


class Members:
    """The targets, and the plan of their updates.

    Attributes:
        plan: The plan that every trainer rank has heard, as ``use`` was told.
        carriers: What carries the weights to the targets.  It outlives an attempt.
        mapped: Targets that have mapped this trainer's memory before the first update.
    """

    def __init__(self, links: Sequence[Link], planner: Planner) -> None:
        self.config = planner.config
        self.links = tuple(links)
        self.plan = UpdatePlan()
        self.carriers = Carriers()
        self.mapped: Sequence[Link] = ()
        self._planner = planner
        self._sized: tuple[UpdatePlan | None, int] = None, 0

    @property
    def gathers(self) -> bool:
        """True if a bucket is gathered from several trainer ranks."""
        return len(self._planner.places) > 1 and not self.plan.scattered

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors in the dtypes in which they travel."""
        return self.plan.travelling(self._planner.specs)

    @property
    def size_bytes(self) -> int:
        """Bytes of ``specs``, added up once for a plan: there may be tens of thousands."""
        if self._sized[0] is not self.plan:
            self._sized = self.plan, total_bytes(self.specs)
        return self._sized[1]

    @property
    def planned(self) -> list[Link]:
        """The targets that the plan was made for, in order."""
        return [link for link in self.links if link.planned]

    @property
    def served(self) -> int | None:
        """Highest version that a target served when it was probed last; None if no target knows its own."""
        infos = [link.answer for link in self.links if isinstance(link.answer, EngineInfo)]
        return max((info.version for info in infos if info.version is not None), default=None)

    def label(self, links: Sequence[Link]) -> str:
        """Names of the transports by which these targets were to be reached last, or those of the plan."""
        return self._planner.label(link.outcome.plan for link in links) or self.plan.transport

    def choose(self, *, first: bool) -> UpdatePlan:
        """Plans updates of the targets, which were just probed; ``use`` takes the plan, if every rank has heard it.

        It raises ConfigError if weights do not fit an engine or no transport reaches all, else the errors of targets.
        Before the ``first`` update it tells which versions engines will refuse.
        """
        config = self.config
        infos = {link.url: link.answer for link in self.links if isinstance(link.answer, EngineInfo)}
        if config.on_failure == "raise" or not infos:
            raise_together([link.answer for link in self.links if isinstance(link.answer, WeightcastError)])
        if first:
            check_scores(config, self._planner.exporter)
            tell_served(infos, config)
        healthy = [link for link in self.links if link.url in infos]
        for link in healthy:
            link.meet(infos[link.url], adapter_for)
        return self._make(healthy)

    def give_way(self, failures: Mapping[Link, WeightcastError], *, if_all: bool) -> dict[Link, str]:
        """Leaves the transports that failed for targets; returns a remark for each for which there is another one.

        None, and nothing is left, if ``if_all`` and one of them must fail.
        """
        planner, words = self._planner, dict[Link, str]()
        for link, failure in failures.items():
            if (found := planner.give_way(link, failure)) is not None:
                planner, words[link] = found
        if if_all and len(words) != len(failures):
            return {}
        self._planner = planner
        return words

    def choose_again(self) -> UpdatePlan:
        """Plans for the targets that were planned for, asking nothing, without the transports that failed."""
        links = self.planned
        for link in links:
            link.plan = TargetPlan()
        return self._make(links)

    def use(self, plan: UpdatePlan) -> None:
        """Updates the targets by this plan from now on."""
        targets = {target.url: target for target in plan.targets}
        for link in self.links:
            link.plan = targets.get(link.url, TargetPlan())
        self.plan = plan

    def divide_cells(self, broken: Sequence[Cell]) -> None:
        """Makes cells small from the next attempt on, unless the caller asked for a size or they are.

        The groups of ``broken`` cells have failed again and again, and none of their engines is to blame.
        """
        planner = self._planner.with_small_cells()
        if self.config.cell_ranks is not None or planner == self._planner:
            return
        self._planner = planner
        self.plan = msgspec.structs.replace(self.plan, cell_limit=planner.cell_limit)
        log.warning(
            "a process group of %d engines failed again and again, and none of them is to blame: later groups "
            "have at most %d engine ranks: %s",
            max(len(cell.urls) for cell in broken),
            planner.cell_limit,
            broken[0].failure,
        )

    def take(self, links: Sequence[Link]) -> list[Link]:
        """Returns the targets, which were just probed, that can take part in an attempt.

        The outcomes of the others say why not.  It raises their errors if one is to fail the update, or no target is
        left.
        """
        for link in links:
            try:
                if isinstance(link.answer, EngineInfo):
                    self._take(link, link.answer)
                else:
                    link.outcome.failed = link.answer
            except WeightcastError as error:
                link.outcome.failed = error
        fitting = [link for link in links if link.outcome.failed is None]
        if self.config.on_failure == "raise" or not fitting:
            raise_together(link.outcome.failed for link in links)
        if not fitting:
            raise ConfigError("no target is active")
        for link in fitting:
            link.outcome.plan = link.plan
        return fitting

    def _take(self, link: Link, info: EngineInfo) -> None:
        planner, plan = self._planner, self.plan
        link.meet(info, adapter_for)
        if not link.planned:
            check_fits([link], planner.specs)
            check_proof([link], self.config)
            late = planner.plan_late(plan, link)
            warn_hazards(link)
            link.plan = late
        link.start.pause = choose_pause(link, self.config.pause)
        # Buckets and handles were planned for an engine like this one.
        target = link.plan
        shares = target.reads_memory and target.sharing in ("torch", "ring")
        other = plan.packing.also(link.adapter.packing) != plan.packing
        other = other or (target.reads_memory and bool(plan.sharings) and target.sharing not in plan.sharings)
        if other or (shares and target.opens[1] - target.opens[0] != info.tp_size):
            raise ConfigError(
                f"{link.url} is another engine than the buckets were planned for: {info.engine}, {info.tp_size} ranks",
                hint="call retarget() with the targets as they are now",
            )

    def renew_carriers(self, links: Sequence[Link]) -> Carriers:
        """Makes what carries the weights to these targets, unless it is there already.

        A target that came back is another member of its groups.
        """
        signature = self.plan.cell_limit, *((link.info.incarnation, link.plan) for link in links)
        shown = all(link.info.shows_restart for link in links)
        if shown and signature == self.carriers.signature:
            return self.carriers
        self.carriers.close()
        config, exporter = self.config, self._planner.exporter
        sender = Sender(
            config=config,
            device=exporter.device,
            specs=self.specs,
            num_ranks=len(self._planner.places),
            in_flight=in_flight_to(links),
        )
        by_spec = dict.fromkeys((link.plan.transport, link.plan.variant) for link in links)
        groups = {one: [link for link in links if (link.plan.transport, link.plan.variant) == one] for one in by_spec}
        parts = (spec_of(*one).build(its, self.plan, sender) for one, its in groups.items())
        self.carriers = Carriers(parts, signature)
        return self.carriers

    def meet_ahead(self) -> None:
        """Makes the groups of the updates to come, outside of any session, with engines that can join so.

        If that fails, the first update tries again and reports it; what kept an engine from joining is logged here.
        """
        links = self.planned
        in_groups = [link for link in links if link.plan.cells]
        if not in_groups or not all(link.adapter.meeting == "weightcast" for link in in_groups):
            return
        if self.plan.exchanges:
            return  # all trainer ranks join such a group, in step
        try:
            self.renew_carriers(links).connect()
        except WeightcastError as error:
            log.warning("no process group could be made with the engines yet; the first update tries again: %s", error)

    def close_carriers(self) -> None:
        """Closes what carries the weights, on both sides; safe to call twice."""
        carriers, self.carriers = self.carriers, Carriers()
        carriers.close()
        if carriers.signature is None and self.mapped:  # no update, which would have made one
            leave_all(self.mapped)
        self.mapped = ()

    def _make(self, links: Sequence[Link]) -> UpdatePlan:
        config = self.config
        plan = self._planner.plan(links)
        check_proof(links, config)
        for link in links:
            link.start.pause = choose_pause(link, config.pause)
            warn_hazards(link)
        for dtype, numbers in plan.cast.items():
            log.info("%s to be sent in %s, which every engine keeps", count_of(len(numbers), "tensor"), dtype)
        return plan
