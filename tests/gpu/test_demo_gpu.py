"""``weightcast demo`` as a user runs it on a machine with GPUs, with a small random model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.tiny import tiny_model, tiny_tokenizer

STEPS = 3

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_the_demo_uses_the_gpus(tmp_path, record):
    tiny_model(tmp_path / "model", tie_word_embeddings=True, hidden_size=192, num_hidden_layers=4)
    tiny_tokenizer(tmp_path / "model")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "weightcast", "demo", "--steps", str(STEPS), "--model", str(tmp_path / "model")]
    env = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2] / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [*command, "--out", str(out)], env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads((out / "report.json").read_text())
    record("report", report)
    assert "every digest matched" in done.stdout
    modes = {mode["mode"]: mode for mode in report["modes"]}
    assert set(modes) == {"colocated", "disaggregated"}
    assert all("on GPU" in engine for engine in modes["colocated"]["engines"])
    if torch.cuda.device_count() > 1:
        assert all("on GPU" in engine for engine in modes["disaggregated"]["engines"])
    for mode in modes.values():
        assert [step["version"] for step in mode["steps"]] == list(range(1, STEPS + 1))
        assert all(step["digests_matched"] == step["ranks"] > 0 for step in mode["steps"])
        # The engines compute in bf16, the trainer in its own dtype: near, and far from what stale weights would give.
        assert all(step["logprob_gap"] < 0.5 for step in mode["steps"])
