"""TRL's own ``GRPOTrainer`` with our engines: three steps, every completion on-policy, requests in parallel."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.engines import engines
from tests.helpers.tiny import tiny_model, tiny_tokenizer
from tests.integrations.environment import trainer_python
from tests.integrations.script import run_script
from weightcast.digest.definition import tensor_digest

pytestmark = [pytest.mark.engine_full]


def test_three_steps_of_grpo_are_on_policy(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    for folder, seed in ((model, 2), (other, 1)):  # the engines start on other weights than the trainer's
        tiny_model(folder, seed=seed)
        tiny_tokenizer(folder)
    with engines(other, tmp_path, {}, {}) as started:
        before = started[0].digests()
        # Its requests wait for each other: it fails if they are sent one by one.
        said = run_script(
            trainer_python("trl-1.16.0"),
            "trl_run",
            model,
            tmp_path / "out",
            *(engine.url for engine in started),
            folder=tmp_path,
        )
        after = [engine.digests() for engine in started]
        answered = [engine.info()["version"] for engine in started]

    assert said["trl"] == "1.16.0"
    assert said["versions"] == [0, 1, 2, 3]
    assert len(set(said["digests"])) == 4  # each step changed the weights
    assert answered == [3, 3]
    trained = {
        name: tensor_digest(tensor)
        for name, tensor in load_file(tmp_path / "out" / "trained" / "model.safetensors").items()
    }
    assert after == [trained, trained]
    assert not set(before.values()) & set(trained.values())
    # Engine and trainer agree on every sampled token, in every step.
    assert len(said["gaps"]) == 24
    assert min(said["lengths"]) > 0
    assert max(said["gaps"]) < 1e-3
    assert len(said["rewards"]) == 3
