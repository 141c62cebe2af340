"""vLLM's own trainer-side factory with our engine, against a real vLLM on this CPU with our receiver in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines.environment import ROOT, engine_python
from tests.engines.overlays import overlay
from tests.engines.test_vllm_cpu import SIZES
from tests.engines.vllm_server import greedy_tokens, vllm
from tests.integrations.script import run_script
from tests.tiny import greedy, tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.engine_full]

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
            PYTHONPATH=os.pathsep.join(map(str, (ROOT / "src", overlay(python, "httptools==0.9.0")))),  # for a trainer
            VLLM_TARGET_DEVICE="cpu",
        )
        assert greedy_tokens(engine, PROMPTS, COUNT) == expected[2]
    assert said["vllm"].startswith("0.32.0")
    assert [report["version"] for report in said["reports"]] == [1, 2]
    assert [row["proof"] for report in said["reports"] for row in report["targets"]] == ["resident", "resident"]
    assert len({report["digest"] for report in said["reports"]}) == 2
