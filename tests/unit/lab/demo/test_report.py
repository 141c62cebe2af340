"""Tests of the demo's report and summary."""

from __future__ import annotations

import json
import threading

import pytest

from tests.helpers.clock import PATIENCE_S
from weightcast.lab.demo import report as reporting
from weightcast.lab.demo import table
from weightcast.lab.demo.records import GradedAnswer, ModeRecord, Sample, StepRecord, reward_gain
from weightcast.lab.demo.waiting import waiting


def step(version, *, reward, matched=4):
    return StepRecord(
        version=version,
        reward=reward,
        update_s=2.5,
        phases={"gather": 0.5, "send": 1.25, "stall": 2.0},
        bytes=500_000_000,
        gb_per_s=0.2,
        stall_s=2.0,
        digests_matched=matched,
        ranks=4,
        digest=f"{version:016x}" if reward else "other",
        generate_s=1.0,
        train_s=1.5,
        logprob_gap=0.001,
        completion_tokens=300,
    )


def mode(name, transport, rewards, **options):
    return ModeRecord(
        mode=name,
        transport=transport,
        engines=["http://127.0.0.1:8000 tp 1 on the CPU"],
        trainers=2,
        reward_gain=reward_gain(rewards),
        seconds=100.0,
        steps=[step(index + 1, reward=reward, **options) for index, reward in enumerate(rewards)],
        samples=[Sample(version=0, question="Why?", answers=[GradedAnswer(text="Because\nof tea", reward=0.25)])],
    )


def report(*modes):
    return reporting.DemoReport(
        command=["weightcast", "demo"],
        seed=7,
        model="SmolLM2-135M-Instruct",
        machine=reporting.machine(),
        versions=reporting.versions(),
        seconds=200.0,
        modes=list(modes),
    )


RISING = [0.2, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]


@pytest.mark.parametrize(
    ("rewards", "gain"), [(RISING, 0.7), ([0.5], 0.0), ([], 0.0), ([0.2, 0.9], 0.7), ([0.9, 0.5, 0.2], -0.7)]
)
def test_gain_is_last_quarter_less_first(rewards, gain):
    assert reward_gain(rewards) == pytest.approx(gain)


def test_report_json_has_the_promised_shape(tmp_path):
    both = report(mode("colocated", "ipc", RISING), mode("disaggregated", "broadcast", RISING))
    written = json.loads(reporting.write_report(both, tmp_path).read_text())
    assert [each["mode"] for each in written["modes"]] == ["colocated", "disaggregated"]
    promised = {"version", "reward", "update_s", "phases", "gb_per_s", "stall_s", "digests_matched", "ranks"}
    for each in written["modes"]:
        assert each["reward_gain"] == pytest.approx(0.7)
        assert promised <= set(each["steps"][0])
    assert written["seed"] == 7
    assert written["command"] == ["weightcast", "demo"]
    assert "torch" in written["versions"]


def test_a_wait_is_announced_at_once_and_told_again():
    lines, told = [], threading.Event()

    def note(line):
        lines.append(line)
        if len(lines) > 2:
            told.set()

    with waiting("engines start", note, interval_s=0.01):
        assert lines[0] == "  engines start"
        assert told.wait(PATIENCE_S)
    count = len(lines)
    assert all(line.startswith("  engines start: ") for line in lines[1:])
    assert len(lines) == count


def files(folder):
    return {"page": folder / "report.html", "written": folder / "report.json"}


def test_success_needs_every_rank_in_every_step():
    assert report(mode("colocated", "ipc", RISING)).all_matched
    assert not report(
        mode("colocated", "ipc", RISING), mode("disaggregated", "broadcast", RISING, matched=3)
    ).all_matched
    assert not report().all_matched


def test_summary_shows_gain_answers_and_where_to_look(tmp_path):
    both = report(mode("colocated", "ipc", RISING), mode("disaggregated", "broadcast", RISING[:1]))
    text = reporting.summary(both, **files(tmp_path))
    assert "gain +0.70" in text
    assert "'Because of tea'" in text
    assert str(tmp_path / "report.html") in text
    assert "every digest matched" in text
    assert "NOT ALL" in reporting.summary(report(mode("colocated", "ipc", RISING, matched=0)), **files(tmp_path))


FLAT = [0.5] * 12


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([0.5, 0.52, 0.55], "3 steps in each mode: enough to show that updates arrive, too few to show learning"),
        ([0.5], "1 step in each mode: enough"),
        (FLAT, "the reward rose by less than 0.2 (colocated): try more --steps"),
    ],
)
def test_summary_says_what_a_run_without_learning_has_shown(rewards, said, tmp_path):
    text = reporting.summary(report(mode("colocated", "ipc", rewards)), **files(tmp_path))
    assert said in text
    assert "every digest matched" in text  # no failure: the updates are what the demo proves
    assert "NOT ALL" not in text


def test_summary_of_a_run_that_learned_or_failed_says_nothing_of_steps(tmp_path):
    text = reporting.summary(report(mode("colocated", "ipc", [*RISING, *RISING[-4:]])), **files(tmp_path))
    assert "show learning" not in text
    assert "more --steps" not in text
    unproven = reporting.summary(report(mode("colocated", "ipc", FLAT, matched=3)), **files(tmp_path))
    assert "NOT ALL" in unproven
    assert "updates arrive" not in unproven


@pytest.mark.parametrize(("second", "said"), [(RISING, True), ([*RISING[:-1], 0.0], False)])
def test_summary_says_if_both_modes_sent_the_same_weights(tmp_path, second, said):
    both = report(mode("colocated", "ipc", RISING), mode("disaggregated", "broadcast", second))
    text = reporting.summary(both, **files(tmp_path))
    assert ("the same weights" in text) is said


def test_rows_line_up_with_the_header():
    row = table.row(step(12, reward=0.5))
    assert len(row) == len(table.header())
    assert "4 of 4" in row
    assert row.split()[:3] == ["12", "0.500", "2.50"]
