"""The programs of ``examples/``: what they print and leave behind, a run that goes on, and a reward that rises."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_model, tiny_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ["rl_colocated", "rl_disaggregated", "rl_disaggregated_async"]

pytestmark = [pytest.mark.example, pytest.mark.timeout(1500)]


def run(name: str, out: Path, *arguments: object, timeout_s: float = 400) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    environment["RAY_memory_monitor_refresh_ms"] = "0"  # it would end our actors for the memory that others use
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", f"--out={out}", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(folder, max_position_embeddings=1024)
    tiny_tokenizer(folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_run_can_be_stopped_and_goes_on(name, tiny, tmp_path):
    settings = (f"--model={tiny}", "--prompts=2", "--group=3", "--max-tokens=6", "--dtype=float32", "--save-every=2")
    run(name, tmp_path, *settings, "--steps=3")
    assert (tmp_path / "last").read_text() == "2"  # the third step was not saved
    said = run(name, tmp_path, *settings, "--steps=4", "--resume")
    rows = metrics(tmp_path)
    assert f"resumed after step 2; engines serve version 2, digest {rows[1]['digest']}" in said
    assert [row["step"] for row in rows] == [1, 2, 3, 3, 4]
    assert all(row["version"] == row["step"] for row in rows)
    for row in rows[3:]:
        assert f"{row['digest']} on 1/1 ranks" in said
    # Engine and trainer have the same weights, so they agree on what was said.
    assert max(row["logprob_gap"] for row in rows if not any(row.get("behind", [0]))) < 1e-3


def test_nothing_older_than_the_bound_is_trained_on(tiny, tmp_path):
    said = run(
        "rl_disaggregated_async",
        tmp_path,
        *(f"--model={tiny}", "--prompts=2", "--group=3", "--max-tokens=6", "--dtype=float32"),
        *("--steps=6", "--save-every=0", "--staleness=1", "--inflight=3"),
    )
    behind = [age for row in metrics(tmp_path) for age in row["behind"]]
    assert len(behind) == 12
    assert max(behind) == 1  # they did not wait for each other, and kept the bound
    assert re.search(r"groups trained on, by versions behind: \{0: \d+, 1: \d+\}, bound 1", said)


@pytest.mark.parametrize("name", NAMES)
def test_the_reward_rises(name, tmp_path):
    from weightcast.lab.demo.smollm2 import ensure_smollm2

    ensure_smollm2(lambda done, total: None)
    run(name, tmp_path, "--save-every=0", timeout_s=1400)
    rewards = [row["reward"] for row in metrics(tmp_path)]
    part = len(rewards) // 4
    assert sum(rewards[-part:]) > sum(rewards[:part]) + 0.1 * part
