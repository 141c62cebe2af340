"""Plans for random trainers and engines: pure, the same for all who hear them, and every rank served once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.helpers.roster import Bare, Connecting, planner_of
from tests.unit.update.test_rank_hosts import spread
from weightcast.comm.ipc import host_id
from weightcast.errors import ConfigError
from weightcast.transports.plan import UpdatePlan
from weightcast.wire.engine_info import EngineInfo


class Shards(Bare):
    """An exporter whose ranks could fill buckets with their own shards; each host has all of them, or none has."""

    scatters = True

    def __init__(self, whole: bool) -> None:
        super().__init__(torch.device("cpu"))
        self._whole = whole

    def whole_on(self, hosts: object) -> frozenset[str]:
        return frozenset(hosts) if self._whole else frozenset()  # type: ignore[call-overload]


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
