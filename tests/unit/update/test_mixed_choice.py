"""``auto`` chooses a transport for each target, and the targets that share one are checked together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.helpers.roster import Connecting, info, members_of
from weightcast.comm.ipc import host_id
from weightcast.comm.shared_buckets import Shared
from weightcast.errors import ConfigError, TargetLost, TargetRejected, TargetsFailed, VerificationFailed
from weightcast.transports.blame import engine_of
from weightcast.transports.carriers import Carriers
from weightcast.transports.handles import handles_for
from weightcast.wire.answers import MAPPING_FAILED
from weightcast.wire.engine_info import EngineInfo, RankInfo

HERE, THERE, THIRD = "http://here", "http://there", "http://third"


def engine(*devices: str, host: str | None = None, kind: str = "native", **more: Any) -> EngineInfo:
    ranks = tuple(RankInfo(rank=rank, pid=rank + 1, device=device) for rank, device in enumerate(devices))
    changes: dict[str, Any] = {
        "ranks": ranks,
        "tp_size": len(ranks),
        "host_id": host or host_id(),
        "transports": ("ipc", "broadcast"),
    }
    return msgspec.structs.replace(info(kind), **(changes | more))


def chosen(plan: Connecting, infos: dict[str, EngineInfo]) -> list[str]:
    return [plan.links[url].plan.transport for url in infos]


def test_engines_on_the_trainers_gpus_and_on_another_host_fit_in_one_update():
    infos = {HERE: engine("GPU-0", "GPU-1"), THERE: engine("GPU-8", "GPU-9", host="another")}
    plan = members_of(infos, ["GPU-0", "GPU-1"])
    choice = plan.choose()
    assert chosen(plan, infos) == ["ipc", "broadcast"]
    assert (choice.transport, choice.receivers, choice.sharings) == (
        "ipc+broadcast",
        (0, 1),
        {"weightcast"},
    )


@pytest.mark.parametrize("name", ["ipc", "broadcast"])
def test_no_single_transport_reaches_them(name):
    infos = {HERE: engine("GPU-0"), THERE: engine("GPU-8", host="another")}
    with pytest.raises(ConfigError, match=r"another host|share GPU"):
        members_of(infos, ["GPU-0"], transport=name).choose()


@pytest.mark.parametrize("name", ["ipc", "broadcast", "rdma"])
def test_weights_are_not_kept_mapped_for_a_transport_that_maps_none(name):
    with pytest.raises(ConfigError, match=f"keep_mapped=True: {name} does not read") as caught:
        members_of({HERE: engine("cpu")}, ["cpu"], transport=name, keep_mapped=True).choose()
    assert 'transport="direct"' in str(caught.value.hint)


def test_handles_are_counted_for_the_engines_that_share_memory_alone():
    infos = {
        HERE: engine("cpu", "cpu", kind="sglang", staging="none"),
        THERE: engine("cpu", host="another", kind="sglang", staging="none"),
        THIRD: engine("cpu", kind="sglang", staging="none"),
    }
    plan = members_of(infos, ["cpu"])
    choice = plan.choose()
    assert choice.transport == "ipc+broadcast"
    assert choice.opens + choice.ring_opens == 3
    assert [plan.links[url].plan.opens for url in infos] == [(0, 2), (0, 0), (2, 3)]


def test_engine_that_refused_ipc_goes_by_broadcast_and_the_rest_stays():
    infos = {HERE: engine("cpu"), THIRD: engine("cpu")}
    plan = members_of(infos, ["cpu"])
    assert plan.choose().transport == "ipc"
    note = plan.give_way(
        {HERE: TargetRejected(f"{HERE}: cannot map", url=HERE, status=MAPPING_FAILED)}, if_all=False
    ).get(HERE)
    assert note is not None
    assert "cannot map" in note
    choice = plan.choose_again()
    assert (choice.transport, chosen(plan, infos)) == ("ipc+broadcast", ["broadcast", "ipc"])
    # Nothing is left after broadcast.
    assert not plan.give_way({HERE: TargetRejected(f"{HERE}: refused", url=HERE, status=MAPPING_FAILED)}, if_all=False)


@pytest.mark.parametrize(
    "error",
    [
        TargetLost("gone", url=HERE),
        VerificationFailed("other weights", url=HERE, names=("t",)),
        TargetRejected("the model's loader failed", url=HERE, status=409),
    ],
)
def test_engine_that_is_gone_or_has_other_weights_is_no_reason_to_leave_a_transport(error):
    plan = members_of({HERE: engine("cpu"), THIRD: engine("cpu")}, ["cpu"])
    plan.choose()
    assert not plan.give_way({HERE: error}, if_all=False)
    assert plan.choose_again().transport == "ipc"


def test_ipc_does_not_give_way_where_nothing_else_can_work():
    plan = members_of({HERE: engine("GPU-0")}, ["GPU-0"])  # NCCL needs a GPU for each rank
    assert plan.choose().transport == "ipc"
    assert not plan.give_way({HERE: TargetRejected("refused", url=HERE, status=MAPPING_FAILED)}, if_all=False)


def test_named_transport_does_not_give_way():
    plan = members_of({HERE: engine("cpu")}, ["cpu"], transport="ipc")
    plan.choose()
    assert not plan.give_way({HERE: TargetRejected("refused", url=HERE, status=MAPPING_FAILED)}, if_all=False)


def test_engines_get_the_handles_of_their_own_host_and_others_a_broadcast():
    infos = {HERE: engine("cpu", host="a"), THERE: engine("cpu", host="b"), THIRD: engine("cpu", host="c")}
    plan = members_of(infos, ["cpu"] * 4, hosts=("a", "a", "b", "b"))
    choice = plan.choose()
    assert chosen(plan, infos) == ["ipc", "ipc", "broadcast"]
    assert (choice.receivers, choice.reading_hosts) == ((0, 2), ("a", "b"))
    buffers = [Shared(host="a"), Shared(host="b")]
    assert [handles_for(plan.links[url], buffers) for url in (HERE, THERE)] == [[buffers[0]], [buffers[1]]]
    assert handles_for(plan.links[THERE], [Shared(), Shared()]) == [Shared(), Shared()]


LATE: dict[str, Any] = {"hosts": ("a", "b"), "on_failure": "quarantine"}


@pytest.mark.parametrize("transport", ["auto", "ipc"])
def test_engine_that_comes_late_to_a_host_without_buffers_goes_by_broadcast_or_is_refused(transport):
    late = {HERE: engine("cpu", host="a"), THERE: engine("cpu", host="b"), THIRD: engine("cpu", host="a")}
    away = TargetRejected("it still starts", url=THERE)
    plan = members_of(late | dict.fromkeys([THERE, THIRD], away), ["cpu"] * 2, **LATE, transport=transport)
    assert plan.choose().receivers == (0,)
    plan.answers.update(late)
    failed = plan.take()
    if transport == "auto":
        assert chosen(plan, late) == ["ipc", "broadcast", "ipc"]
        assert not failed
    else:
        assert list(failed) == [THERE]
        assert "runs on host b, for which no trainer rank fills buckets" in str(failed[THERE])


class Part:
    """Records its calls, and fails where it is told to."""

    def __init__(self, name: str, failure: Exception | None = None) -> None:
        self.name = name
        self.failure = failure
        self.calls: list[str] = []

    def __getattr__(self, call: str) -> Any:
        def do(*_: object) -> None:
            self.calls.append(call)
            if self.failure is not None and call == "send":
                raise self.failure

        return do


def test_every_part_gets_every_bucket_also_after_one_has_failed():
    bad = Part("ipc", TargetRejected("refused", url=HERE))
    worse = Part("broadcast", TargetLost("gone", url=THERE))
    mixed = Carriers([bad, worse])
    assert mixed.name == "ipc+broadcast"
    shared: list[Shared] = []
    bucket: Any = SimpleNamespace(layout=SimpleNamespace(index=0))
    with pytest.raises(TargetsFailed) as raised:
        mixed.send(bucket, shared)
    assert [engine_of(failure) for failure in raised.value.failures] == [HERE, THERE]
    mixed.abort("failed")
    mixed.settle()
    mixed.close()
    assert bad.calls == worse.calls == ["send", "abort", "settle", "close"]
