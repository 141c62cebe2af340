"""The plan of the updates to come, handed to engines so that the first update need not work it out.

Nothing depends on it.  An engine that cannot take the plan now, or that restarts, works it out in its next update.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from weightcast.comm import event_loop
from weightcast.config import UpdateConfig
from weightcast.digest.bucket_sums import PlanSums
from weightcast.digest.sent import casts_of
from weightcast.errors import WeightcastError
from weightcast.protocols import Preparing
from weightcast.transports.link import Link, in_flight_to
from weightcast.transports.spec import TransportSpec
from weightcast.update.finite import FiniteCheck
from weightcast.wire.answers import Ack
from weightcast.wire.bucket import run_sizes
from weightcast.wire.bucket_sources import Part
from weightcast.wire.layout import BucketLayout, TensorSpec
from weightcast.wire.messages import Prepare, Way
from weightcast.wire.plans import UpdatePlan

log = logging.getLogger("weightcast.update.prepare")


class SharedParts(msgspec.Struct, frozen=True):
    """The parts that one trainer rank gives of each bucket; ``host`` is that of its buffers, empty for any."""

    buckets: tuple[tuple[Part, ...], ...]
    host: str = ""


class Preparation:
    """The engines' work on a plan, beside which the trainer does its own."""

    def __init__(
        self,
        links: Sequence[Link],
        plan: UpdatePlan,
        config: UpdateConfig,
        transport_of: Callable[[str], TransportSpec],
        parts: Sequence[SharedParts],
    ) -> None:
        """Sends the plan to every engine that takes it; ``transport_of`` is the transport to a URL.

        ``parts`` is what each trainer rank gives of each bucket, where engine ranks get shares; else empty.
        """
        plan = plan if in_flight_to(links) > 1 else plan.without_runs
        messages: dict[tuple[Way, str], Prepare] = {}
        self._asked: list[Link] = []
        steps: list[Coroutine[Any, Any, Ack]] = []
        for link in links:
            if not isinstance(link.adapter, Preparing):
                continue
            way = _way_to(link, transport_of(link.url))
            host = link.info.host_id if way == "buffers" else ""
            message = messages.get((way, host))
            if message is None:
                shares = () if way == "buckets" or not parts else _shares_of(parts, way, host)
                message = Prepare(plan=plan, verify=config.verify, way=way, parts=shares)
                messages[way, host] = message
            self._asked.append(link)
            steps.append(link.prepare(link.adapter.prepare(message), timeout_s=config.timeout_s))
        self._answers: Sequence[Future[Ack]] = event_loop.submit(steps)

    def wait(self) -> None:
        """Waits for the engines.  What keeps one of them from preparing is left to its first update, and logged."""
        for link, answer in zip(self._asked, self._answers, strict=True):
            try:
                answer.result()
            except WeightcastError as error:
                log.info("%s works out its first update when that comes, which takes longer: %s", link.url, error)


def _way_to(link: Link, spec: TransportSpec) -> Way:
    """How the ranks of an engine get their shares."""
    if not spec.scattered:
        return "buckets"
    if spec.exchanges:
        return "messages"
    return "reads" if link.sharing == "remote" else "buffers"


def _shares_of(parts: Sequence[SharedParts], way: Way, host: str) -> tuple[tuple[tuple[Part, ...], ...], ...]:
    """The parts of each bucket in the form of ``Prepare.parts``; ``host`` is that of the engine."""
    if way == "messages":
        return tuple(tuple(own.buckets[number] for own in parts) for number in range(_count(parts)))
    near = [own for own in parts if way == "reads" or own.host in ("", host)]
    return tuple(tuple(own.buckets[number] for own in near if own.buckets[number]) for number in range(_count(parts)))


def _count(parts: Sequence[SharedParts]) -> int:
    return len(parts[0].buckets) if parts else 0


class SendPlan:
    """The tables of an update, and what the buckets need on their way.

    It is kept as long as the tables of its buckets and the names of its zero-copy tensors (``lent``, by bucket) stay
    alike, and the same engines are reached in the same way.  All that it has goes with it.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], layouts: Sequence[BucketLayout], lent: Sequence[tuple[str, ...]]
    ) -> None:
        runs = tuple(run_sizes(layout, lent[number] if lent else ()) for number, layout in enumerate(layouts))
        self.tables = UpdatePlan(tuple(specs), layouts, runs)
        self.lent = lent
        self.sums = PlanSums(layouts)
        self.finite = FiniteCheck()
        self._kept: list[Sequence[TensorSpec]] = []
        self._casts: dict[str, set[str]] = {}

    def casts(self, kept: Iterable[Sequence[TensorSpec]]) -> dict[str, set[str]]:
        """As ``casts_of``; worked out again only if an engine keeps other tensors than before."""
        tables = list(kept)
        if len(tables) != len(self._kept) or not all(map(operator.is_, tables, self._kept)):
            self._casts, self._kept = casts_of(self.tables.specs, tables), tables
        return self._casts
