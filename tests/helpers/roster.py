"""Engines as the head of an update sees them, without any engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from weightcast.adapters.registry import adapter_for
from weightcast.comm.http import Client
from weightcast.config import Target, UpdateConfig
from weightcast.errors import WeightcastError
from weightcast.protocols import Exporter
from weightcast.transports.link import Link
from weightcast.transports.plan import TargetPlan, UpdatePlan
from weightcast.update.choose import Planner
from weightcast.update.members import Members
from weightcast.update.roster import Roster
from weightcast.wire.engine_info import NO_RECEIVER, EngineInfo, RankInfo
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import PROTOCOL

SPECS = (TensorSpec(name="t", dtype="float32", shape=(8,)),)


def info(kind: str) -> EngineInfo:
    return EngineInfo(
        protocol=PROTOCOL if kind == "native" else NO_RECEIVER,
        kind=kind,
        engine="e 1",
        model="m",
        version=0,
        digest=None,
        state="serving",
        host_id="h",
        tp_size=1,
        ranks=(RankInfo(rank=0, pid=1, device="cpu"),),
        staging="device",
        transports=("broadcast",),
        specs=SPECS,
    )


def link_to(described: EngineInfo, url: str = "http://u", plan: TargetPlan | None = None) -> Link:
    """A target that has answered once."""
    link = Link(client=Client(Target(url), timeout_s=1.0))
    link.meet(described, adapter_for)
    link.plan = plan or link.plan
    return link


class Bare(Exporter):
    """An exporter of nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def specs(self) -> Sequence[TensorSpec]:
        return ()


def roster_of(answers: Mapping[str, EngineInfo | WeightcastError]) -> Roster:
    """A roster of these engines; each probe finds what the mapping has then."""

    async def recognise(client: Client) -> EngineInfo:
        answer = answers[client.target.url]
        if isinstance(answer, WeightcastError):
            raise answer
        return answer

    return Roster(map(Target, answers), timeout_s=1.0, recognise=recognise)


def planner_of(
    places: Sequence[str] = ("cpu",),
    *,
    hosts: Sequence[str] = (),
    nccl: Sequence[Any] = (),
    free_bytes: int = 0,
    specs: Sequence[TensorSpec] = SPECS,
    exporter: Any = None,
    **options: Any,
) -> Planner:
    """A trainer with ranks on these devices."""
    return Planner(
        config=UpdateConfig(**options),
        exporter=exporter or Bare(torch.device("cpu" if places[0] == "cpu" else "cuda:0")),
        specs=tuple(specs),
        places=tuple(places),
        hosts=tuple(hosts),
        nccl=tuple(nccl),
        free_bytes=free_bytes,
    )


class Connecting:
    """Engines and a trainer, of which nothing was asked yet; ``answers`` may change from probe to probe."""

    def __init__(self, answers: dict[str, EngineInfo], planner: Planner) -> None:
        self.answers = answers
        self.roster = roster_of(answers)
        self.members = Members(self.roster.links, planner)

    @property
    def links(self) -> dict[str, Link]:
        return {link.url: link for link in self.members.links}

    def choose(self) -> UpdatePlan:
        self.roster.look(self.members.links)
        return self._use(self.members.choose(first=True))

    def choose_again(self) -> UpdatePlan:
        return self._use(self.members.choose_again())

    def give_way(self, failures: Mapping[str, WeightcastError], *, if_all: bool) -> dict[str, str]:
        links = self.links
        words = self.members.give_way({links[url]: error for url, error in failures.items()}, if_all=if_all)
        return {link.url: one for link, one in words.items()}

    def take(self) -> dict[str, WeightcastError]:
        """Probes all for another attempt; returns the errors of those that the plan does not fit."""
        self.roster.look(self.members.links)
        with suppress(WeightcastError):
            self.members.take(self.members.links)
        return {link.url: link.outcome.failed for link in self.members.links if link.outcome.failed is not None}

    def _use(self, plan: UpdatePlan) -> UpdatePlan:
        self.members.use(plan)
        return plan


def members_of(answers: dict[str, EngineInfo], places: Sequence[str] = ("cpu",), **options: Any) -> Connecting:
    """A membership of these engines; the options are those of ``planner_of``."""
    return Connecting(answers, planner_of(places, **options))
