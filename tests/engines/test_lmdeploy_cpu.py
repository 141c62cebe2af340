"""LMDeploy's own routes, agent and Llama on the CPU, updated as a stock server, against transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines.lmdeploy_server import PLAYED, Rig, rig
from tests.helpers.tiny import greedy, tiny_model, tiny_tokenizer
from weightcast import Target, WeightUpdater
from weightcast.errors import ConfigError, UpdateFailed
from weightcast.lab.demo.smollm2 import ensure_smollm2
from weightcast.report import UpdateReport

PROMPTS = [[5, 17, 200, 33], [7, 7, 90, 311, 12, 4], [1, 400, 22]]
COUNT = 12
BUCKET = 200_000  # four buckets, the largest tensor in one of its own


@dataclass(frozen=True, slots=True)
class Served:
    """A rig and three sets of weights for it; it was started on the first."""

    rig: Rig
    folders: dict[str, Path]
    models: dict[str, Any]

    def serves(self, name: str) -> bool:
        """Does LMDeploy's Llama answer as transformers does with these weights, token for token?"""
        return self.rig.greedy(PROMPTS, COUNT) == [greedy(self.models[name], prompt, COUNT) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], dict[str, Any]]:
    home = tmp_path_factory.mktemp("lmdeploy")
    folders = {name: home / name for name in ("first", "second", "third")}
    models = {
        name: tiny_model(folder, seed=seed, tie_word_embeddings=True)
        for seed, (name, folder) in enumerate(folders.items(), start=1)
    }
    tiny_tokenizer(folders["first"])
    return folders, models


@pytest.fixture(scope="module", params=PLAYED)
def served(request: pytest.FixtureRequest, weights: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folders, models = weights
    with rig(folders["first"], tmp_path_factory.mktemp("logs"), version=request.param) as running:
        yield Served(rig=running, folders=folders, models=models)


def target(running: Rig) -> Target:
    return Target(running.url, engine="lmdeploy", devices=("cpu",))  # before 0.17 it does not tell


def push(served: Served, name: str, version: int, **options: Any) -> UpdateReport:
    settings: dict[str, Any] = {"bucket_bytes": BUCKET, "timeout_s": 60.0} | options
    with WeightUpdater.connect(served.models[name], [target(served.rig)], **settings) as updater:
        return updater.update(version=version)


@pytest.mark.engine
@pytest.mark.parametrize("via", ["broadcast", "ipc"])
def test_lmdeploy_answers_as_transformers_does_on_the_weights_that_were_sent(served: Served, via: str) -> None:
    for version, name in enumerate(("second", "third", "first"), start=1):
        assert not served.serves(name)
        served.rig.calls()
        report = push(served, name, version, transport=via)
        assert report.ok, str(report)
        assert report.buckets > 2
        assert served.serves(name)
        calls = served.rig.calls()
        # Asleep during the update, graphs dropped and the cache built anew: nothing of the old weights is left.
        assert calls[0] == "graphs.reset"
        assert calls[-1] == "cache.build"
        # A storage that stays is mapped once, whatever the number of buckets.
        assert calls.count("open") == (1 if via == "ipc" else 0)
        assert served.rig.get("/is_sleeping") == {"is_sleeping": False}


@pytest.mark.engine
def test_one_updater_sends_again_and_again_and_posts_come_one_by_one(served: Served) -> None:
    for via in ("broadcast", "ipc"):
        with WeightUpdater.connect(
            served.models["second"],
            [target(served.rig)],
            transport=via,
            bucket_bytes=BUCKET,
            timeout_s=60.0,
        ) as updater:
            for version in (11, 12, 13):
                assert updater.update(version=version).ok
        assert served.serves("second")
        assert push(served, "first", 20, transport=via).ok
        assert served.serves("first")
    assert served.rig.post("/rig_calls")["most_at_once"] == 1


@pytest.mark.engine
def test_an_engine_that_was_asleep_is_left_asleep(served: Served) -> None:
    # Colocated trainers let it sleep before they train, and wake its cache when they have made room.
    served.rig.client.post(served.rig.url + "/sleep?level=1", json={}).raise_for_status()
    report = push(served, "third", 30, transport="ipc")
    assert report.ok
    assert "wakeup?tags=kv_cache" in report.targets[0].message
    assert served.rig.get("/is_sleeping") == {"is_sleeping": True}
    served.rig.client.post(served.rig.url + "/wakeup?tags=kv_cache", json={}).raise_for_status()
    assert served.serves("third")
    assert push(served, "first", 31, transport="ipc").ok


@pytest.mark.engine
def test_another_pause_than_sleep_is_refused_before_anything_moves(served: Served) -> None:
    with pytest.raises(Exception, match="cannot be updated with pause='in_place'"):
        push(served, "second", 40, pause="in_place")
    assert served.serves("first")


@pytest.mark.engine
def test_executors_without_weight_methods_are_refused_before_anything_moves(weights: Any, tmp_path: Path) -> None:
    folders, models = weights
    with rig(folders["first"], tmp_path, "--executor", "uni", "--key", "secret") as running:
        served = Served(rig=running, folders=folders, models=models)
        for via in ("ipc", "broadcast"):
            with pytest.raises(ConfigError, match="takes no update") as caught:
                WeightUpdater.connect(
                    models["second"],
                    [Target(running.url, engine="lmdeploy", api_key="secret")],
                    transport=via,
                )
            assert "--distributed-executor-backend ray" in (caught.value.hint or "")
        assert served.serves("first")


@pytest.mark.engine
def test_checkpoint_engines_wire_reaches_any_executor(weights: Any, tmp_path: Path) -> None:
    folders, models = weights
    with rig(folders["first"], tmp_path, "--executor", "uni", "--device-type", "cuda") as running:
        served = Served(rig=running, folders=folders, models=models)
        for version, name in enumerate(("second", "third", "first"), start=1):
            assert not served.serves(name)
            running.calls()
            report = push(served, name, version, transport="checkpoint-engine")
            assert report.ok, str(report)
            assert served.serves(name)
            assert running.calls() == ["graphs.reset", "open", "graphs.reset", "complete", "cache.build"]
        # A tensor that the model does not know: the rank says so, is told that all is over, and can be used on.
        with torch.no_grad():
            stranger = copy.deepcopy(models["second"])
            stranger.register_parameter("stranger", torch.nn.Parameter(torch.zeros(4)))
        with (
            pytest.raises(UpdateFailed, match="stranger") as caught,
            WeightUpdater.connect(
                stranger, [target(running)], transport="checkpoint-engine", bucket_bytes=BUCKET
            ) as updater,
        ):
            updater.update(version=7)
        assert [row.status for row in caught.value.report.targets] == ["quarantined"]
        assert running.get("/is_sleeping") == {"is_sleeping": True}
        assert push(served, "second", 8, transport="checkpoint-engine").ok
        running.client.post(running.url + "/wakeup", json={}).raise_for_status()
        assert served.serves("second")


@pytest.mark.engine_full
def test_smollm2_answers_as_transformers_does_whichever_way_it_came(tmp_path: Path) -> None:
    folder = ensure_smollm2(lambda done, total: None)
    prompts = [[504, 3575, 282, 4649, 314], [1604, 25, 30, 198], [28, 339, 506]]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    before = [greedy(model, prompt, COUNT) for prompt in prompts]
    with rig(folder, tmp_path, "--device-type", "cuda") as running:
        assert running.greedy(prompts, COUNT) == before
        for version, via in enumerate(("ipc", "checkpoint-engine"), start=1):
            generator = torch.Generator().manual_seed(version)
            with torch.no_grad():
                for parameter in model.parameters():
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(noise * parameter.std() * 0.05)
            wanted = [greedy(model, prompt, COUNT) for prompt in prompts]
            assert running.greedy(prompts, COUNT) != wanted
            place = Target(running.url, engine="lmdeploy")
            with WeightUpdater.connect(model, [place], transport=via, bucket_bytes=128 << 20) as updater:
                report = updater.update(version=version)
            assert report.ok, str(report)
            assert running.greedy(prompts, COUNT) == wanted
    with rig(folder, tmp_path) as running:  # the one before says that it has a GPU, which gloo would not meet
        wanted = [greedy(model, prompt, COUNT) for prompt in prompts]
        assert running.greedy(prompts, COUNT) == before != wanted
        with WeightUpdater.connect(model, [target(running)], transport="broadcast", bucket_bytes=128 << 20) as updater:
            assert updater.update(version=1).ok
        assert running.greedy(prompts, COUNT) == wanted
