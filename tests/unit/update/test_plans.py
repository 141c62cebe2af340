"""Plans for random trainers and engines: pure, the same for all who hear them, and every rank served once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.helpers.roster import Bare, Connecting, members_of, planner_of
from tests.unit.update.test_mixed_choice import HERE, THERE, THIRD
from tests.unit.update.test_rank_hosts import spread
from weightcast.comm.ipc import host_id
from weightcast.errors import ConfigError, TargetRejected
from weightcast.transports.link_bytes import GAIN
from weightcast.transports.plan import UpdatePlan
from weightcast.update.estimate import make_plan
from weightcast.wire.answers import GROUP_FAILED
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import Packing, TensorSpec


class Shards(Bare):
    """An exporter whose ranks could fill buckets with their own shards; each host has all of them, or none has."""

    scatters = True

    def __init__(self, whole: bool, device: str = "cpu") -> None:
        super().__init__(torch.device(device))
        self._whole = whole

    def whole_on(self, hosts: object) -> frozenset[str]:
        return frozenset(hosts) if self._whole else frozenset()  # type: ignore[call-overload]


MATRICES = (TensorSpec(name="w", dtype="float32", shape=(96, 64)),)
HOSTS = st.sampled_from([host_id(), "b", "c"])
ENGINES = st.lists(st.lists(HOSTS, min_size=1, max_size=4).map(lambda hosts: spread(*hosts)), min_size=1, max_size=4)
OPTIONS = st.fixed_dictionaries(
    {"transport": st.sampled_from(["auto", "ipc", "broadcast", "direct"])},
    optional={"cell_ranks": st.integers(1, 6), "bucket_bytes": st.sampled_from([1 << 20, 64 << 20])},
)


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(
    trainers=st.lists(HOSTS, min_size=1, max_size=6).map(lambda hosts: [host_id(), *hosts[1:]]),
    engines=ENGINES,
    options=OPTIONS,
    whole=st.booleans(),
)
def test_plan_serves_every_rank_once_and_is_the_same_for_all_who_hear_it(
    trainers: list[str], engines: list[EngineInfo], options: dict[str, Any], whole: bool
) -> None:
    answers = {f"http://e{number}": info for number, info in enumerate(engines)}
    planner = planner_of(
        ["cpu"] * len(trainers),
        hosts=trainers if len(trainers) > 1 else (),
        nccl=[None] * len(trainers),
        exporter=Shards(whole),
        **options,
    )
    fleet = Connecting(answers, planner)
    fleet.roster.look(fleet.members.links)
    refusal = ""
    try:
        plan = fleet.members.choose(first=True)
    except ConfigError as error:
        refusal, plan = str(error), UpdatePlan()
    if refusal:
        event(f"{options['transport']} is refused")
        assert any(url in refusal for url in answers)
        return
    event(plan.transport)
    assert len(set(plan.transport.split("+"))) == len(plan.transport.split("+"))

    again = planner.plan(fleet.members.links)
    heard = msgspec.json.decode(msgspec.json.encode(plan), type=UpdatePlan)
    assert plan == again == heard
    assert plan.name == again.name == heard.name

    assert 0 in plan.receivers
    assert set(plan.receivers) <= set(range(len(trainers)))
    assert [target.url for target in plan.targets] == list(answers)
    for target in plan.targets:
        info = answers[target.url]
        pairs = Counter((rank, trainer) for leg in target.legs for rank in leg.ranks for trainer in leg.trainers)
        served = Counter(rank for leg in target.legs for rank in leg.ranks)
        assert set(served) == set(range(info.tp_size))
        assert set(pairs.values()) == {1}
        assert {leg.by for leg in target.legs} <= set(target.carriers)
        for rank in () if target.gathers else range(info.tp_size):
            # Any of them may hold some of the rank's share; or those on one host hold all of it.
            givers = {trainer for other, trainer in pairs if other == rank}
            together = [{n for n, host in enumerate(trainers) if host == one} for one in trainers] if whole else []
            assert givers in [set(range(len(trainers))), *together]
        for rank in target.near:
            assert info.hosts[rank] in trainers
        for rank, host in enumerate(target.reads):
            assert host in ("", info.hosts[rank])

    grouped = [target for target in plan.targets if "group" in target.carriers]
    assert sorted(url for cell in plan.cells for url in cell) == sorted(target.url for target in grouped)
    limit = options.get("cell_ranks")
    joining = {target.url: answers[target.url].tp_size - len(target.near) for target in plan.targets}
    for cell in plan.cells:
        assert len(cell) == 1 or limit is None or sum(joining[url] for url in cell) <= limit


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(
    trainers=st.integers(1, 6),
    engines=st.integers(1, 6),
    tp=st.sampled_from([1, 2, 4]),
    hosts=st.integers(1, 4),
    engine_hosts=st.integers(0, 4),
    device=st.sampled_from(["cpu", "cuda"]),
    asked=st.sampled_from(["auto", "direct"]),
    cell_ranks=st.sampled_from([None, 1, 3]),
)
def test_plan_says_what_connect_chooses_and_nothing_possible_has_far_fewer_bytes(
    trainers: int,
    engines: int,
    tp: int,
    hosts: int,
    engine_hosts: int,
    device: str,
    asked: Any,
    cell_ranks: int | None,
) -> None:
    hosts = min(hosts, trainers)
    said = make_plan(
        MATRICES,
        model="m",
        engine="native",
        packing=Packing(),
        engine_ranks=engines * tp,
        tp=tp,
        trainer_ranks=trainers,
        hosts=hosts,
        engine_hosts=engine_hosts,
        device=device,
        cell_ranks=cell_ranks,
    ).ways
    on_gpu = device == "cuda"
    first, others = (hosts, engine_hosts) if engine_hosts else (0, hosts)
    names = [f"h{first + rank * others // (engines * tp)}" for rank in range(engines * tp)]
    infos: dict[str, EngineInfo] = {}
    for number in range(engines):
        found = spread(*names[number * tp : (number + 1) * tp])
        ranks = tuple(
            msgspec.structs.replace(rank, device=f"GPU-{number}-{rank.rank}" if on_gpu else "cpu")
            for rank in found.ranks
        )
        infos[f"http://e{number}"] = msgspec.structs.replace(found, ranks=ranks, host_id=found.hosts[0], specs=MATRICES)
    planner = planner_of(
        [f"GPU-{rank}" if on_gpu else "cpu" for rank in range(trainers)],
        hosts=[f"h{rank * hosts // trainers}" for rank in range(trainers)],
        nccl=[None] * trainers,
        exporter=Shards(whole=False, device="cuda:0" if on_gpu else "cpu"),
        specs=MATRICES,
        transport=asked,
        cell_ranks=cell_ranks,
    )
    fleet = Connecting(infos, planner)
    fleet.roster.look(fleet.members.links)
    plan = fleet.members.choose(first=True)
    chosen = {target.transport + f" by {target.variant}" * bool(target.variant) for target in plan.targets}
    event(" ".join(chosen))
    if not said:
        assert hosts == 1
        assert not engine_hosts
        return
    by_name = {way.name: way for way in said}
    assert {way.name for way in said if asked in way.taken_by} == chosen

    cost = max(by_name[name].cost_bytes for name in chosen)
    rivals = [way.cost_bytes for way in said if asked == "auto" or way.name.startswith("direct")]
    if asked == "auto" and on_gpu:  # where messages are slow
        rivals = [way.cost_bytes for way in said if not way.name.startswith("direct")]
    # Auto compares with what direct takes, which may be this much from the least itself.
    most = GAIN * GAIN if asked == "auto" else GAIN
    assert cost == min(rivals) or cost < most * min(rivals)


def in_a_chain(**more: Any) -> Connecting:
    """Two engines on two hosts without trainer ranks, which ``auto`` reaches by a chain."""
    infos = {HERE: on_host("c"), THERE: on_host("d")} | more
    options: dict[str, Any] = {"hosts": ("a",), "on_failure": "quarantine"}
    return members_of(infos, ["cpu"], exporter=Shards(whole=False), specs=MATRICES, **options)


def on_host(host: str) -> EngineInfo:
    return msgspec.structs.replace(spread(host), host_id=host, specs=())


@pytest.mark.parametrize("host", ["e", "a"])
def test_engine_that_comes_late_gets_a_place_in_the_chain(host: str) -> None:
    away: Any = TargetRejected("it still starts", url=THIRD)
    plan = in_a_chain(**{THIRD: away})
    assert plan.choose().transport == "direct"
    assert plan.links[HERE].plan.chains
    plan.answers[THIRD] = on_host(host)
    assert not plan.take()
    assert plan.links[THIRD].plan.variant == plan.links[HERE].plan.variant == "relay"


def test_chain_that_fails_gives_way_to_a_broadcast_to_all() -> None:
    plan = in_a_chain()
    plan.choose()
    lost = TargetRejected(f"{THERE}: the group failed", url=THERE, status=GROUP_FAILED)
    assert "direct gave way to broadcast" in plan.give_way({THERE: lost}, if_all=True)[THERE]
    assert plan.choose_again().transport == "broadcast"
