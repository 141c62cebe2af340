"""Engines whose ranks are on several hosts: each rank names its own."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from tests.helpers.roster import SPECS, info, members_of
from tests.helpers.sessions import announce
from tests.unit.update.test_mixed_choice import HERE, THERE
from weightcast.adapters.bucket_sources import source_of
from weightcast.comm.ipc import host_id
from weightcast.comm.shared_buckets import Shared
from weightcast.errors import ConfigError, Refused, TargetRejected
from weightcast.plugins.rank_sockets import Hello, SwitchExecutor
from weightcast.transports.handles import handles_for
from weightcast.update import choose
from weightcast.update.diagnose import _sharing
from weightcast.wire.answers import GROUP_FAILED, MAPPING_FAILED
from weightcast.wire.bucket_sources import (
    BroadcastSource,
    BucketPart,
    ByRankSource,
    IpcSource,
    Leg,
    LegsSource,
    MemoryHandle,
)
from weightcast.wire.codec import decode, encode
from weightcast.wire.engine_info import EngineInfo, RankInfo
from weightcast.wire.layout import Packing, plan_buckets

HANDLE = MemoryHandle(kind="shm", device="cpu", size_bytes=64, token="one", pid=1, fd=3)
OTHER = MemoryHandle(kind="shm", device="cpu", size_bytes=64, token="two", pid=2, fd=3)
LAYOUT = plan_buckets(SPECS, bucket_bytes=64, packing=Packing())[0]


def spread(*hosts: str, device: str = "cpu") -> EngineInfo:
    """An engine with one rank on each host; a host's name is its id in capitals."""
    ranks = tuple(
        RankInfo(rank=rank, pid=rank + 1, device=device, host_id=host, host=host.upper())
        for rank, host in enumerate(hosts)
    )
    changes = {"ranks": ranks, "tp_size": len(ranks), "host_id": "", "transports": ("ipc", "direct", "broadcast")}
    return msgspec.structs.replace(info("native"), **changes)


def hello(rank: int, host: str) -> Hello:
    return Hello(
        rank=rank, pid=9, device="cpu", staging="host", staging_bytes=0, specs=(), places=(), host=host, host_id=host
    )


def test_a_rank_in_words_has_its_host_only_if_there_are_several() -> None:
    assert spread("a", "b").named(1) == "rank 1 on host B"
    assert spread("a", "b").hosts == ("a", "b")
    assert info("native").named(0) == "rank 0"
    assert info("native").hosts == ("h",)
    assert not info("native").on_several_hosts


@pytest.mark.parametrize(
    ("hosts", "named"), [(("a", "b"), [("a", "a"), ("b", "b")]), (("a", "a"), [("", ""), ("", "")])]
)
def test_ranks_of_a_plug_in_name_their_hosts_if_these_are_several(hosts: tuple[str, ...], named: list[object]) -> None:
    ranks = SwitchExecutor.__new__(SwitchExecutor)
    ranks.hellos = [hello(rank, host) for rank, host in enumerate(hosts)]
    assert [(rank.host_id, rank.host) for rank in ranks.rank_infos()] == named


def test_ipc_is_refused_with_the_host_of_each_rank() -> None:
    infos = {HERE: spread(host_id(), "b")}
    with pytest.raises(ConfigError, match=rf"{HERE} runs on several hosts \(rank 0 on host \S+, rank 1 on host B\)"):
        members_of(infos, ["cpu"], transport="ipc").choose()


def test_auto_takes_memory_for_the_ranks_on_the_trainers_host_and_a_broadcast_for_the_others() -> None:
    infos = {HERE: spread("b", host_id(), "c")}
    plan = members_of(infos, ["cpu"])
    choice = plan.choose()
    link = plan.links[HERE]
    assert (choice.transport, choice.receivers, choice.sharings) == ("ipc+broadcast", (0,), {"weightcast"})
    assert (link.plan.near, link.members) == ((1,), (0, 2))
    [handle] = handles_for(link, [Shared(memory=HANDLE)])
    message = announce("0" * 32, LAYOUT, source_of([handle], "g"))
    assert isinstance(message.source, ByRankSource)
    assert message.source.of(1) == IpcSource(handles=(HANDLE,))
    assert message.source.of(0) == message.source.of(2) == BroadcastSource(group="g")
    assert decode(encode(message)) == message
    note = plan.give_way(
        {HERE: TargetRejected(f"{HERE}: cannot map", url=HERE, status=MAPPING_FAILED)}, if_all=False
    ).get(HERE)
    assert note is not None
    assert "ipc+broadcast gave way to broadcast" in note
    assert plan.choose_again().transport == "broadcast"
    assert plan.links[HERE].plan.near == ()


def test_ranks_read_memory_of_their_own_hosts_if_each_has_trainer_ranks() -> None:
    infos = {HERE: spread("a", "b"), THERE: spread("b", "c")}
    plan = members_of(infos, ["cpu"] * 3, hosts=("a", "a", "b"))
    choice = plan.choose()
    assert [plan.links[url].plan.transport for url in infos] == ["ipc", "ipc+broadcast"]
    assert (choice.receivers, set(choice.reading_hosts)) == ((0, 2), {"a", "b"})
    buffers = [Shared(memory=HANDLE, host="a"), Shared(memory=OTHER, host="b")]
    first, second = (handles_for(plan.links[url], buffers) for url in infos)
    assert [(item.memory, item.ranks) for item in first] == [(HANDLE, (0,)), (OTHER, (1,))]
    assert [(item.memory, item.ranks) for item in second] == [(OTHER, (0,))]
    source = source_of(first)
    assert isinstance(source, ByRankSource)
    assert source.of(1) == IpcSource(handles=(OTHER,))
    with pytest.raises(Refused, match="rank 2 was given neither memory nor a group"):
        source.of(2)


@pytest.fixture
def any_exporter(monkeypatch) -> None:
    """The played exporter counts as one that can send shards."""
    monkeypatch.setattr(choose, "check_scattered", lambda *_: None)


@pytest.mark.usefixtures("any_exporter")
def test_direct_gives_each_rank_legs_from_trainer_ranks_on_its_host_and_on_others() -> None:
    infos = {HERE: spread("a", "b", "c")}
    plan = members_of(infos, ["cpu"] * 3, hosts=("a", "a", "b"), transport="direct")
    choice = plan.choose()
    link = plan.links[HERE]
    assert (choice.exchanges, choice.sharings, choice.leg_hosts) == (True, {"weightcast"}, ("a", "b", ""))
    # The played trainer has all weights on each of its hosts.
    assert (link.plan.reads, link.plan.near, link.members) == (("a", "b", ""), (0, 1), (2,))
    assert list(map(str, link.plan.legs)) == [
        "buffer from trainer ranks 0-1 to rank 0",
        "buffer from trainer rank 2 to rank 1",
        "group from trainer ranks 0-2 to rank 2",
    ]
    own, other = (BucketPart(slot=0, offset=(row,), shape=(2,)) for row in (0, 2))
    buffers = [
        Shared(memory=HANDLE, host="a", legs={"a": (own,), "b": (), "": (own,)}),
        Shared(memory=OTHER, host="b", legs={"a": (other,), "b": (own, other), "": (other,)}),
    ]
    message = announce("0" * 32, LAYOUT, source_of(handles_for(link, buffers), "g"))
    assert decode(encode(message)) == message
    source = message.source
    assert isinstance(source, LegsSource)
    assert source.of(0).legs == (Leg(parts=(own,), handle=HANDLE), Leg(parts=(other,)))
    assert source.of(1).legs == (Leg(), Leg(parts=(own, other), handle=OTHER))
    assert source.of(2).legs == (Leg(parts=(own,)), Leg(parts=(other,)))
    with pytest.raises(Refused, match="rank 3 was given no legs"):
        source.of(3)


def test_memory_of_one_host_is_refused_for_an_engine_on_several() -> None:
    plan = members_of({HERE: spread("a", "b")}, ["cpu"] * 2, hosts=("a", "b"), transport="direct", direct_by="memory")
    with pytest.raises(ConfigError, match="runs on several hosts"):
        plan.choose()


def refused(words: str, status: int) -> TargetRejected:
    return TargetRejected(f"{HERE}: {words}", url=HERE, status=status)


@pytest.mark.usefixtures("any_exporter")
def test_direct_leaves_memory_for_messages_only_if_memory_failed_and_the_way_was_left_open() -> None:
    infos = {HERE: spread("a", "b"), THERE: spread("b", "b")}
    options = {"hosts": ("a", "b"), "transport": "direct"}
    plan = members_of(infos, ["cpu"] * 2, **options)
    plan.choose()
    assert not plan.give_way({HERE: refused("its group broke", GROUP_FAILED)}, if_all=False)
    note = plan.give_way({HERE: refused("cannot map", MAPPING_FAILED)}, if_all=False).get(HERE)
    assert note is not None
    assert note.startswith("memory gave way to messages")
    assert plan.choose_again().leg_hosts == ("b", "")
    plans = [plan.links[url].plan for url in infos]
    assert [(one.reads, one.near) for one in plans] == [
        (("", ""), ()),
        (("b", "b"), (0, 1)),
    ]
    asked = members_of(infos, ["cpu"] * 2, direct_by="mixed", **options)
    asked.choose()
    assert not asked.give_way({HERE: refused("cannot map", MAPPING_FAILED)}, if_all=False)


@pytest.mark.parametrize("changes", [{"transports": ("broadcast",)}, {"host_id": ""}])
def test_other_engines_go_by_broadcast_as_a_whole(changes: dict[str, Any]) -> None:
    found = msgspec.structs.replace(spread(host_id(), "b"), **changes)
    if "host_id" in changes:  # an engine that does not say where its ranks are
        ranks = tuple(msgspec.structs.replace(rank, host_id="", host="") for rank in found.ranks)
        found = msgspec.structs.replace(found, ranks=ranks)
    plan = members_of({HERE: found}, ["cpu"])
    assert plan.choose().transport == "broadcast"
    assert (plan.links[HERE].plan.near, plan.links[HERE].members) == ((), (0, 1))


def test_doctor_says_which_ranks_are_on_its_host() -> None:
    _, check = _sharing(spread(host_id(), "b"))
    assert (check.name, check.level) == ("host", "ok")
    assert "rank 1 on host B" in check.text
    assert re.search(r"auto reaches rank 0 on host \S+ by memory, rank 1 on host B by broadcast", check.text)
