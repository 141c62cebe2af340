"""The head's choices and its decisions about failed targets."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
import torch

from tests.helpers.roster import SPECS, info, link_to, members_of, planner_of, roster_of
from weightcast.adapters.registry import adapter_for
from weightcast.comm.ipc import host_id
from weightcast.comm.shared_buckets import TorchMemory, memory_of_ranks
from weightcast.config import UpdateConfig
from weightcast.errors import ConfigError, TargetRejected
from weightcast.transports.plan import TargetPlan
from weightcast.transports.preflight import check_places
from weightcast.transports.registry import spec_of
from weightcast.transports.session import Outcome
from weightcast.transports.topology import Topology
from weightcast.update.head import Head
from weightcast.update.sessions import open_message
from weightcast.wire.answers import MAPPING_FAILED, Ack
from weightcast.wire.codec import decode, encode
from weightcast.wire.engine_info import EngineInfo, RankInfo
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets
from weightcast.wire.plans import UpdateTables


@pytest.mark.parametrize(("kinds", "told"), [(("native",), (32, 16)), (("native", "vllm"), ()), (("sglang",), ())])
def test_open_has_bucket_sizes_only_if_two_buckets_may_be_in_flight(kinds, told):
    links = [link_to(info(kind)) for kind in kinds]
    plan = UpdateTables(SPECS, plan_buckets(SPECS, bucket_bytes=64, packing=Packing()), (32, 16))
    message = open_message(UpdateConfig(), links, 1, plan)
    assert message.bucket_sizes == told
    assert decode(encode(message)) == message


URL = "http://e"


def head_of(answers: dict[str, EngineInfo], **options: Any) -> Head:
    roster = roster_of(answers)
    head = Head([link.client.target for link in roster.links], roster, planner_of(**options))
    head.begin(1)
    return head


def scored(
    head: Head, theirs: list[float] | Exception, mine: list[float], monkeypatch: pytest.MonkeyPatch, why_not: str = ""
) -> Any:
    """Returns the head's result for an engine that has switched and proved its weights."""
    plan, described = TargetPlan(url=URL, transport="broadcast"), info("native")
    [link] = head._links = head.members.links
    link.meet(described, adapter_for)
    link.plan, link.outcome = plan, Outcome(info=described, plan=plan, proof="resident")
    link.health = link.health.answered(described).opened()
    link.session.committed = Ack(ok=True, version=1, ranks=1)
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
    assert [(row.state, row.active) for row in head._roster.health()] == [("quarantined", False)]


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
    other = msgspec.structs.replace(info("native"), specs=(TensorSpec(name="other", dtype="float32", shape=(8,)),))
    away = TargetRejected("it still starts", url="http://late")
    connecting = members_of({URL: info("native"), "http://late": away}, on_failure="quarantine", transport="broadcast")
    connecting.choose()
    connecting.answers["http://late"] = other
    assert "missing other" in str(connecting.take()["http://late"])


def sglang(tp_size: int, instance: str) -> EngineInfo:
    ranks = tuple(RankInfo(rank=rank, pid=0, device="cpu") for rank in range(tp_size))
    changes: dict[str, Any] = {"tp_size": tp_size, "ranks": ranks, "instance": instance, "staging": "none"}
    changes |= {"host_id": host_id(), "transports": ("ipc", "broadcast")}
    return msgspec.structs.replace(info("sglang"), **changes)


def test_engine_that_restarted_with_more_ranks_gets_a_new_adapter():
    link = link_to(sglang(2, "a"), URL, TargetPlan(url=URL, transport="ipc"))
    adapter: Any = link.adapter
    adapter._has_sessions, link.start.mixed = False, True
    link.meet(sglang(2, "a"), adapter_for)
    assert (link.adapter is adapter, link.start.mixed, link.planned) == (True, True, True)
    link.meet(sglang(4, "b"), adapter_for)
    after: Any = link.adapter
    assert (after is adapter, link.start.mixed, link.planned, after._has_sessions) == (False, False, False, None)
    memory = tuple(TorchMemory(kind="shm", device="cpu", size_bytes=1, handle=b"x") for _ in range(4))
    assert len(memory_of_ranks(after.info, [memory])) == 4


def test_changed_description_renews_the_adapter_and_keeps_it():
    link = link_to(sglang(2, "a"), URL)
    adapter: Any = link.adapter
    link.start.mixed = True
    link.meet(msgspec.structs.replace(sglang(2, "a"), version=7), adapter_for)
    assert (link.adapter is adapter, link.start.mixed, adapter.info.version) == (True, True, 7)


def test_engine_that_restarted_with_the_same_ranks_needs_no_retarget():
    connecting = members_of({URL: sglang(2, "a")}, transport="ipc")
    assert connecting.choose().opens == 2
    connecting.answers[URL] = sglang(2, "b")
    assert not connecting.take()
    assert connecting.links[URL].plan.opens == (0, 2)
    connecting.answers[URL] = sglang(4, "c")
    assert "another engine than the buckets were planned for" in str(connecting.take()[URL])


def test_a_pause_that_an_engine_cannot_keep_is_refused_before_anything_moves():
    refusing = msgspec.structs.replace(sglang(1, "a"), no_pause={"retract": "a reason; do this instead"})
    with pytest.raises(ConfigError, match="pause='retract': a reason; do this instead"):
        members_of({URL: refusing}, pause="retract", transport="broadcast").choose()
    assert members_of({URL: refusing}, pause="abort", transport="broadcast").choose().transport == "broadcast"


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


def test_update_fails_with_a_report_where_the_transport_that_is_left_does_not_fit(monkeypatch):
    described = msgspec.structs.replace(info("native"), host_id=host_id(), transports=("ipc", "broadcast"))
    head = head_of({URL: described})
    plan = head.choose().plan
    assert plan is not None
    head.members.use(plan)
    head._links = head.members.take(head.members.links)
    head.members.carriers.failed = True

    def check(specs: object, *, delivery: str, bucket_bytes: int) -> None:
        if delivery == "group":
            raise ConfigError("this engine takes no buckets in groups")

    monkeypatch.setattr(head._links[0].adapter, "check", check)
    result = head.fail(TargetRejected("cannot map", url=URL, status=MAPPING_FAILED))
    assert result.failure is not None
    assert result.failure.error == "UpdateFailed"
    assert "takes no buckets in groups" in result.failure.text
    assert result.report is not None
    assert (result.report.transport, result.report.targets[0].transport) == ("ipc", "ipc")
