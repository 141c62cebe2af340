"""Reference engines that speak as stock LMDeploy servers, updated by the LMDeploy adapter; faults at each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.engines import Engine, engines, weightcast
from tests.helpers.stolen import Inexcusable
from tests.helpers.tiny import greedy, tiny_model, tiny_tokenizer
from weightcast import Target, WeightUpdater
from weightcast.digest.definition import tensor_digest
from weightcast.errors import ConfigError, UpdateFailed

PROMPTS = [[5, 17, 200, 33], [7, 7, 90, 311, 12, 4], [1, 400, 22]]
COUNT = 10
BUCKET = 200_000
VIA = ("broadcast", "ipc")


@dataclass(frozen=True, slots=True)
class World:
    """Engines with one rank and two that speak LMDeploy, a native one, and three sets of weights."""

    one: Engine
    two: Engine
    native: Engine
    folders: dict[str, Path]
    models: dict[str, Any]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    home = tmp_path_factory.mktemp("dialect")
    folders = {name: home / name for name in ("first", "second", "third")}
    models = {name: tiny_model(folder, seed=seed) for seed, (name, folder) in enumerate(folders.items(), start=1)}
    tiny_tokenizer(folders["first"])
    lmdeploy = {"dialect": "lmdeploy", "staging": "none"}
    with engines(folders["first"], home, lmdeploy, lmdeploy | {"tp": 2}, {}) as (one, two, native):
        yield World(one=one, two=two, native=native, folders=folders, models=models)


def target(engine: Engine) -> Target:
    return Target(engine.url, engine="lmdeploy")


def connect(world: World, name: str, targets: Sequence[Target], **options: Any) -> WeightUpdater:
    settings: dict[str, Any] = {"bucket_bytes": BUCKET, "timeout_s": 20.0} | options
    return WeightUpdater.connect(world.models[name], targets, **settings)


def serves(world: World, engine: Engine, name: str) -> bool:
    """Token for token as transformers, and every tensor bit for bit."""
    tokens = engine.greedy(PROMPTS, COUNT) == [greedy(world.models[name], prompt, COUNT) for prompt in PROMPTS]
    sent = {key: tensor_digest(tensor) for key, tensor in world.models[name].state_dict().items()}
    kept = engine.digests()
    # What arrived is compared with what was sent, not two sendings with each other.
    if tokens != all(kept[key] == digest for key, digest in sent.items() if key in kept):
        raise Inexcusable(f"{engine.url} does not answer as the weights that it keeps")
    return tokens


def must_serve(world: World, engine: Engine, weights: str) -> None:
    if not serves(world, engine, weights):
        raise Inexcusable(f"{engine.url} does not serve the {weights} weights")


def faults(engine: Engine, text: str) -> None:
    engine.client.post(engine.url + "/faults", content=text).raise_for_status()


@pytest.mark.parametrize("via", VIA)
@pytest.mark.parametrize("name", ["one", "two"])
def test_updates_in_a_row(world: World, name: str, via: str) -> None:
    engine = getattr(world, name)
    for version, weights in enumerate(("second", "third", "first"), start=1):
        assert not serves(world, engine, weights)
        with connect(world, weights, [target(engine)], transport=via) as updater:
            report = updater.update(version=version)
        assert report.ok
        assert report.buckets > 3
        assert (report.targets[0].ranks, report.targets[0].version_after) == (engine.tp, version)
        assert serves(world, engine, weights)
        assert engine.get("/is_sleeping") == {"is_sleeping": False}


@pytest.mark.parametrize("via", VIA)
def test_two_kinds_of_engine_in_one_update(world: World, via: str) -> None:
    targets = [target(world.one), Target(world.native.url), target(world.two)]
    for weights in ("second", "first"):
        with connect(world, weights, targets, transport=via, allow_older=True) as updater:
            report = updater.update(version=50)
        assert report.ok
        assert [row.proof for row in report.targets] == ["none", "resident", "none"]
        assert all(serves(world, engine, weights) for engine in (world.one, world.native, world.two))


def test_behaviour_is_compared_by_its_own_route(world: World) -> None:
    for weights in ("third", "first"):
        with connect(world, weights, [target(world.one)], verify="behaviour") as updater:
            report = updater.update(version=60)
        assert report.targets[0].proof == "behaviour", report.targets[0].message


def test_the_command_line_pushes_to_it(world: World, tmp_path: Path) -> None:
    for weights, via in (("second", "ipc"), ("first", "broadcast")):
        done = weightcast(
            "push", world.folders[weights], "--to", world.two.url, "--engine", "lmdeploy", "--via", via,
            "--version", 70, "--bucket-bytes", "1MiB",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert serves(world, world.two, weights)


def test_inference_is_refused_while_it_sleeps(world: World) -> None:
    client = world.one.client
    client.post(world.one.url + "/sleep?level=1", json={}).raise_for_status()
    try:
        answer = client.post(world.one.url + "/v1/completions", json={"prompt": [1, 2], "max_tokens": 1})
        assert answer.status_code == 503
        # A tag that is awake makes the whole call mean nothing.
        client.post(world.one.url + "/wakeup?tags=weights", json={}).raise_for_status()
        client.post(world.one.url + "/wakeup?tags=weights&tags=kv_cache", json={}).raise_for_status()
        assert world.one.get("/is_sleeping") == {"is_sleeping": True}
    finally:
        client.post(world.one.url + "/wakeup", json={}).raise_for_status()
    assert serves(world, world.one, "first")


STEPS = {
    "broadcast": [
        ("refuse@/sleep", "untouched"),
        ("refuse@/init_weights_update_group", "untouched"),
        ("refuse@/update_weights_from_distributed#1", "quarantined"),
        ("half@/update_weights_from_distributed#3", "quarantined"),
    ],
    "ipc": [
        ("refuse@/update_weights#1", "quarantined"),
        ("half@/update_weights#2", "quarantined"),
    ],
}


@pytest.mark.deadlines
@pytest.mark.parametrize(("via", "fault", "left"), [(via, *step) for via, steps in STEPS.items() for step in steps])
def test_a_fault_names_the_engine_and_the_next_update_works(world: World, via: str, fault: str, left: str) -> None:
    with connect(world, "second", [target(world.one), target(world.two)], transport=via) as updater:
        faults(world.one, fault)
        with pytest.raises(UpdateFailed) as caught:
            updater.update(version=80)
        assert world.one.url in str(caught.value)
        rows = {row.url: row.status for row in caught.value.report.targets}
        assert rows[world.one.url] == left
        if left == "untouched":
            assert rows[world.two.url] == "untouched"
            must_serve(world, world.two, "first")
        faults(world.one, "")
        for engine in (world.one, world.two):
            # Whoever may have parts of two versions is kept from serving them.
            assert engine.get("/is_sleeping")["is_sleeping"] == (rows[engine.url] == "quarantined")
        assert updater.update(version=81).ok
    must_serve(world, world.one, "second")
    must_serve(world, world.two, "second")
    with connect(world, "first", [target(world.one), target(world.two)], transport=via) as updater:
        assert updater.update(version=82).ok
    must_serve(world, world.one, "first")


def test_what_it_would_bite_with_is_refused_before_anything_moves(world: World) -> None:
    with pytest.raises(ConfigError, match="pause='in_place': LMDeploy's only pause is sleep"):
        connect(world, "second", [target(world.one)], pause="in_place")
    with pytest.raises(ConfigError, match="use bucket_bytes="):
        connect(world, "second", [target(world.one)], bucket_bytes=4096)  # it reads whole tensors only
    with pytest.raises(ConfigError, match="takes no update by checkpoint-engine"):
        connect(world, "second", [target(world.one)], transport="checkpoint-engine")


def test_names_and_shapes_that_the_model_has_not_are_the_engines_to_refuse(world: World) -> None:
    stranger = torch.nn.Module()
    stranger.register_parameter("stranger", torch.nn.Parameter(torch.zeros(8)))
    with (
        WeightUpdater.connect(stranger, [target(world.one)], transport="broadcast") as updater,
        pytest.raises(UpdateFailed, match="stranger"),
    ):
        updater.update(version=120)
    with connect(world, "first", [target(world.one)]) as updater:
        assert updater.update(version=121).ok
    world.one.client.post(world.one.url + "/wakeup", json={}).raise_for_status()
    assert serves(world, world.one, "first")
