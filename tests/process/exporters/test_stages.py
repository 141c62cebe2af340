"""Ranks that each have a part of a model export together what ``save_pretrained`` writes of the whole."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.helpers import library
from tests.helpers.exports import CPU, export, raw
from tests.helpers.ranks import Ranks
from tests.helpers.source_sums import summed
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.definition import tensor_digest
from weightcast.errors import ConfigError, error_words
from weightcast.exporters.stages import StagesExporter
from weightcast.protocols import BucketUse

MODEL = "Qwen3MoeForCausalLM"


def stage_of(model: nn.Module, first: bool) -> nn.Module:
    """The first or the second half of a model, with empty modules in the place of the other half."""
    decoder = model.model
    half = len(decoder.layers) // 2
    for number in range(len(decoder.layers)):
        if (number < half) != first:
            decoder.layers[number] = nn.Identity()
    if first:
        decoder.norm, model.lm_head = nn.Identity(), nn.Identity()
    else:
        decoder.embed_tokens = nn.Identity()
    return model


def whole_of(model: nn.Module) -> nn.Module:
    with torch.device("meta"):
        return type(model)(model.config).to(model.dtype)


def staged(folder: str, kinds: list[str]) -> dict[str, list[str]]:
    """Names of the tensors that an export has otherwise than the checkpoint, for each kind of sharding."""
    want = load_file(f"{folder}/model.safetensors")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    group = TrainerGroup.connect(CPU, timeout_s=60)
    found: dict[str, list[str]] = {}
    for kind in kinds:
        model = library.make(MODEL)
        whole = whole_of(model)
        stage = stage_of(model, first=rank < 2)
        if kind == "fsdp2":
            for layer in stage.model.layers:
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=mesh["dp"])
            fully_shard(stage, mesh=mesh["dp"])
        stages: nn.Module | list[nn.Module] = stage
        if kind == "interleaved":  # each rank has two modules, of which one has no tensors in some ranks
            other = copy.deepcopy(stage)
            for number in range(len(stage.model.layers)):
                stage.model.layers[number] = nn.Identity()
            for name in ("embed_tokens", "norm"):
                setattr(other.model, name, nn.Identity())
            other.lm_head = nn.Identity()
            stages = [stage, other]
        got = export(StagesExporter(stages, whole=whole), group, BucketUse(receivers=(0, 3)))
        found[kind] = sorted(set(got) ^ set(want)) + [n for n in got if n in want and got[n] != raw(want[n])]
    group.close()
    return found if got else {}


def imported() -> None:
    library.make(MODEL)


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks(4)
    ranks.run(imported)
    yield ranks
    ranks.close()


def test_stages_export_the_checkpoint_of_the_whole_model(ranks, tmp_path):
    library.written(library.make(MODEL), tmp_path)
    kinds = ["replicated", "fsdp2", "interleaved"]
    found = ranks.run(staged, str(tmp_path), kinds)
    assert found == [{kind: [] for kind in kinds}, {}, {}, {kind: [] for kind in kinds}]


class Expert(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = nn.Linear(3, 4, bias=False)
        nn.init.constant_(self.up.weight, number + 1)


class Experts(nn.Module):
    """Experts in modules of their own, of which a rank may have only some."""

    def __init__(self, mine: range | list[int]) -> None:
        super().__init__()
        self.router = nn.Linear(3, 4)
        nn.init.constant_(self.router.weight, 0.5)
        nn.init.constant_(self.router.bias, 0.25)
        self.experts = nn.ModuleDict({str(number): Expert(number) for number in mine})


def experts_apart() -> dict[str, bytes]:
    rank = dist.get_rank()
    group = TrainerGroup.connect(CPU, timeout_s=60)
    with torch.device("meta"):
        whole = Experts(range(8))
    got = export(StagesExporter(Experts([rank, rank + 4]), whole=whole), group, BucketUse(receivers=(0, 1)))
    group.close()
    return got


def test_experts_of_different_ranks_are_one_model(ranks):
    want = {name: raw(tensor) for name, tensor in Experts(range(8)).state_dict().items()}
    found = ranks.run(experts_apart)
    assert found == [want, want, {}, {}]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


def tied(wrong_rank: int) -> object:
    """On the head, the digests by the ranks' own sums, and the mismatches; None elsewhere."""
    rank = dist.get_rank()
    group = TrainerGroup.connect(CPU, timeout_s=60)
    with torch.device("meta"):
        whole = Tied()
    stage = Tied()
    with torch.no_grad():
        stage.embed.weight.fill_(2.0 if rank == wrong_rank else 1.0)
    if rank < 2:
        stage.head = nn.Identity()
    else:
        stage.embed = nn.Identity()
    found = summed(StagesExporter(stage, whole=whole), group, bucket_bytes=4096)
    group.close()
    return found and (found[0], found[2])


def test_tied_weight_of_two_stages_is_one_tensor(ranks):
    assert ranks.run(tied, -1)[0] == ({"embed.weight": tensor_digest(torch.ones(4, 2))}, [])


def test_tied_weights_of_two_stages_that_differ_are_named(ranks):
    _, mismatches = ranks.run(tied, 3)[0]
    assert mismatches == [("embed.weight", ((0, 1, 2), (3,)), False)]


def refused(kind: str) -> str:
    with torch.device("meta"):
        whole = Tied()
    stage = Tied()
    if kind == "unknown":
        stage.extra = nn.Linear(2, 2)
    if kind == "shape":
        stage.embed = nn.Embedding(5, 2)
        stage.head = nn.Identity()
    if kind == "dtype":
        stage = stage.half()
    if kind == "twice":
        stage.head.weight = nn.Parameter(torch.ones(4, 2))
    with pytest.raises(ConfigError) as caught:
        StagesExporter(stage, whole=whole)
    return f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("unknown", ("extra.weight is not a tensor of the whole model", "merge adapters")),
        ("shape", ("embed.weight is torch.float32 [5, 2] in its stage", "[4, 2] in the whole model")),
        ("dtype", ("torch.float16", "torch.float32")),
        ("twice", ("this rank has embed.weight twice, the second time as head.weight",)),
    ],
)
def test_stage_that_does_not_fit_is_refused_by_name(kind, words):
    found = refused(kind)
    for word in words:
        assert word in found


def incomplete() -> str:
    group = TrainerGroup.connect(CPU, timeout_s=60)
    with torch.device("meta"):
        whole = Experts(range(8))
    exporter = StagesExporter(Experts([0, 1, 2, 3, 4, 5, 6]), whole=whole)
    with pytest.raises(ConfigError) as caught:
        exporter.prepare(group)
    group.close()
    return error_words(caught.value)


def test_tensor_that_no_rank_has_is_named_on_every_rank(ranks):
    for words in ranks.run(incomplete):
        assert "experts.7.up.weight: no trainer rank has the tensor that it comes from" in words
        assert "give one rank's module a tensor of that name" in words
