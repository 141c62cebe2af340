"""The demo with a tiny model: every process is real, only the weights are small and random.

Those of ``make test`` are forked from one that has imported everything; the others start as a user starts them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers import commands
from tests.helpers.clock import PATIENCE_S
from tests.helpers.commands import COMMAND
from tests.helpers.pages import check_alone
from tests.helpers.tiny import tiny_model, tiny_tokenizer

STEPS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo-model")
    tiny_model(folder, tie_word_embeddings=True)
    tiny_tokenizer(folder)
    return folder


def run(*arguments):
    """From start to end."""
    return commands.run(COMMAND, "demo", "--device", "cpu", *map(str, arguments), timeout_s=600)


def start(*arguments):
    """As a user does."""
    command = [sys.executable, "-m", "weightcast", "demo", "--device", "cpu", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def descendants(process):
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert alive == []


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    demo = run("--steps", STEPS, "--model", model, "--out", out)
    assert demo.returncode == 0, demo.stderr
    return out, demo.stdout


def test_both_modes_end_with_every_digest_matched_on_every_rank(finished):
    out, _ = finished
    report = json.loads((out / "report.json").read_text())
    assert [(mode["mode"], mode["transport"]) for mode in report["modes"]] == [
        ("colocated", "ipc"),
        ("disaggregated", "broadcast"),
    ]
    for mode in report["modes"]:
        assert [step["version"] for step in mode["steps"]] == list(range(1, STEPS + 1))
        assert [(step["digests_matched"], step["ranks"]) for step in mode["steps"]] == [(4, 4)] * STEPS
        assert [sample["version"] for sample in mode["samples"]] == [0, STEPS]


def test_the_trainer_computes_the_log_probabilities_that_the_engines_report(finished):
    # Both engines, tp 1 and tp 3, after both transports: other weights on either side would show here.
    out, _ = finished
    steps = [step for mode in json.loads((out / "report.json").read_text())["modes"] for step in mode["steps"]]
    assert all(step["completion_tokens"] > 100 for step in steps)
    assert max(step["logprob_gap"] for step in steps) < 1e-3


def test_page_shows_both_modes_and_every_step(finished):
    out, stdout = finished
    assert str(out / "report.html") in stdout
    html = (out / "report.html").read_text()
    check_alone(html)
    assert f"{2 * STEPS} of {2 * STEPS}" in html  # proven updates
    for words in (
        "Colocated: weights over ipc",
        "Disaggregated: weights over broadcast",
        "Versions by engine",
        "Reward",
    ):
        assert words in html
    report = json.loads((out / "report.json").read_text())
    for mode in report["modes"]:
        for step in mode["steps"]:
            assert [(row["status"], row["version"]) for row in step["targets"]] == [("serving", step["version"])] * 2
            for row in step["targets"]:
                label = row["url"].removeprefix("http://")
                assert f"{label}\nstep {step['version']}: serving, version {step['version']}" in html


def test_rows_summary_and_logs(finished):
    out, stdout = finished
    rows = [line for line in stdout.splitlines() if "4 of 4" in line]
    assert len(rows) == 2 * STEPS
    assert "every digest matched" in stdout
    assert str(out / "report.html") in stdout
    for mode in ("colocated", "disaggregated"):
        logs = out / "logs" / mode
        assert {path.name for path in logs.iterdir()} == {
            "engine-0.log",
            "engine-1.log",
            "trainer-0.log",
            "trainer-1.log",
        }
        assert f"version {STEPS}" in (logs / "trainer-1.log").read_text()


@pytest.mark.wide
def test_sigterm_in_the_middle_leaves_no_process(model, tmp_path):
    with start("--steps", 1000, "--modes", "disaggregated", "--model", model, "--out", tmp_path) as demo:
        assert demo.stdout is not None
        while "4 of 4" not in (line := demo.stdout.readline()):
            assert line, "the demo ended before its first step"
        started = descendants(demo)
        assert len(started) >= 8  # two trainers, two engines, three ranks, the reaper
        demo.send_signal(signal.SIGTERM)
        demo.communicate(timeout=PATIENCE_S)
    assert demo.returncode == 130
    assert_gone(started)


@pytest.mark.wide  # test_demo_children.py has it in small
def test_an_engine_that_is_killed_ends_the_demo_with_its_name(model, tmp_path):
    with start("--steps", 1000, "--modes", "colocated", "--model", model, "--out", tmp_path) as demo:
        assert demo.stdout is not None
        while "4 of 4" not in (line := demo.stdout.readline()):
            assert line, "the demo ended before its first step"
        started = descendants(demo)
        # Ranks are forked, so that their command line is the server's.
        serving = {process.pid: process for process in started if {"serve", "3"} <= set(process.cmdline())}
        [engine] = [process for process in serving.values() if process.ppid() not in serving]
        engine.kill()
        _, stderr = demo.communicate(timeout=PATIENCE_S)
    assert demo.returncode == 1
    assert "engine-1 was ended by SIGKILL" in stderr
    assert_gone(started)


def test_an_engine_that_cannot_start_shows_its_own_words(tmp_path):
    folder = tmp_path / "model"
    tiny_model(folder, num_attention_heads=8, num_key_value_heads=8)  # no 3 ranks for 8 heads
    tiny_tokenizer(folder)
    demo = run("--steps", 1, "--model", folder, "--out", tmp_path / "out")
    assert demo.returncode == 1
    assert "last lines of the log of engine-1" in demo.stderr
    assert "8" in demo.stderr.split("last lines of the log of engine-1")[1]
    assert "error: engine-1 ended with exit code 2" in demo.stderr
    assert not (tmp_path / "out" / "report.json").exists()
