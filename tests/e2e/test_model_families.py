"""A sharded trainer updates reference engines of each family, and they answer as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from tests.helpers.engines import engines
from tests.helpers.ranks import Ranks
from tests.helpers.tiny import greedy, tiny_model, tiny_tokenizer
from weightcast import WeightUpdater

COUNT = 12
PROMPTS = [[5], [17, 301, 44, 8], list(range(100, 140))]
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_local_experts": 5}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},  # this one and the next: also in test_reference_engine.py
    "qwen3": {},
    "qwen3_moe": EXPERTS,
}


def update(folder: str, urls: list[str], version: int) -> str:
    """Runs one rank of a trainer: FSDP2, and experts divided among the ranks."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        experts = getattr(layer.mlp, "experts", None)
        for name, parameter in list(experts.named_parameters()) if experts is not None else ():
            placed = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(placed))
        fully_shard(layer, mesh=mesh, ignored_params=set(experts.parameters()) if experts is not None else None)
    fully_shard(model, mesh=mesh, ignored_params={p for p in model.parameters() if isinstance(p, DTensor)})
    # Buckets smaller than the embedding, and than the experts of a layer.
    with WeightUpdater.connect(model, urls, bucket_bytes=96 << 10, timeout_s=60.0) as updater:
        return updater.update(version=version).to_json()


def update_fsdp1(folder: str, urls: list[str], version: int) -> str:
    """Runs one rank of a trainer under FSDP1."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu)
    with WeightUpdater.connect(model, urls, bucket_bytes=96 << 10, timeout_s=60.0) as updater:
        return updater.update(version=version).to_json()


@pytest.mark.parametrize("trainer", [update, update_fsdp1], ids=["fsdp2", "fsdp1"])
@pytest.mark.parametrize(
    "family", ["llama", "qwen3_moe", *(pytest.param(name, marks=pytest.mark.wide) for name in ("qwen2", "qwen3"))]
)
def test_engines_answer_as_transformers_after_a_sharded_update(family: str, trainer: Any, tmp_path: Path) -> None:
    a, b = (tiny_model(tmp_path / name, family=family, seed=seed, **FAMILIES[family]) for seed, name in enumerate("ab"))
    tiny_tokenizer(tmp_path / "a")
    before, after = ([greedy(model, prompt, COUNT) for prompt in PROMPTS] for model in (a, b))
    assert all(old != new for old, new in zip(before, after, strict=True))
    with engines(tmp_path / "a", tmp_path, {"tp": 1}, {"tp": 2}) as targets:
        assert [engine.greedy(PROMPTS, COUNT) for engine in targets] == [before, before]
        ranks = Ranks(2)
        try:
            answers = ranks.run(trainer, str(tmp_path / "b"), [engine.url for engine in targets], 3)
        finally:
            ranks.close()
        report = json.loads(answers[0])
        assert [(row["proof"], row["version_after"], row["not_updated"]) for row in report["targets"]] == [
            ("resident", 3, []),
            ("resident", 3, []),
        ]
        assert [engine.greedy(PROMPTS, COUNT) for engine in targets] == [after, after]
