"""A model under DeepSpeed's real ZeRO stage 3 into an engine: stacked experts, two training steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.engines import engines
from tests.helpers.tiny import greedy, tiny_model, tiny_tokenizer
from tests.integrations.environment import trainer_python
from tests.integrations.script import run_script
from weightcast.digest.definition import tensor_digest

pytestmark = [pytest.mark.engine_full]

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
PROMPT = [5, 17, 99, 3, 250]


def test_partitioned_weights_arrive_whole_after_each_step(tmp_path: Path) -> None:
    folder, other = tmp_path / "model", tmp_path / "other"
    model = tiny_model(folder, family="qwen3_moe", seed=2, **EXPERTS)
    tiny_model(other, family="qwen3_moe", seed=1, **EXPERTS)
    tiny_tokenizer(other)
    with engines(other, tmp_path, {}) as (engine,):
        said = run_script(
            trainer_python("deepspeed-0.19.8"),
            "zero3_run",
            *(folder, engine.url),
            folder=tmp_path,
            DS_ACCELERATOR="cpu",
        )
        after = engine.digests()
        (answer,) = engine.greedy([PROMPT], 12)
        version = engine.info()["version"]

    assert said["deepspeed"] == "0.19.8"
    assert said["proofs"] == ["resident", "resident"]
    assert len(set(said["digests"])) == 2
    assert version == 2
    trained = load_file(folder / "trained" / "model.safetensors")
    assert after == {name: tensor_digest(tensor) for name, tensor in trained.items()}
    started = load_file(folder / "model.safetensors")
    assert not any(after[name] == tensor_digest(tensor) for name, tensor in started.items())
    assert answer == greedy(type(model).from_pretrained(folder / "trained").float().eval(), PROMPT, 12)
