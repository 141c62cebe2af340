"""The plan of the updates to come, handed to engines so that the first update need not work it out.

Nothing depends on it.  An engine that cannot take the plan now, or that restarts, works it out in its next update.
"""

from __future__ import annotations

import asyncio
import logging
import operator
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from weightcast.adapters.bucket_sources import source_of
from weightcast.comm import event_loop
from weightcast.comm.run_steps import converse_on_loop
from weightcast.comm.shared_buckets import Shared
from weightcast.config import UpdateConfig
from weightcast.digest.bucket_sums import PlanSums
from weightcast.digest.sent import CastSums, casts_of
from weightcast.errors import WeightcastError
from weightcast.transports.handles import handles_for
from weightcast.transports.link import Link, in_flight_to
from weightcast.transports.plan import TargetPlan
from weightcast.update.finite import FiniteCheck
from weightcast.update.sessions import this_process
from weightcast.wire.answers import Ack
from weightcast.wire.bucket_sources import Source
from weightcast.wire.layout import BucketLayout, TensorSpec
from weightcast.wire.messages import Prepare, Way
from weightcast.wire.plans import UpdateTables

log = logging.getLogger("weightcast.update.prepare")

_AT_ONCE = 16  # engines that are sent the plan: each request holds all tables, megabytes with many tensors


class Preparation:
    """The engines' work on a plan, beside which the trainer does its own.

    Attributes:
        mapped: The engines that map this trainer's memory.
    """

    def __init__(
        self,
        links: Sequence[Link],
        plan: UpdateTables,
        config: UpdateConfig,
        shared: Sequence[Sequence[Shared]],
    ) -> None:
        """Sends the plan to every engine that takes it; ``shared`` is as ``BucketStream.share_ahead`` returns it."""
        plan = plan if in_flight_to(links) > 1 else plan.without_sizes
        owner = this_process()
        messages: dict[tuple[object, ...], tuple[Prepare, object]] = {}
        self._asked: list[Link] = []
        self.mapped: list[Link] = []
        steps: list[Coroutine[Any, Any, Ack]] = []
        few = asyncio.Semaphore(_AT_ONCE)
        for link in links:
            if not link.adapter.prepares:
                continue
            way = _way_to(link.plan)
            given = [handles_for(link, some) for some in shared] if not link.plan.near and not link.plan.reads else []
            key = way, *(id(one) for some in given for one in some)
            if key not in messages:
                sources = _sources(way, given)
                message = Prepare(plan=plan, owner=owner, verify=config.verify, way=way, sources=sources)
                messages[key] = message, given  # kept alive, so that their ids stay their own
            if messages[key][0].sources:
                self.mapped.append(link)
            self._asked.append(link)
            asking = link.adapter.prepare(messages[key][0])
            steps.append(_within(few, converse_on_loop(link.client, asking, timeout_s=config.timeout_s)))
        self._answers: Sequence[Future[Ack]] = event_loop.submit(steps)

    def wait(self) -> None:
        """Waits for the engines.

        What keeps one of them from preparing is left to its first update, and logged.
        """
        for link, answer in zip(self._asked, self._answers, strict=True):
            try:
                answer.result()
            except WeightcastError as error:
                log.info("%s works out its first update when that comes, which takes longer: %s", link.url, error)


async def _within(few: asyncio.Semaphore, answer: Coroutine[Any, Any, Ack]) -> Ack:
    try:
        async with few:
            return await answer
    finally:
        answer.close()  # an interrupt may come before its turn


def _way_to(target: TargetPlan) -> Way:
    """How the ranks of an engine get their shares."""
    if target.gathers:
        return "buckets"
    if "group" in target.carriers:
        return "messages"
    return "reads" if target.reads_remotely else "memory"


def _sources(way: Way, given: Sequence[Sequence[Shared]]) -> tuple[Source, ...]:
    """The source of each bucket as ``Announce`` will have it; empty unless all buckets lie in memory already."""
    lies = (any(one.memory is not None or one.memories for one in some) for some in given)
    if way in ("messages", "reads") or not given or not all(lies):
        return ()
    return tuple(source_of(some) for some in given)


class SendPlan:
    """The tables of an update, and what the buckets need on their way.

    It is kept as long as the tables of its buckets stay alike, and the same engines are reached in the same way.  All
    that it has goes with it.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], layouts: Sequence[BucketLayout], told: Sequence[bytes] = ()
    ) -> None:
        """The arguments are those of ``UpdateTables``."""
        self.tables = UpdateTables(tuple(specs), layouts, tuple(layout.size_bytes for layout in layouts), told)
        self.sums = PlanSums(layouts)
        self.finite = FiniteCheck()
        self._kept: list[Sequence[TensorSpec]] = []
        self._casts = CastSums()

    def casts(self, kept: Iterable[Sequence[TensorSpec]]) -> CastSums:
        """The sums of ``casts_of``; worked out again only if an engine keeps other tensors than before."""
        tables = list(kept)
        if len(tables) != len(self._kept) or not all(map(operator.is_, tables, self._kept)):
            self._casts, self._kept = CastSums(casts_of(self.tables.specs, tables)), tables
        return self._casts
