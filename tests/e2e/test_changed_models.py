"""A model that is made in another way between two updates: engines get it as it is now, or keep what they serve."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.two_tensor import TwoTensor

from tests.helpers.engines import Engine
from tests.helpers.harness import connect, next_version, serves_whole, set_shards, trainer_of
from tests.helpers.ranks import Ranks
from tests.helpers.tiny import tiny_model, tiny_tokenizer
from tests.helpers.toy_engine import toy_weights
from weightcast import WeightUpdater
from weightcast.errors import ConfigError, UpdateFailed, WeightcastError

WAYS: dict[str, dict[str, Any]] = {
    "ipc": {"transport": "ipc"},
    "broadcast": {"transport": "broadcast"},
    "direct": {"transport": "direct"},
}
TOKENS = list(range(2, 14))


def replace_layer(model: nn.Module) -> None:
    layers = model.get_submodule("layers")
    setattr(layers, "1", copy.deepcopy(layers.get_submodule("1")))


def put_subclass(model: nn.Module) -> nn.Parameter:
    """Puts a tensor whose address is 0 into the model; returns the parameter that was there."""
    layer = model.get_submodule("layers.1.up")
    kept = layer.weight
    values = torch.ones(kept.shape)
    layer.weight = nn.Parameter(TwoTensor(values, values.clone()), requires_grad=False)
    return kept


@pytest.mark.parametrize("way", WAYS)
def test_modules_that_were_replaced_are_sent(engines, way):
    model = trainer_of(first := next_version())
    with connect(model, [engines.one], **WAYS[way]) as updater:
        updater.update(version=first)
        for change in (replace_layer, lambda model: None):
            change(model)
            model.set_version(version := next_version())
            assert updater.update(version=version).targets[0].proof == "resident"
            assert serves_whole(engines.one) == version


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_that_became_a_wrapper_subclass_is_refused_and_engines_go_on(engines, way):
    model = trainer_of(first := next_version())
    with connect(model, [engines.one], **WAYS[way]) as updater:
        updater.update(version=first)
        kept = put_subclass(model)
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"layers\.1\.up\.weight is a TwoTensor"):
                updater.update(version=next_version())
            assert serves_whole(engines.one) == first
        model.get_submodule("layers.1.up").weight = kept
        model.set_version(version := next_version())
        updater.update(version=version)
        assert serves_whole(engines.one) == version


def test_a_budget_of_memory_holds_for_adapters_that_come_later(engines):
    peft = pytest.importorskip("peft")
    model = trainer_of(first := next_version())
    layer = model.get_submodule("layers.0")
    for name in ("up", "down"):
        weight = layer.get_submodule(name).weight
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = weight
        setattr(layer, name, linear)
    with connect(model, [engines.one], max_extra_bytes="65MiB") as updater:
        updater.update(version=first)
        peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=r"layers\.0\.(up|down)"), model)
        with pytest.raises(ConfigError, match=r"max_extra_bytes=68157440: the model has changed"):
            updater.update(version=next_version())
        assert serves_whole(engines.one) == first


def save(path: Path, version: int) -> None:
    """As trainers save: aside first."""
    save_file(toy_weights(seed=version), path.with_suffix(".aside"))
    path.with_suffix(".aside").replace(path)


def test_a_checkpoint_that_is_saved_again_is_sent(engines, tmp_path):
    path = tmp_path / "model.safetensors"
    save(path, version := next_version())
    with connect(str(path), [engines.one]) as updater:
        updater.update(version=version)
        assert serves_whole(engines.one) == version
        save(path, version := next_version())
        updater.update(version=version)
        assert serves_whole(engines.one) == version


def test_a_checkpoint_that_is_saved_during_an_update_reaches_no_engine(engines, tmp_path):
    path = tmp_path / "model.safetensors"
    save(path, first := next_version())
    later: list[int] = []

    def progress(sent: int, total: int) -> None:
        if later and sent > total // 2:
            save(path, later.pop())

    with connect(str(path), [engines.one], progress=progress) as updater:
        updater.update(version=first)
        later.append(version := next_version())
        with pytest.raises(
            WeightcastError, match=r"model\.safetensors was written or replaced while an update read it"
        ):
            updater.update(version=version)
        assert serves_whole(engines.one) == first
        save(path, version := next_version())
        updater.update(version=version)
        assert serves_whole(engines.one) == version


def _sharded(urls: list[str], versions: list[int], transport: str) -> list[str]:
    """Changes a model on two trainer ranks; what this rank got for each update."""
    torch.set_num_threads(1)
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    said: list[str] = []
    model = trainer_of(versions[0])

    def update(version: int) -> None:
        try:
            said.append(updater.update(version=version).targets[0].proof)
        except ConfigError as error:
            said.append(f"refused: {error}")

    with WeightUpdater.connect(model, urls, transport=transport, bucket_bytes=30_000, timeout_s=60.0) as updater:
        update(versions[0])
        for layer in model.get_submodule("layers").children():  # after connect
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        set_shards(model, versions[1])
        update(versions[1])
        other = trainer_of(versions[2]).get_submodule("layers.1")
        fully_shard(other, mesh=mesh)
        setattr(model.get_submodule("layers"), "1", other)
        set_shards(model, versions[2])
        update(versions[2])
        kept = put_subclass(model) if rank == 1 else None  # on one rank alone
        update(versions[3])
        if kept is not None:
            model.get_submodule("layers.1.up").weight = kept
        if rank == 0:
            setattr(model.get_submodule("layers"), "2", model.get_submodule("layers.2"))  # nothing new
            model.get_submodule("layers.2").register_buffer("own", torch.ones(2), persistent=False)
        set_shards(model, versions[3])
        update(versions[3])
    return said


@pytest.mark.parametrize("transport", ["ipc", "direct"])
def test_what_one_trainer_rank_notices_is_heard_by_all(engines, transport):
    ranks = Ranks(2)
    try:
        versions = [next_version() for _ in range(4)]
        answers = ranks.run(_sharded, [engines.one.url], versions, transport)
    finally:
        ranks.close()
    assert answers[0] == answers[1]
    assert answers[0][:3] == ["resident"] * 3
    assert answers[0][3].startswith("refused: layers.1.up.weight is a TwoTensor")
    assert answers[0][4] == "resident"
    assert serves_whole(engines.one) == versions[3]


@pytest.fixture
def reference(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A reference engine of a model with tied embeddings, if the test asks for that."""
    tiny_model(folder := tmp_path / "engine", tie_word_embeddings=getattr(request, "param", False))
    tiny_tokenizer(folder)
    engine = Engine.start(folder, log=tmp_path / "log")
    try:
        engine.ready(tmp_path / "log")
        yield engine
    finally:
        engine.stop()


def off_by(engine: Engine, model: Any) -> float:
    """The largest difference between the engine's log-probabilities and the trainer's own."""
    with torch.no_grad():
        logits = torch.log_softmax(model(torch.tensor([TOKENS])).logits[0, :-1].float(), -1)
    mine = logits.gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    theirs = engine.post("/weightcast/score", token_ids=TOKENS)["logprobs"]
    return (torch.tensor(theirs) - mine).abs().max().item()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_update_within_a_window_of_merged_adapters_serves_what_was_trained(reference, tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny_model(tmp_path / "trainer", seed=1),
        peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]),
    ).eval()
    generator = torch.Generator().manual_seed(1)

    def train() -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_" in name:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)

    train()
    with WeightUpdater.connect(model, reference.url, timeout_s=60.0) as updater:
        assert updater.update().ok
        assert off_by(reference, model) < 1e-3
        for _ in range(2):
            before = off_by(reference, model)
            train()
            assert off_by(reference, model) > 0.1 > before
            model.merge_adapter()
            assert updater.update().targets[0].proof == "resident"
            assert off_by(reference, model) < 1e-3
            model.unmerge_adapter()
        model.base_model.disable_adapter_layers()
        assert updater.update().ok
        assert off_by(reference, model) < 1e-3
        model.merge_and_unload()
        assert updater.update().ok


@pytest.mark.parametrize("reference", [True], indirect=True)
def test_an_untied_head_is_refused_and_the_engine_answers_as_before(reference, tmp_path):
    model = tiny_model(tmp_path / "trainer", seed=2, tie_word_embeddings=True)
    with WeightUpdater.connect(model, reference.url, timeout_s=60.0) as updater:
        assert updater.update().ok
        before = reference.digests()
        state = {name: tensor + 0.1 for name, tensor in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        with pytest.raises(ConfigError, match=r"lm_head\.weight was tied to another tensor") as refused:
            updater.update()
        assert "connect again" in (refused.value.hint or "")
        assert not isinstance(refused.value, UpdateFailed)
        assert reference.digests() == before
        model.tie_weights()
        assert updater.update().ok
