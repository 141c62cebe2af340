"""Engines as the head of an update sees them, without any engine."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from weightcast.config import Target, UpdateConfig
from weightcast.protocols import Exporter
from weightcast.update.choose import Planner
from weightcast.update.members import Members
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


class Roster:
    """Remembers how updates ended."""

    def __init__(self, infos: dict[str, EngineInfo]) -> None:
        self.infos = infos
        self.urls = tuple(infos)
        self.rows: list[Any] = []
        self.current: Any = None
        self.tried: dict[int, str | None] = {}

    def client(self, url: str) -> Any:
        return SimpleNamespace(target=SimpleNamespace(url=url, host="e"))

    def look(self, urls: Any, *, hasty: bool = False, since: float | None = None) -> dict[str, EngineInfo]:
        return {url: self.infos[url] for url in urls}

    def broke_off(self, url: str, reason: str, *, whole: bool) -> None:
        pass

    def ended(self, row: Any, *, version: int, moved_on: bool, digest: str | None) -> None:
        self.rows.append(row)


class Bare(Exporter):
    """An exporter of nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def specs(self) -> Sequence[TensorSpec]:
        return ()


def members_of(
    infos: dict[str, EngineInfo],
    places: Sequence[str] = ("cpu",),
    *,
    hosts: Sequence[str] = (),
    nccl: Sequence[Any] = (),
    free_bytes: int = 0,
    specs: Sequence[TensorSpec] = SPECS,
    exporter: Any = None,
    **options: Any,
) -> Members:
    """A membership of these engines and a trainer with ranks on these devices, of which nothing was asked yet."""
    roster: Any = Roster(infos)
    planner = Planner(
        config=UpdateConfig(**options),
        exporter=exporter or Bare(torch.device("cpu" if places[0] == "cpu" else "cuda:0")),
        specs=tuple(specs),
        places=tuple(places),
        hosts=tuple(hosts),
        nccl=tuple(nccl),
        free_bytes=free_bytes,
    )
    return Members([Target(url) for url in infos], roster, planner)
