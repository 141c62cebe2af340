"""Results of the demo: ``report.json`` and a summary as text."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import msgspec

from weightcast.lab.demo.records import ModeRecord, Sample
from weightcast.report import count_of, format_bytes
from weightcast.version import __version__

# The default number of steps, and less than what SmolLM2's reward gained in them in any run.
_LEARNING_STEPS = 12
_USUAL_GAIN = 0.2


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``report.json``.

    Attributes:
        machine: Processor, cores and GPUs.
        modes: Modes, in the order in which they ran.
    """

    command: list[str]
    seed: int
    model: str
    machine: dict[str, str]
    versions: dict[str, str]
    seconds: float
    modes: list[ModeRecord]

    @property
    def all_matched(self) -> bool:
        """True if there was a step, and every engine rank matched in every step."""
        steps = [step for mode in self.modes for step in mode.steps]
        return bool(steps) and all(step.digests_matched == step.ranks > 0 for step in steps)


def versions() -> dict[str, str]:
    """Returns the versions of Python, weightcast and the main packages."""
    found = {"python": platform.python_version(), "weightcast": __version__}
    for package in ("torch", "transformers", "safetensors"):
        found[package] = importlib.metadata.version(package)
    return found


def machine() -> dict[str, str]:
    """Returns the processor, the number of cores that this process may use, and the GPUs."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(len(os.sched_getaffinity(0))),
        "gpus": ", ".join(gpus) or "none",
    }


def write_report(report: DemoReport, folder: Path) -> Path:
    """Writes ``report.json`` and returns its path."""
    path = folder / "report.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return path


def summary(report: DemoReport, *, page: Path, written: Path) -> str:
    """Returns the summary that the demo prints last."""
    lines: list[str] = []
    for mode in report.modes:
        lines += _mode_lines(mode)
    proven = "every digest matched" if report.all_matched else "NOT ALL DIGESTS MATCHED"
    digests = [[step.digest for step in mode.steps] for mode in report.modes]
    if len(digests) > 1 and all(each == digests[0] for each in digests):
        lines.append("every version has the same digest in both modes: both transports moved the same weights")
    num_updates = sum(len(mode.steps) for mode in report.modes)
    lines += [
        f"{count_of(num_updates, 'update')} in {report.seconds:.0f} s, {proven}, seed {report.seed}",
        *_learning_lines(report),
        "",
        f"  {page}   reward, time and engines by step: open it in a browser",
        f"  {written}   every number above",
        f"  {written.parent / 'logs'}   log of each process, with the update report of each step",
        "",
        "next:",
        "  weightcast serve MODEL --tp 3                        start your own engine",
        "  weightcast push CHECKPOINT --to URL --version 7      send new weights to it while it runs",
        "  weightcast verify CHECKPOINT --at URL                prove that it serves them",
    ]
    return "\n".join(lines)


def sample_lines(sample: Sample) -> list[str]:
    """Formats the answers of one version with their rewards."""
    answers = [f"    {answer.reward:.2f}  {' '.join(answer.text.split())!r}" for answer in sample.answers]
    return [f"  version {sample.version} on {sample.question!r}", *answers]


def _learning_lines(report: DemoReport) -> list[str]:
    """Says what a proven run has shown in which the reward hardly rose; otherwise there is nothing to say."""
    weak = [mode for mode in report.modes if mode.reward_gain < _USUAL_GAIN]
    if not weak or not report.all_matched:
        return []
    num_steps = max(len(mode.steps) for mode in weak)
    if num_steps < _LEARNING_STEPS:
        return [
            f"{count_of(num_steps, 'step')} in each mode: enough to show that updates arrive, too few to show learning",
            f"{_LEARNING_STEPS} steps, the default, show it with SmolLM2: weightcast demo without --quick",
        ]
    names = " and ".join(mode.mode for mode in weak)
    return [f"the updates arrived, and the reward rose by less than {_USUAL_GAIN} ({names}): try more --steps"]


def _mode_lines(mode: ModeRecord) -> list[str]:
    rewards = [step.reward for step in mode.steps]
    quarter = max(1, len(rewards) // 4)
    first, last = sum(rewards[:quarter]) / quarter, sum(rewards[-quarter:]) / quarter
    times = sorted(step.update_s for step in mode.steps)
    median = times[len(times) // 2]
    size = format_bytes(mode.steps[0].bytes)
    ranks = mode.steps[0].ranks
    lines = [
        f"{mode.mode} ({mode.transport}): reward {first:.2f} -> {last:.2f}, gain {mode.reward_gain:+.2f}",
        f"  {size} to {count_of(ranks, 'engine rank')} in {median:.2f} s (median of {count_of(len(times), 'update')})",
    ]
    for sample in mode.samples:
        lines += sample_lines(sample)
    return [*lines, ""]
