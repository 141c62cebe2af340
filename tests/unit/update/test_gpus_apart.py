"""Trainer and engines on different GPUs, each process with ``CUDA_VISIBLE_DEVICES`` of its own, as Ray starts them.

``connect`` knows which GPUs an engine's processes see, and how their NCCL is set, so it decides before anything moves.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
import torch

from tests.helpers.roster import Connecting, info, members_of
from weightcast.comm import nccl
from weightcast.comm.ipc import host_id
from weightcast.errors import ConfigError
from weightcast.transports.preflight import choose_transport
from weightcast.transports.topology import Topology
from weightcast.update import diagnose
from weightcast.wire.engine_info import EngineInfo, RankInfo
from weightcast.wire.nccl_settings import NcclSettings

URL, OTHER = "http://engine", "http://other"
TRAINER, ENGINE = "GPU-0", "GPU-1"
# SGLang sets these two variables in its own processes, unless they are set before.
BY_SGLANG = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


def settings(version: str = "2.28.9", /, **variables: str) -> NcclSettings:
    return NcclSettings(version=version, variables=variables)


def engine(
    *devices: str,
    visible: tuple[str, ...] = (),
    nccl: NcclSettings | None = None,
    host: str | None = None,
    transports: tuple[str, ...] = ("ipc", "direct", "broadcast"),
) -> EngineInfo:
    ranks = tuple(
        RankInfo(rank=rank, pid=rank + 1, device=device, visible=visible, nccl=nccl)
        for rank, device in enumerate(devices)
    )
    return msgspec.structs.replace(
        info("native"), ranks=ranks, tp_size=len(ranks), host_id=host or host_id(), transports=transports
    )


def plan_of(
    infos: dict[str, EngineInfo],
    places: list[str],
    nccl: NcclSettings | list[NcclSettings] | None = None,
    **options: Any,
) -> Connecting:
    return members_of(infos, places, nccl=nccl if isinstance(nccl, list) else [nccl] * len(places), **options)


# -- GPUs that the other process does not see


def test_auto_takes_broadcast_at_connect_where_the_engine_does_not_see_the_trainers_gpu(caplog):
    caplog.set_level(logging.WARNING, "weightcast")
    plan = plan_of({URL: engine(ENGINE, visible=(ENGINE,))}, [TRAINER])
    assert plan.choose().transport == "broadcast"
    assert caplog.records == []


@pytest.mark.parametrize(
    ("device", "visible"),
    [
        (ENGINE, (TRAINER, ENGINE)),  # nothing is hidden
        (TRAINER, (TRAINER,)),  # the trainer's own GPU, whatever its index in either process
        (ENGINE, ()),  # the engine does not say what it sees
    ],
)
def test_auto_takes_ipc_where_the_engine_can_map_the_trainers_memory(device: str, visible: tuple[str, ...]):
    assert plan_of({URL: engine(device, visible=visible)}, [TRAINER]).choose().transport == "ipc"


def test_each_engine_gets_the_transport_that_its_own_gpus_permit():
    infos = {URL: engine(ENGINE, visible=(ENGINE,)), OTHER: engine("GPU-2", visible=(TRAINER, "GPU-2"))}
    plan = plan_of(infos, [TRAINER])
    assert plan.choose().transport == "ipc+broadcast"
    assert [plan.links[url].plan.transport for url in infos] == ["broadcast", "ipc"]


def test_a_colocated_engine_reads_the_buffer_of_the_rank_on_each_of_its_gpus():
    ranks = tuple(RankInfo(rank=n, pid=n + 1, device=f"GPU-{n}", visible=(f"GPU-{n}",)) for n in range(2))
    info = msgspec.structs.replace(engine("GPU-0", "GPU-1"), ranks=ranks)
    assert plan_of({URL: info}, ["GPU-0", "GPU-1"]).choose().transport == "ipc"


@pytest.mark.parametrize("device", ["cpu", ENGINE])
@pytest.mark.parametrize("asked", ["auto", "ipc"])
def test_every_engine_on_its_host_reads_the_memory_of_a_trainer_on_a_cpu(asked: Any, device: str):
    plan = plan_of({URL: engine(device, visible=(ENGINE,))}, ["cpu"], transport=asked)
    assert plan.choose().transport == "ipc"


def test_shards_on_a_cpu_are_read_by_an_engine_on_a_cpu_whatever_gpus_it_sees(monkeypatch):
    sendable(monkeypatch)
    infos = {URL: engine("cpu", visible=(ENGINE,))}
    plan = plan_of(infos, ["cpu", "cpu"], transport="direct", direct_by="memory")
    assert plan.choose().transport == "direct"


@pytest.mark.parametrize("asked", ["ipc", "direct"])
def test_a_transport_that_needs_a_hidden_gpu_is_refused_at_connect(asked: Any):
    more = {"direct_by": "memory"} if asked == "direct" else {}
    with pytest.raises(ConfigError, match=f"rank 0 of {URL} .*sees only {ENGINE}.* {TRAINER}") as caught:
        plan_of({URL: engine(ENGINE, visible=(ENGINE,))}, [TRAINER], transport=asked, **more).choose()
    assert "CUDA_VISIBLE_DEVICES" in str(caught.value.hint)


# -- settings of NCCL


def test_connect_refuses_nccl_settings_that_differ_with_both_values_and_what_to_set():
    info = engine(ENGINE, visible=(ENGINE,), nccl=settings(**BY_SGLANG))
    with pytest.raises(ConfigError) as caught:
        plan_of({URL: info}, [TRAINER], settings()).choose()
    words = str(caught.value)
    assert "NCCL_CUMEM_ENABLE is not set in trainer rank 0" in words
    assert f"0 in rank 0 of {URL}" in words
    assert "nothing was sent" in words
    assert "set NCCL_CUMEM_ENABLE=0 for every trainer rank" in str(caught.value.hint)
    assert "start the engine with NCCL_CUMEM_ENABLE=1" in str(caught.value.hint)


def test_the_rank_that_differs_is_named_on_either_side():
    ranks = tuple(RankInfo(rank=n, pid=1, device=f"GPU-{n + 2}", nccl=settings(**BY_SGLANG)) for n in range(2))
    info = msgspec.structs.replace(engine("GPU-2", "GPU-3", host="another"), ranks=ranks)
    ours = [settings(NCCL_CUMEM_ENABLE="0"), settings(NCCL_CUMEM_ENABLE="1")]
    with pytest.raises(ConfigError, match=f"NCCL_CUMEM_ENABLE is 1 in trainer rank 1, and 0 in rank 0 of {URL}"):
        plan_of({URL: info}, ["GPU-0", "GPU-1"], ours).choose()


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (settings("2.27.3"), settings("2.28.9"), r"NCCL is 2\.27\.3 in trainer rank 0, and 2\.28\.9 in rank 0"),
        (settings(), settings(NCCL_NVLS_ENABLE="0"), "NCCL_NVLS_ENABLE is not set in trainer rank 0, and 0 in rank 0"),
        (settings(NCCL_NET="IB"), settings(NCCL_NET="Socket"), "NCCL_NET is IB in trainer rank 0, and Socket in"),
    ],
)
def test_other_settings_that_must_agree(ours: NcclSettings, theirs: NcclSettings, words: str):
    info = engine("GPU-2", "GPU-3", nccl=theirs, host="another")
    with pytest.raises(ConfigError, match=words):
        plan_of({URL: info}, [TRAINER], ours).choose()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (settings(NCCL_CUMEM_ENABLE="0"), settings(**BY_SGLANG)),  # NVLS needs cuMem, so it is off on both sides
        (settings(), settings(NCCL_CUMEM_ENABLE="1")),  # what NCCL does unless told otherwise
        (settings(), settings(NCCL_NVLS_ENABLE="0")),  # a group of two GPUs has no NVLS
        (settings(NCCL_NET="IB"), settings()),
        (settings(""), settings("2.28.9")),
        (settings(), None),
        (None, settings(**BY_SGLANG)),
    ],
)
def test_settings_that_agree_or_are_not_known_are_accepted(ours: NcclSettings | None, theirs: NcclSettings | None):
    info = engine(ENGINE, nccl=theirs, host="another")
    assert plan_of({URL: info}, [TRAINER], ours).choose().transport == "broadcast"


@pytest.mark.parametrize("device", [TRAINER, ENGINE])
def test_settings_of_nccl_do_not_matter_to_an_engine_that_is_reached_without_it(device: str):
    info = engine(device, visible=(TRAINER, ENGINE), nccl=settings(**BY_SGLANG))
    assert plan_of({URL: info}, [TRAINER], settings()).choose().transport == "ipc"


def test_direct_by_messages_is_refused_for_the_same_settings():
    info = engine(ENGINE, nccl=settings(**BY_SGLANG), host="another")
    device = torch.device("cuda:0")
    place = Topology(infos={URL: info}, device=device, places=[TRAINER], nccl=[settings()], variant="messages")
    with pytest.raises(ConfigError, match="NCCL_CUMEM_ENABLE is not set in trainer rank 0"):
        choose_transport("direct", place)


def test_settings_are_read_where_nccl_runs(monkeypatch):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    monkeypatch.setattr(nccl, "_loaded_version", lambda: "2.28.9")
    found = nccl.settings_here(torch.device("cuda", 0))
    assert found is not None
    assert found.variables["NCCL_CUMEM_ENABLE"] == "0"
    assert "NCCL_NVLS_ENABLE" not in found.variables
    assert nccl.settings_here(torch.device("cpu")) is None


# -- direct by messages between GPUs, which is slower than a broadcast


def sendable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets an exporter without weights pass for one whose shards can be sent."""
    monkeypatch.setattr("weightcast.update.choose.check_scattered", lambda *_: None)


@pytest.mark.parametrize("way", ["auto", "messages", "relay"])
def test_direct_by_messages_between_gpus_warns_and_says_what_to_use(way: Any, monkeypatch, caplog):
    sendable(monkeypatch)
    caplog.set_level(logging.WARNING, "weightcast")
    plan = plan_of({URL: engine(ENGINE, visible=(ENGINE,))}, [TRAINER], transport="direct", direct_by=way)
    assert plan.choose().transport == "direct"
    [line] = [record.getMessage() for record in caplog.records]
    assert "takes longer than a broadcast" in line
    assert 'transport="broadcast"' in line


def test_direct_through_memory_between_gpus_warns_of_nothing(monkeypatch, caplog):
    sendable(monkeypatch)
    caplog.set_level(logging.WARNING, "weightcast")
    plan = plan_of({URL: engine(ENGINE, visible=(TRAINER, ENGINE))}, [TRAINER], transport="direct")
    assert plan.choose().transport == "direct"
    assert caplog.records == []


# -- doctor


def test_doctor_says_which_gpus_each_side_sees(monkeypatch):
    monkeypatch.setattr(diagnose, "visible_gpus", lambda: (TRAINER,))
    *_, check = diagnose._sharing(engine(ENGINE, visible=(ENGINE,)))
    assert (check.name, check.level) == ("ipc", "warn")
    assert f"rank 0 sees only {ENGINE}, and this process sees {TRAINER}: an update takes broadcast" in check.text
    monkeypatch.setattr(diagnose, "visible_gpus", lambda: (TRAINER, ENGINE))
    *_, check = diagnose._sharing(engine(ENGINE, visible=(ENGINE,)))
    assert check.text == "possible, by CUDA IPC on 1 GPU"


@pytest.mark.parametrize(
    ("device", "visible", "more"),
    [
        (ENGINE, (ENGINE,), ": this process sees no GPU, so its weights can only be on the CPU"),
        (ENGINE, (), ": this process sees no GPU, so its weights can only be on the CPU"),
        ("cpu", (ENGINE,), ""),
    ],
)
def test_doctor_without_a_gpu_says_that_its_trainer_can_send_through_shared_memory(device, visible, more, monkeypatch):
    monkeypatch.setattr(diagnose, "visible_gpus", lambda: ())
    found = engine(device, visible=visible)
    *_, check = diagnose._sharing(found)
    assert (check.name, check.level, check.text) == ("ipc", "ok", f"possible, by shared memory{more}")
    [direct] = diagnose._scattered([check], found)
    assert ("rank 0 by memory" in direct.text) is (device == "cpu")


@pytest.mark.parametrize(("value", "level"), [("0", "ok"), ("1", "warn")])
def test_doctor_compares_nccl_with_its_own_environment(value: str, level: str, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(diagnose, "settings_here", lambda _: settings(NCCL_CUMEM_ENABLE=value))
    [check] = diagnose._nccl(engine(ENGINE, nccl=settings(**BY_SGLANG)))
    assert (check.name, check.level) == ("nccl", level)
    assert level == "ok" or "set NCCL_CUMEM_ENABLE=0" in str(check.hint)
