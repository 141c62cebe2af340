"""The SGLang adapter, payloads and transports against SGLang's own code, with and without sessions."""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from tests.engines.environment import QUICK, engine_python
from tests.engines.overlays import overlay
from tests.engines.sglang_server import OVERLAYS, PLAYED, STANDINS
from tests.helpers.engines import NO_KEEP_ALIVE
from tests.helpers.sglang_globals import GLOBALS
from weightcast import WeightUpdater
from weightcast.errors import ConfigError, UpdateFailed
from weightcast.wire.layout import DTYPES

pytestmark = [pytest.mark.engine, pytest.mark.short]

RIG = Path(__file__).parent / "sglang_rig.py"
CHECKPOINT_ENGINE = ("checkpoint-engine==0.4.2", "loguru==0.7.3")
START_S = 600.0


@dataclass
class Rig:
    version: str
    url: str
    client: httpx.Client

    def __call__(self, path: str) -> dict[str, Any]:
        return self.client.get(self.url + path).raise_for_status().json()

    @property
    def has_sessions(self) -> bool:
        return self.version != "0.5.17"


@contextmanager
def started(version: str) -> Iterator[Rig]:
    python = engine_python("sglang-0.5.23-cpu")
    wheels = (OVERLAYS.get(version, ()), CHECKPOINT_ENGINE)
    path = [overlay(python, *each) for each in wheels if each]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, [*path, STANDINS, STANDINS.parent, QUICK])),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [str(python), str(RIG)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                assert selector.select(START_S), f"the rig of {version} said nothing"
            said = json.loads(process.stdout.readline() or "{}")
            assert said.get("version") == version, f"the rig of {version} did not start: {said}"
            with httpx.Client(trust_env=False, timeout=300, limits=NO_KEEP_ALIVE) as client:
                yield Rig(version, f"http://127.0.0.1:{said['port']}", client)
        finally:
            process.kill()


class Rigs(dict[str, Rig]):
    """One rig for each version, started when it is asked for."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, version: str) -> Rig:
        self[version] = self._stack.enter_context(started(version))
        return self[version]


@pytest.fixture(scope="module")
def rigs() -> Iterator[Rigs]:
    with ExitStack() as stack:
        yield Rigs(stack)


@pytest.fixture(params=PLAYED)
def rig(rigs: Rigs, request: pytest.FixtureRequest) -> Rig:
    rigs[request.param]("/rig/clear")
    return rigs[request.param]


class Mixed(nn.Module):
    """Tensors of several dtypes, one of them a scalar, in an order that needs padding."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(seed)
        for name, dtype, shape in (
            ("octets", torch.uint8, (3,)),
            ("wide", torch.float32, (5, 4)),
            ("halves", torch.bfloat16, (3, 7)),
            ("scalar", torch.float32, ()),
            ("eight", torch.float8_e4m3fn, (9,)),
            ("last", torch.float16, (2, 3, 2)),
        ):
            self.register_buffer(name, (torch.rand(shape, generator=source) * 100).to(dtype))


def told(model: nn.Module) -> dict[str, list[Any]]:
    """The model in the form in which the rig describes loaded weights."""
    return {
        name: [
            str(tensor.dtype),
            list(tensor.shape),
            hashlib.sha256(bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())).hexdigest(),
        ]
        for name, tensor in model.state_dict().items()
    }


def update(model: nn.Module, rig: Rig, version: int, **options: Any) -> None:
    options = {"timeout_s": 30.0, "verify": "none", "allow_older": True, "bucket_bytes": 4096} | options
    with WeightUpdater.connect(model, [rig.url], **options) as updater:
        report = updater.update(version=version)
        assert report.ok
        assert report.targets[0].engine == f"sglang {rig.version}"


@pytest.mark.parametrize("way", ["broadcast", "ipc"])
def test_loaded_weights_equal_sent_weights(rig: Rig, way: str) -> None:
    model = Mixed(seed=len(way))
    update(model, rig, 7, transport=way)
    after = rig("/rig")
    assert after["kept"] == told(model) != told(Mixed(seed=99))
    assert rig("/model_info")["weight_version"] == "7"
    assert not after["paused"]


@pytest.mark.parametrize("way", ["broadcast", "ipc"])
def test_steps_arrive_in_order(rig: Rig, way: str) -> None:
    update(Mixed(seed=1), rig, 8, transport=way, pause="abort")
    journal = rig("/rig")["journal"]
    bucket = {"broadcast": "update_weights_from_distributed", "ipc": "update_weights_from_tensor"}[way]
    assert journal.count(bucket) > 1
    assert "flushed by an update" not in journal  # once before the first bucket, never with a bucket
    steps = [step for number, step in enumerate(journal) if number == 0 or journal[number - 1] != step]
    expected = ["abort_request", "flush_cache"]  # a flush that is refused must leave everything untouched
    if rig.has_sessions:
        expected.append("begin_weight_update")
    if way == "broadcast":
        # The group is made when all sessions are open; a trainer that leaves destroys it.
        expected.append("init_weights_update_group")
    expected.append(bucket)
    if rig.has_sessions:
        expected.append("end_weight_update")
    if "update_weight_version" in steps:
        expected.append("update_weight_version")
    expected.append("ContinueGenerationReqInput")
    if way == "broadcast":
        expected.append("destroy_weights_update_group")
    assert steps == expected


@pytest.mark.parametrize(
    ("pause", "word"), [("retract", "PauseGenerationReqInput"), ("in_place", "PauseGenerationReqInput")]
)
def test_pause_modes_are_accepted(rig: Rig, pause: str, word: str) -> None:
    rig("/rig/bare")  # with a prefix cache, requests that stay could be given cache of the old weights
    update(Mixed(seed=2), rig, 9, transport="ipc", pause=pause)
    assert rig("/rig")["journal"][0] == word


def test_weights_arrive_over_checkpoint_engine(rig: Rig) -> None:
    rig("/rig/gpu")
    model = Mixed(seed=3)
    update(model, rig, 7, transport="checkpoint-engine")
    after = rig("/rig")
    assert after["kept"] == told(model)
    assert rig("/model_info")["weight_version"] == "7"
    assert "begin_weight_update" not in after["journal"]
    assert after["journal"].count("update_weights_from_ipc") == 1
    update(Mixed(seed=4), rig, 8, transport="checkpoint-engine")
    assert rig("/rig")["kept"] == told(Mixed(seed=4))


def test_refused_tensor_over_checkpoint_engine_fails_the_update(rig: Rig) -> None:
    rig("/rig/gpu")
    rig("/rig/refuse?scalar")
    with pytest.raises(UpdateFailed, match="scalar is not what this model wants") as caught:
        update(Mixed(seed=3), rig, 7, transport="checkpoint-engine")
    assert caught.value.report.targets[0].status == "quarantined"
    assert rig("/rig")["paused"]
    rig("/rig/clear")
    rig("/rig/gpu")
    update(Mixed(seed=5), rig, 8, transport="checkpoint-engine")
    after = rig("/rig")
    assert after["kept"] == told(Mixed(seed=5))
    assert not after["paused"]


def test_group_is_kept_for_the_next_update_and_left_at_the_end(rig: Rig) -> None:
    model = Mixed(seed=3)
    with WeightUpdater.connect(
        model, [rig.url], transport="broadcast", verify="none", timeout_s=30.0, allow_older=True
    ) as updater:
        for version in (10, 11, 12):
            model.wide.add_(1)
            updater.update(version=version)
            assert rig("/rig")["kept"] == told(model)
        journal = rig("/rig")["journal"]
        assert journal.count("init_weights_update_group") == 1
        assert "destroy_weights_update_group" not in journal
    assert rig("/rig")["journal"].count("destroy_weights_update_group") == 1


@pytest.mark.parametrize("way", ["broadcast", "ipc"])
def test_refused_bucket_leaves_the_engine_paused_and_the_next_update_works(rig: Rig, way: str) -> None:
    rig("/rig/refuse?scalar")
    with pytest.raises(UpdateFailed, match=r"refused bucket \d+|refused POST|scalar") as caught:
        update(Mixed(seed=4), rig, 20, transport=way)
    assert caught.value.half_updated == (rig.url,)
    assert rig("/rig")["paused"]
    rig("/rig/clear")
    model = Mixed(seed=5)
    update(model, rig, 21, transport=way)
    after = rig("/rig")
    assert after["kept"] == told(model)
    assert not after["paused"]


def test_a_session_says_which_of_the_models_it_is_for(rig: Rig) -> None:
    def begin(selector: str) -> int:
        return rig.client.post(f"{rig.url}/begin_weight_update", json={"selector": selector}).status_code

    if not rig.has_sessions:
        assert begin("target") == 404
        return
    assert begin("target") == 200
    assert rig.client.post(f"{rig.url}/end_weight_update", json={}).status_code == 200
    assert begin("neither") >= 400


def test_empty_tensors_are_refused_before_anything_is_sent(rig: Rig) -> None:
    model = Mixed(seed=6)
    model.register_buffer("nothing", torch.zeros(0, 4))
    with pytest.raises(ConfigError, match="takes no empty tensors: nothing"):
        update(model, rig, 30, transport="ipc")
    assert rig("/rig")["journal"] == []


def test_every_name_in_a_payload_is_on_the_decoders_list(rigs: Rigs) -> None:
    """One version has a list of names, the other has prefixes.  Dtypes come from the wire's table."""
    allowed = rigs["0.5.23"].client.get(rigs["0.5.23"].url + "/rig/allowed").json()
    assert GLOBALS | {f"torch {dtype}" for dtype in DTYPES} <= set(allowed)
