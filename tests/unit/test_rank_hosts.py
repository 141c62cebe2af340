"""Engines whose ranks are on several hosts: each rank names its own."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.test_head import info
from tests.unit.test_mixed_choice import HERE, plan_of
from weightcast.comm.ipc import host_id
from weightcast.errors import ConfigError
from weightcast.plugins.rank_sockets import Hello, SocketRanks
from weightcast.update.diagnose import _sharing
from weightcast.wire.engine_info import EngineInfo, RankInfo


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
    ranks = SocketRanks.__new__(SocketRanks)
    ranks.hellos = [hello(rank, host) for rank, host in enumerate(hosts)]
    assert [(rank.host_id, rank.host) for rank in ranks.rank_infos()] == named


def test_ipc_is_refused_with_the_host_of_each_rank() -> None:
    infos = {HERE: spread(host_id(), "b")}
    with pytest.raises(ConfigError, match=rf"{HERE} runs on several hosts \(rank 0 on host \S+, rank 1 on host B\)"):
        plan_of(infos, ["cpu"], transport="ipc").choose()


def test_doctor_says_which_ranks_are_on_its_host() -> None:
    _, check = _sharing(spread(host_id(), "b"))
    assert (check.name, check.level) == ("host", "ok")
    assert "rank 1 on host B" in check.text
    assert check.text.index("rank 1 on host B") < check.text.index("on this process's host: rank 0")
