"""The way that ``direct`` takes, and when ``auto`` takes ``direct``."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.roster import info
from weightcast import ConfigError
from weightcast.comm import nixl
from weightcast.comm.ipc import host_id
from weightcast.config import UpdateConfig
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.transports.preflight import check_scattered, choose_receivers, choose_transport
from weightcast.transports.topology import Topology
from weightcast.update import diagnose
from weightcast.update.diagnose import Check
from weightcast.wire.engine_info import RankInfo

EVERYTHING = ("ipc", "direct", "broadcast")


def engine(
    *devices: str, transports: tuple[str, ...] = EVERYTHING, host: str | None = None, remote: bool = False
) -> Any:
    return msgspec.structs.replace(
        info("native"),
        ranks=tuple(RankInfo(rank=rank, pid=1, device=device) for rank, device in enumerate(devices)),
        host_id=host_id() if host is None else host,
        transports=transports,
        tp_size=len(devices),
        engine="toy",
        message="",
        reads_remote=remote,
    )


def topology(trainers: list[str], *engines: Any, **more: Any) -> Topology:
    device = torch.device("cpu" if trainers[0] == "cpu" else "cuda:0")
    infos = {f"http://e{number}": info for number, info in enumerate(engines)}
    return Topology(infos=infos, device=device, places=trainers, **more)


@pytest.mark.parametrize(
    ("place", "way"),
    [
        (topology(["cpu"], engine("cpu")), "memory"),
        (topology(["cpu"], engine("cpu"), keep_mapped=True), "shards"),
        (topology(["cpu", "cpu"], engine("cpu", "cpu"), engine("cpu", host="another")), "mixed"),
        (topology(["cpu"], engine("cpu", host="another")), "messages"),
        (topology(["cpu"], engine("cpu"), engine("cpu", host="b"), unmapped={"http://e0"}), "messages"),
        (topology(["cpu"], engine("cpu"), engine("cpu"), unmapped={"http://e0"}), "mixed"),
        (topology(["GPU-1"], engine("GPU-2"), engine("GPU-3", host="another")), "messages"),
        (topology(["GPU-1"], engine("GPU-1"), engine("GPU-3", host="another"), variant="mixed"), "mixed"),
        (topology(["GPU-1"], engine("GPU-1")), "memory"),
        (topology(["GPU-1"], engine("GPU-1"), keep_mapped=True), "shards"),
        (topology(["GPU-1"], engine("GPU-2", host="another")), "messages"),
        (topology(["cpu"], engine("cpu"), variant="messages"), "messages"),
        (topology(["cpu"], engine("cpu"), variant="memory", keep_mapped=True), "memory"),
    ],
)
def test_the_first_way_that_reaches_every_engine_is_taken(place: Topology, way: str) -> None:
    spec = choose_transport("direct", place)
    assert (spec.name, spec.variant) == ("direct", way)
    assert choose_receivers(spec, place) == tuple(range(len(place.places)))


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (topology(["cpu"], engine("cpu", host="another"), variant="memory"), "runs on another host"),
        (topology(["cpu"], engine("cpu", host="another"), variant="shards", keep_mapped=True), "another host"),
        (topology(["cpu"], engine("GPU-1"), variant="memory"), "cannot map the memory of the trainer's cpu"),
        (topology(["GPU-1"], engine("cuda"), variant="memory"), "they run on cuda"),
        (topology(["GPU-1", "GPU-2"], engine("GPU-2"), variant="messages"), "share GPU GPU-2, and NCCL needs"),
        (topology(["GPU-1", "GPU-2"], engine("GPU-2"), hosts=("a", "b"), variant="mixed"), "share GPU GPU-2"),
        (topology(["cpu"], engine("GPU-1"), variant="mixed"), "needs trainer and engines on the same type"),
        (topology(["cpu"], engine("GPU-1"), variant="messages"), "needs trainer and engines on the same type"),
        (topology(["cpu"], engine("cpu", transports=("ipc",))), "takes no update by direct, only by ipc"),
        (topology(["cpu"], engine("cpu", transports=())), "takes no update as it was started"),
    ],
)
def test_a_way_that_does_not_reach_an_engine_is_refused_by_name(place: Topology, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_transport("direct", place)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (topology(["GPU-1"], engine("GPU-1"), keep_mapped=True), "direct"),
        (topology(["cpu", "cpu"], engine("cpu"), keep_mapped=True), "direct"),
        (topology(["GPU-1", "GPU-2"], engine("GPU-1"), keep_mapped=True), "direct"),
        (topology(["GPU-1", "GPU-2"], engine("GPU-1", "GPU-2"), keep_mapped=True), "direct"),
        (topology(["GPU-1"], engine("GPU-1")), "ipc"),
        (topology(["GPU-1"], engine("GPU-1", transports=("ipc", "broadcast")), keep_mapped=True), "ipc"),
        (topology(["GPU-1"], engine("GPU-2", host="another"), keep_mapped=True), "broadcast"),
    ],
)
def test_auto_takes_direct_where_the_weights_stay_mapped_and_every_engine_can_read_them(
    place: Topology, name: str
) -> None:
    assert choose_transport("auto", place).name == name


def test_auto_does_not_read_shards_on_gpus_of_several_hosts() -> None:
    engines = engine("GPU-1", host="a"), engine("GPU-2", host="b")
    more: dict[str, Any] = {"hosts": ("a", "b"), "whole_on": lambda: ("a", "b"), "keep_mapped": True}
    assert choose_transport("auto", topology(["GPU-1", "GPU-2"], *engines, **more)).name == "ipc"
    assert choose_transport("auto", topology(["cpu", "cpu"], *map(on_cpu, engines), **more)).name == "direct"


def on_cpu(info: Any) -> Any:
    return engine("cpu", host=info.host_id)


def test_auto_passes_over_a_transport_that_is_left_out() -> None:
    place = topology(["GPU-1"], engine("GPU-1"), keep_mapped=True)
    assert choose_transport("auto", place, without=("direct",)).name == "ipc"


def test_reading_shards_needs_a_promise_that_they_stay() -> None:
    with pytest.raises(ConfigError, match="keep the trainer's weights mapped"):
        UpdateConfig(direct_by="shards")


def on_two_hosts(*engines: Any, whole: tuple[str, ...] = (), **more: Any) -> Topology:
    """Two trainer ranks on each of two hosts; all weights lie on each of ``whole``."""
    return topology(["cpu"] * 4, *engines, hosts=("a", "a", "b", "b"), whole_on=lambda: whole, **more)


@pytest.mark.parametrize(
    ("place", "way"),
    [
        (on_two_hosts(engine("cpu", host="a"), engine("cpu", host="b"), whole=("a", "b")), "memory"),
        (on_two_hosts(engine("cpu", host="b"), whole=("b",), keep_mapped=True), "shards"),
        (on_two_hosts(engine("cpu", host="a"), engine("cpu", host="b"), whole=("a",)), "mixed"),
        (on_two_hosts(engine("cpu", host="a")), "mixed"),  # where part of the weights lie on b alone
        (on_two_hosts(engine("cpu", host="c"), whole=("a", "b")), "messages"),
    ],
)
def test_memory_is_read_on_hosts_with_a_whole_replica(place: Topology, way: str) -> None:
    assert choose_transport("direct", place).variant == way


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (on_two_hosts(engine("cpu", host="b"), whole=("a",), variant="memory"), "do not hold all weights together"),
        (on_two_hosts(engine("cpu", host="c"), whole=("a",), variant="memory"), "needs a trainer rank on the engine"),
    ],
)
def test_a_host_without_a_whole_replica_is_refused_by_name(place: Topology, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_transport("direct", place)


@pytest.mark.parametrize(
    ("hosts", "receivers"), [(("a",), (0,)), (("a", "b"), (0, 2)), (("b",), (0, 2)), (("b", "b"), (0, 2))]
)
def test_one_rank_on_each_host_with_engines_fills_buckets_beside_the_head(hosts, receivers) -> None:
    place = on_two_hosts(*(engine("cpu", host=host) for host in hosts))
    spec = choose_transport("auto", place)
    assert (spec.name, choose_receivers(spec, place)) == ("ipc", receivers)


def test_ranks_that_share_gpus_with_engines_fill_buckets_on_these_hosts_alone() -> None:
    gpus = ["G0", "G1", "G2", "G3", "G4", "G5"]
    hosts = ("a", "a", "b", "b", "c", "c")
    place = topology(gpus, engine("G2", "G3", host="b"), engine("G4", host="c"), hosts=hosts)
    assert choose_receivers(choose_transport("ipc", place), place) == (0, 2, 3, 4)


def test_folders_and_checkpoint_engine_reach_the_heads_host_alone() -> None:
    with pytest.raises(ConfigError, match="cannot see this host's folder"):
        choose_transport("disk", on_two_hosts(engine("cpu", host="b", transports=("disk",))))
    with pytest.raises(ConfigError, match="needs the host of trainer rank 0"):
        choose_transport("checkpoint-engine", on_two_hosts(engine("cpu", host="b", transports=("checkpoint-engine",))))


@pytest.fixture
def nixl_here(monkeypatch):
    monkeypatch.setattr(nixl, "find_spec", lambda name: ModuleSpec(name, None, origin=name))


@pytest.mark.parametrize("trainer", ["cpu", "GPU-1"])
@pytest.mark.parametrize("found", ["cpu", "GPU-1", "GPU-2", "cuda"])
def test_rdma_reaches_engines_of_any_host_and_device_that_have_nixl(nixl_here, trainer: str, found: str) -> None:
    place = topology([trainer] * 2, engine(found, found, remote=True, host="another"))
    spec = choose_transport("rdma", place)
    assert (spec.name, spec.variant, spec.gathers, spec.reads_memory) == ("rdma", "", False, True)
    assert choose_receivers(spec, place) == (0, 1)


def test_auto_never_takes_rdma(nixl_here) -> None:
    place = topology(["cpu"], engine("cpu", remote=True, host="another"))
    assert choose_transport("direct", place).variant == "messages"
    assert choose_transport("auto", place).name == "broadcast"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (topology(["cpu"], engine("cpu")), "http://e0 .* NIXL is not installed in the engine"),
        (topology(["GPU-1"], engine("GPU-2")), "http://e0 .* NIXL is not installed in the engine"),
        (topology(["cpu"], engine("cpu", transports=("ipc",), remote=True)), "takes no update by rdma, only by ipc"),
    ],
)
def test_rdma_that_cannot_work_is_refused_by_name(nixl_here, place: Topology, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_transport("rdma", place)


def test_a_folder_has_no_shards_to_send_and_the_hint_is_for_push_too(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    with (
        CheckpointExporter(tmp_path) as folder,
        pytest.raises(ConfigError, match="CheckpointExporter cannot") as caught,
    ):
        check_scattered(Mock(), (), folder)
    assert caught.value.hint.endswith("--via auto")


def test_a_trainer_without_nixl_says_so(monkeypatch) -> None:
    monkeypatch.setattr(nixl, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="NIXL is not installed in this process"):
        choose_transport("rdma", topology(["cpu"], engine("cpu", remote=True)))


@pytest.mark.parametrize(
    ("found", "names"),
    [
        (engine("cpu", remote=True), ["direct", "rdma"]),
        (engine("cpu"), ["direct"]),
        (engine("GPU-1", remote=True), ["direct", "rdma"]),
    ],
)
def test_doctor_names_rdma_where_both_sides_have_it(nixl_here, found, names) -> None:
    checks = [Check(name="ipc", level="warn", text=""), Check(name="rendezvous", level="ok", text="")]
    direct, *rest = diagnose._scattered(checks, found)
    by = "from trainer ranks on this host rank 0 by messages"
    saves = "takes it between hosts where that saves bytes" if found.devices == ("cpu",) else "does not take it"
    assert direct.text == f"can be used, {by}; auto {saves}"
    assert [check.name for check in (direct, *rest)] == names
    assert [check.text for check in rest] == ["can be used; auto does not take it"] * len(rest)


def test_doctor_says_by_which_way_trainer_ranks_here_reach_each_rank() -> None:
    checks = [Check(name="rendezvous", level="ok", text="")]
    hosts = [host_id(), "b", host_id()]
    found = msgspec.structs.replace(
        engine("cpu", "cpu", "cpu", host=""),
        ranks=tuple(
            RankInfo(rank=rank, pid=1, device="cpu", host_id=host, host=host[:4]) for rank, host in enumerate(hosts)
        ),
    )
    [check] = diagnose._scattered(checks, found)
    here = hosts[0][:4]
    words = f"rank 0 on host {here}, rank 2 on host {here} by memory and rank 1 on host b by messages"
    auto = "auto takes it between hosts where that saves bytes"
    assert check.text == f"can be used, from trainer ranks on this host {words}; {auto}"
