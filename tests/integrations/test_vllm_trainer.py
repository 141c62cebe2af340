"""vLLM's own trainer-side factory with our engine, in every form that vLLM has had of it.

Once against a real vLLM on this CPU with our receiver in it; and with the trainer's side of each version of vLLM
against our reference engine.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.engines.environment import QUICK, ROOT, engine_python, engine_sources
from tests.engines.test_vllm_cpu import SIZES
from tests.engines.vllm_server import greedy_tokens, vllm
from tests.helpers.engines import engines
from tests.helpers.tiny import greedy, tiny_model, tiny_tokenizer
from tests.integrations.script import run_script
from weightcast.digest.definition import tensor_digest

pytestmark = [pytest.mark.engine_full]

# Versions with the same form of source are neighbours: without ownership, ``held_names``, ``owned_names``.
FORMS = ("0.27.0", "0.28.0", "0.30.0", "0.31.0", "0.33.0")
BEFORE = ("0.25.1", "0.26.0")
PROMPTS = [[5, 6, 7, 8, 9], [100, 50, 20]]
COUNT = 8


def said_by(folder: Path) -> list[list[int]]:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [greedy(model, prompt, COUNT) for prompt in PROMPTS]


def test_factory_updates_vllm(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ABC"]
    for seed, folder in enumerate(folders):
        tiny_model(folder, seed=seed, **SIZES)
        tiny_tokenizer(folder)
    start, *sent = folders
    expected = [said_by(folder) for folder in folders]
    assert expected[0] != expected[2]
    with vllm(start, tmp_path) as engine:
        assert greedy_tokens(engine, PROMPTS, COUNT) == expected[0]
        python = engine_python("vllm-0.32.0-cpu")
        said = run_script(
            python,
            "vllm_run",
            *(*sent, engine.url),
            folder=tmp_path,
            PYTHONPATH=str(ROOT / "src"),
            VLLM_TARGET_DEVICE="cpu",
        )
        assert greedy_tokens(engine, PROMPTS, COUNT) == expected[2]
    assert said["vllm"].startswith("0.32.0")
    assert [report["version"] for report in said["reports"]] == [1, 2]
    assert [row["proof"] for report in said["reports"] for row in report["targets"]] == ["resident", "resident"]
    assert len({report["digest"] for report in said["reports"]}) == 2


def environment_of(version: str) -> dict[str, str]:
    path = [engine_sources("vllm", version), ROOT / "src", QUICK]
    return {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


@pytest.mark.parametrize("version", FORMS)
def test_factory_of_each_version_sends_every_weight(version: str, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ABC"]
    for seed, folder in enumerate(folders):
        tiny_model(folder, seed=seed)
        tiny_tokenizer(folder)
    start, *sent = folders
    python = engine_python("vllm-0.32.0-cpu")
    with engines(start, tmp_path, {}) as (engine,):
        before = engine.digests()
        environment = environment_of(version)
        said = run_script(python, "vllm_run", *(*sent, engine.url), folder=tmp_path, **environment)
        after = engine.digests()
    trained = {
        name: tensor_digest(tensor)
        for name, tensor in load_file(sent[-1] / "model.safetensors").items()
        if name in before  # the engine ties the output layer to the embedding
    }
    assert said["vllm"] in (version, "dev")
    assert after == trained
    assert set(before.values()).isdisjoint(trained.values())
    assert [row["proof"] for report in said["reports"] for row in report["targets"]] == ["resident", "resident"]
    expected = {
        "0.27.0": [],
        "0.28.0": [],
        "0.33.0": ["of its ranks [0, 1], only [1] own", "only this rank's pieces of the tensors"],
    }.get(version, ["held_names() of rank 0 has"])
    assert len(said["refused"]) == len(expected)
    for words, part in zip(said["refused"], expected, strict=True):
        assert part in words


@pytest.mark.parametrize("version", BEFORE)
def test_a_vllm_without_the_factory_is_refused_by_name(version: str, tmp_path: Path) -> None:
    python = engine_python("vllm-0.32.0-cpu")
    done = subprocess.run(
        [python, "-c", "import weightcast.integrations.vllm_trainer"],
        capture_output=True,
        text=True,
        env=os.environ | environment_of(version),
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 1
    assert "ImportError: this vLLM has no trainer-side factory of the form" in done.stderr
    assert "weightcast.WeightUpdater.connect" in done.stderr
