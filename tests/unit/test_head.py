"""What the head says of an update to come."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from weightcast.config import Target, UpdateConfig
from weightcast.head import Head
from weightcast.kinds import adapter_for
from weightcast.transports.link import Link
from weightcast.transports.outcome import Outcome
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import PROTOCOL, Ack, EngineInfo, RankInfo

SPECS = (TensorSpec(name="t", dtype="float32", shape=(8,)),)


def info(kind: str) -> EngineInfo:
    return EngineInfo(
        protocol=PROTOCOL,
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


@pytest.mark.parametrize(
    ("kinds", "told"), [(("native",), ((32,), (16,))), (("native", "vllm"), ()), (("sglang",), ())]
)
def test_bucket_runs_are_told_only_where_no_answer_is_waited_for_before_the_next_broadcast(kinds, told):
    head: Any = object.__new__(Head)
    head._config = UpdateConfig()
    head._links = [SimpleNamespace(adapter=adapter_for(info(kind))) for kind in kinds]
    assert head._open_message(1, SPECS, ((32,), (16,))).bucket_runs == told


URL = "http://e"


class Roster:
    """Remembers how updates ended."""

    def __init__(self, infos: dict[str, EngineInfo]) -> None:
        self.infos = infos
        self.rows: list[Any] = []
        self.current: Any = None

    def client(self, url: str) -> Any:
        return SimpleNamespace(target=SimpleNamespace(url=url, host="e"))

    def look(self, urls: Any, *, hasty: bool = False, since: float | None = None) -> dict[str, EngineInfo]:
        return {url: self.infos[url] for url in urls}

    def broke_off(self, url: str, reason: str, *, whole: bool) -> None:
        pass

    def ended(self, row: Any, *, version: int, moved_on: bool) -> None:
        self.rows.append(row)


def head_of(infos: dict[str, EngineInfo], **options: Any) -> Any:
    exporter: Any = SimpleNamespace(device=torch.device("cpu"))
    head = Head([Target(url) for url in infos], Roster(infos), UpdateConfig(**options), exporter, SPECS, ["cpu"])
    head.begin(1)
    return head


def scored(head: Any, theirs: list[float], mine: list[float], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the head decides of an engine that has switched and proved what it keeps."""
    link = Link(client=head._roster.client(URL), adapter=adapter_for(info("native")), info=info("native"))
    head._links, head._outcomes = [link], {URL: Outcome(info=link.info)}
    outcome = head._outcomes[URL]
    outcome.committed, outcome.proof = Ack(ok=True, version=1, ranks=1), "resident"
    monkeypatch.setattr("weightcast.head.converse", lambda *_, **__: theirs)
    return head.compare([5, 6, 7], mine)


@pytest.mark.parametrize("on_failure", ["raise", "quarantine"])
@pytest.mark.parametrize(
    ("theirs", "mine"),
    [([-1.0, -9.0], [-1.0, -2.0]), ([-1.0, -2.0], [-1.0, math.nan]), ([math.nan, -2.0], [-1.0, -2.0])],
)
def test_who_answers_otherwise_does_not_serve_the_new_version(theirs, mine, on_failure, monkeypatch):
    head = head_of({URL: info("native")}, on_failure=on_failure, verify="behaviour")
    decision = scored(head, theirs, mine, monkeypatch)
    assert decision.error == "UpdateFailed"
    assert not decision.report.ok
    assert [(row.status, row.proof) for row in decision.report.targets] == [("quarantined", "none")]
    assert "answers otherwise" in decision.report.targets[0].message
    assert [row.status for row in head._roster.rows] == ["quarantined"]
    assert head._roster.current is None


def test_who_answers_alike_has_proved_it(monkeypatch):
    head = head_of({URL: info("native")}, verify="behaviour")
    decision = scored(head, [-1.0, -2.0], [-1.0, -2.01], monkeypatch)
    assert (decision.error, decision.report.ok, decision.report.targets[0].proof) == ("", True, "behaviour")


def test_who_was_away_when_the_buckets_were_planned_is_asked_whether_they_fit():
    away = info("native")
    away = msgspec.structs.replace(away, specs=(TensorSpec(name="other", dtype="float32", shape=(8,)),))
    head = head_of({URL: info("native"), "http://late": away}, on_failure="quarantine", transport="broadcast")
    head._name = "broadcast"
    links = head._make_links(head._roster.infos)
    assert [link.url for link in links] == [URL]
    assert "missing other" in str(head._outcomes["http://late"].failed)
