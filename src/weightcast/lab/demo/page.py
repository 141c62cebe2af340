"""The demo's page: reward, time and state of the engines by step, for each mode."""

from __future__ import annotations

import statistics
from pathlib import Path

from weightcast.lab.demo.records import ModeRecord
from weightcast.lab.demo.report import DemoReport
from weightcast.page.charts import Figure, columns, lines
from weightcast.page.document import Chip, Document, Tile
from weightcast.page.svg import of_series
from weightcast.page.updates import engine_lines, phase_columns, stall_lines, versions_served
from weightcast.page.words import digits, seconds, size

_STEP_COLOURS = {"generate": "s2", "train": "s5", "update": "s8"}


def write_page(report: DemoReport, folder: Path) -> Path:
    """Writes ``report.html`` and returns its path."""
    engines = len(report.modes[0].engines)
    page = Document(
        f"{report.model} learns while {engines} engines follow",
        f"GRPO with two FSDP2 trainer processes; every engine gets new weights after every step. Machine: "
        f"{report.machine['cores']} cores, GPUs: {report.machine['gpus']}.",
    )
    page.tiles(_tiles(report))
    page.figures([_reward(report.modes)])
    for mode in report.modes:
        page.heading(f"{mode.mode.capitalize()}: weights over {mode.transport}")
        page.figures(_mode_figures(mode))
        _add_samples(page, mode)
    page.foot(" ".join(report.command), code=True)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    page.foot(f"{report.machine['platform']}; {versions}; seed {report.seed}; {report.seconds:.0f} s in all")
    return page.write(folder / "report.html")


def _tiles(report: DemoReport) -> list[Tile]:
    steps = [step for mode in report.modes for step in mode.steps]
    matched = sum(step.digests_matched == step.ranks > 0 for step in steps)
    copies = sum(step.bytes * step.ranks for step in steps)
    gains = ", ".join(f"{mode.reward_gain:+.2f}" for mode in report.modes)
    return [
        Tile(
            name="proven updates",
            value=f"{matched} of {len(steps)}",
            below="on every rank of every engine",
            mood="good" if report.all_matched else "bad",
        ),
        Tile(name="reward gained", value=gains, below="last quarter of the steps against the first, of 1"),
        Tile(
            name="time of an update",
            value=seconds(statistics.median(step.update_s for step in steps)),
            below=f"median; {size(steps[0].bytes)} to {steps[0].ranks} ranks",
        ),
        Tile(
            name="longest stall",
            value=seconds(max(step.stall_s for step in steps)),
            below="in which an engine generated nothing",
        ),
        Tile(name="weights delivered", value=size(copies), below="copies of the model on all ranks"),
    ]


def _reward(modes: list[ModeRecord]) -> Figure:
    steps = sorted({step.version for mode in modes for step in mode.steps})
    rewards = {f"{mode.mode} ({mode.transport})": {step.version: step.reward for step in mode.steps} for mode in modes}
    same = len(modes) > 1 and len({tuple(found.items()) for found in rewards.values()}) == 1
    return lines(
        "Reward",
        "Mean reward of the answers sampled in each step, 0 to 1."
        + (" Both modes sampled the same answers, so their lines coincide." if same else ""),
        steps,
        {name: [found.get(step) for step in steps] for name, found in rewards.items()},
        colours=of_series(rewards),
        show=digits,
        x_title="step",
        high=1.0,
        wide=True,
    )


def _mode_figures(mode: ModeRecord) -> list[Figure]:
    steps = [step.version for step in mode.steps]
    urls = list(dict.fromkeys(target.url for step in mode.steps for target in step.targets))
    rows = [{target.url: target for target in step.targets} for step in mode.steps]
    parts = {
        "generate": [step.generate_s for step in mode.steps],
        "train": [step.train_s for step in mode.steps],
        "update": [step.update_s for step in mode.steps],
    }
    return [
        phase_columns(steps, [step.phases for step in mode.steps], [step.update_s for step in mode.steps]),
        columns(
            "A whole step",
            "Sampling, training and the update of all engines.",
            steps,
            parts,
            colours=_STEP_COLOURS,
            show=seconds,
            x_title="step",
            wide=False,
        ),
        stall_lines(steps, {url: [row.stall_s if (row := of.get(url)) else None for of in rows] for url in urls}),
        versions_served(
            steps, {url: [(row.status, row.version) if (row := of.get(url)) else None for of in rows] for url in urls}
        ),
        engine_lines(steps, [step.phases for step in mode.steps]),
        lines(
            "Rate",
            "Bytes of one copy of the model, divided by the time of the whole update.",
            steps,
            {"rate": [step.bytes / step.update_s for step in mode.steps]},
            colours={"rate": "s3"},
            show=lambda value: f"{size(value)}/s",
        ),
        lines(
            "Engine against trainer",
            "Mean difference of the sampled tokens' log-probabilities, in nats: small if both have the same weights.",
            steps,
            {"difference": [step.logprob_gap for step in mode.steps]},
            colours={"difference": "s4"},
            show=lambda value: f"{value:.2g}",
            x_title="step",
        ),
    ]


def _add_samples(page: Document, mode: ModeRecord) -> None:
    """Adds the answers before and after training as a table."""
    rows: list[tuple[str | Chip, ...]] = []
    for sample in mode.samples:
        for answer in sample.answers:
            mood = "good" if answer.reward >= 0.9 else "warn" if answer.reward >= 0.3 else "grey"
            words = " ".join(answer.text.split())
            rows.append((f"version {sample.version}", sample.question, words, Chip(f"{answer.reward:.2f}", mood)))
    if rows:
        page.table(("weights", "question", "answer", "reward#"), rows)
