"""The head's choices and its decisions about failed targets."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
import torch

from tests.helpers.roster import SPECS, Bare, Roster, info
from weightcast.adapters.registry import adapter_for
from weightcast.comm.ipc import host_id
from weightcast.comm.shared_buckets import TorchMemory, memory_of_ranks
from weightcast.config import Target, UpdateConfig
from weightcast.errors import ConfigError, TargetRejected, TargetUnreachable
from weightcast.transports.link import Link
from weightcast.transports.outcome import Outcome
from weightcast.transports.plan import TargetPlan
from weightcast.transports.preflight import check_places
from weightcast.transports.registry import spec_of
from weightcast.transports.topology import Topology
from weightcast.update.choose import Planner
from weightcast.update.head import Head
from weightcast.update.sessions import open_message
from weightcast.wire.answers import Ack
from weightcast.wire.codec import decode, encode
from weightcast.wire.engine_info import EngineInfo, RankInfo
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets
from weightcast.wire.plans import UpdateTables


@pytest.mark.parametrize(("kinds", "told"), [(("native",), (32, 16)), (("native", "vllm"), ()), (("sglang",), ())])
def test_open_has_bucket_sizes_only_if_two_buckets_may_be_in_flight(kinds, told):
    links: Any = [SimpleNamespace(adapter=adapter_for(info(kind)), pause=None) for kind in kinds]
    plan = UpdateTables(SPECS, plan_buckets(SPECS, bucket_bytes=64, packing=Packing()), (32, 16))
    message = open_message(UpdateConfig(), links, 1, plan)
    assert message.bucket_sizes == told
    assert decode(encode(message)) == message


URL = "http://e"


def head_of(infos: dict[str, EngineInfo], **options: Any) -> Any:
    exporter = Bare(torch.device("cpu"))
    planner = Planner(config=UpdateConfig(**options), exporter=exporter, specs=SPECS, places=("cpu",))
    roster: Any = Roster(infos)
    head = Head([Target(url) for url in infos], roster, planner)
    head.begin(1)
    return head


def scored(
    head: Any, theirs: list[float] | Exception, mine: list[float], monkeypatch: pytest.MonkeyPatch, why_not: str = ""
) -> Any:
    """Returns the head's result for an engine that has switched and proved its weights."""
    plan, described = TargetPlan(url=URL, transport="broadcast"), info("native")
    link = Link(client=head._roster.client(URL), adapter=adapter_for(described), info=described, plan=plan)
    head.sessions.links, head._outcomes = [link], {URL: Outcome(info=link.info)}
    outcome = head._outcomes[URL]
    outcome.committed, outcome.proof = Ack(ok=True, version=1, ranks=1), "resident"
    monkeypatch.setattr("weightcast.update.verify.converse_on_loop", AsyncMock(side_effect=[theirs]))
    return head.compare([5, 6, 7], mine, why_not)


@pytest.mark.parametrize("on_failure", ["raise", "quarantine"])
@pytest.mark.parametrize(
    ("theirs", "mine"),
    [([-1.0, -9.0], [-1.0, -2.0]), ([-1.0, -2.0], [-1.0, math.nan]), ([math.nan, -2.0], [-1.0, -2.0])],
)
def test_engine_with_other_logprobs_does_not_serve_the_new_version(theirs, mine, on_failure, monkeypatch):
    head = head_of({URL: info("native")}, on_failure=on_failure, verify="behaviour")
    decision = scored(head, theirs, mine, monkeypatch)
    assert decision.failure.error == "UpdateFailed"
    assert not decision.report.ok
    assert [(row.status, row.proof) for row in decision.report.targets] == [("quarantined", "none")]
    assert "answers otherwise" in decision.report.targets[0].message
    assert [row.status for row in head._roster.rows] == ["quarantined"]
    assert head._roster.current is None


def test_engine_with_the_same_logprobs_has_proof_behaviour(monkeypatch):
    head = head_of({URL: info("native")}, verify="behaviour")
    decision = scored(head, [-1.0, -2.0], [-1.0, -2.01], monkeypatch)
    assert (decision.failure, decision.report.ok, decision.report.targets[0].proof) == (None, True, "behaviour")


NO_SCORES = TargetRejected("http://e: it answers with no log-probabilities", url=URL)


@pytest.mark.parametrize("on_failure", ["raise", "quarantine"])
@pytest.mark.parametrize(
    ("theirs", "why_not", "words"),
    [
        (NO_SCORES, "", "it answers with no log-probabilities"),
        ([-1.0], "", "could not compare behaviour"),
        ([-1.0, -2.0], "the trainer's forward pass failed", "the trainer's forward pass failed"),
    ],
)
def test_strict_refuses_an_update_whose_behaviour_could_not_be_compared(
    theirs, why_not, words, on_failure, monkeypatch
):
    head = head_of({URL: info("native")}, on_failure=on_failure, verify="behaviour", strict=True)
    decision = scored(head, theirs, [-1.0, -2.0], monkeypatch, why_not)
    assert [failure.error for failure in decision.failure.failures] == ["VerificationFailed"]
    for part in (URL, "no proof of behaviour", words):
        assert part in decision.failure.text
    assert not decision.report.ok

    head = head_of({URL: info("native")}, on_failure=on_failure, verify="behaviour")
    decision = scored(head, theirs, [-1.0, -2.0], monkeypatch, why_not)
    assert (decision.failure, decision.report.ok) == (None, True)
    assert words in decision.report.targets[0].message


def test_engine_that_was_away_at_connect_is_checked_when_it_returns():
    away = info("native")
    away = msgspec.structs.replace(away, specs=(TensorSpec(name="other", dtype="float32", shape=(8,)),))
    head = head_of({URL: info("native"), "http://late": away}, on_failure="quarantine", transport="broadcast")
    late = head._roster.infos.pop("http://late")
    head._roster.infos["http://late"] = TargetUnreachable("not yet", url="http://late")
    head.choose()
    links = head._make_links({URL: head._roster.infos[URL], "http://late": late})
    assert [link.url for link in links] == [URL]
    assert "missing other" in str(head._outcomes["http://late"].failed)


def sglang(tp_size: int, instance: str) -> EngineInfo:
    ranks = tuple(RankInfo(rank=rank, pid=0, device="cpu") for rank in range(tp_size))
    changes: dict[str, Any] = {"tp_size": tp_size, "ranks": ranks, "instance": instance, "staging": "none"}
    changes |= {"host_id": host_id(), "transports": ("ipc", "broadcast")}
    return msgspec.structs.replace(info("sglang"), **changes)


def test_engine_that_restarted_with_more_ranks_gets_a_new_adapter():
    head = head_of({URL: sglang(2, "a")}, transport="ipc")
    before = head._members.link(URL, sglang(2, "a"))
    before.adapter._has_sessions = False
    before.mixed = True
    assert head._members.link(URL, sglang(2, "a")) is before
    after = head._members.link(URL, sglang(4, "b"))
    assert (after is before, after.mixed, after.adapter._has_sessions) == (False, False, None)
    memory = tuple(TorchMemory(kind="shm", device="cpu", size_bytes=1, handle=b"x") for _ in range(4))
    assert len(memory_of_ranks(after.adapter.info, [memory])) == 4


def test_changed_description_renews_the_adapter_and_keeps_it():
    head = head_of({URL: sglang(2, "a")}, transport="ipc")
    link = head._members.link(URL, sglang(2, "a"))
    link.mixed = True
    assert head._members.link(URL, msgspec.structs.replace(sglang(2, "a"), version=7)) is link
    assert (link.mixed, link.adapter.info.version) == (True, 7)


def test_engine_that_restarted_with_the_same_ranks_needs_no_retarget():
    head = head_of({URL: sglang(2, "a")}, transport="ipc")
    assert head.choose().plan.opens == 2
    links = head._make_links({URL: sglang(2, "b")})
    assert [link.plan.opens for link in links] == [(0, 2)]
    with pytest.raises(ConfigError, match="another engine than the buckets were planned for"):
        head._make_links({URL: sglang(4, "c")})


def test_a_pause_that_an_engine_cannot_keep_is_refused_before_anything_moves():
    refusing = msgspec.structs.replace(sglang(1, "a"), no_pause={"retract": "a reason; do this instead"})
    with pytest.raises(ConfigError, match="pause='retract': a reason; do this instead"):
        head_of({URL: refusing}, pause="retract", transport="broadcast").choose()
    assert head_of({URL: refusing}, pause="abort", transport="broadcast").choose().plan.transport == "broadcast"


@pytest.mark.parametrize(
    ("sizes", "places", "fine"),
    [
        ((1,), ["g0"], True),
        ((1, 1), ["g0"], True),  # both on the one GPU
        ((2,), ["g0", "g1"], True),
        ((1, 1), ["g0", "g1"], False),
        ((1,), ["g0", "g1"], False),
        ((2,), ["g0"], False),
        ((2, 2), ["g0", "g1", "g2", "g3"], False),
    ],
)
def test_engines_that_do_not_report_their_gpus_are_colocated_only_if_the_order_is_clear(sizes, places, fine):
    engines = {
        f"http://e{number}": msgspec.structs.replace(
            info("sglang"),
            tp_size=size,
            ranks=tuple(RankInfo(rank=rank, pid=0, device="cuda") for rank in range(size)),
        )
        for number, size in enumerate(sizes)
    }
    device = torch.device("cuda")
    placement = Topology(infos=engines, device=device, places=places)
    if fine:
        check_places(spec_of("ipc"), placement)
    else:
        with pytest.raises(ConfigError, match="does not say on which GPUs it runs") as caught:
            check_places(spec_of("ipc"), placement)
        assert "devices=" in str(caught.value.hint)
    check_places(spec_of("broadcast"), placement)
    told = {
        url: msgspec.structs.replace(
            engine, ranks=tuple(RankInfo(rank=rank.rank, pid=0, device=f"g{rank.rank}") for rank in engine.ranks)
        )
        for url, engine in engines.items()
    }
    check_places(spec_of("ipc"), Topology(infos=told, device=device, places=places))
