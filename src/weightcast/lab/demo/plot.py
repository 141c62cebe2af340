"""The demo's picture: reward, update time and phases by mode, under a headline with what was proven and where."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from weightcast.lab.demo.records import ModeRecord
from weightcast.lab.demo.report import DemoReport
from weightcast.page.updates import parts_of
from weightcast.report import count_of, format_bytes

# On the CPU both modes sample the same answers; the line styles keep one curve from hiding the other.
_STYLES: dict[str, dict[str, Any]] = {
    "colocated": {"color": "tab:blue", "linewidth": 6, "alpha": 0.4, "solid_capstyle": "round"},
    "disaggregated": {"color": "tab:orange", "linewidth": 1.8, "marker": "o", "markersize": 4},
}
_COLOURS = {
    "open": "tab:gray",
    "gather": "tab:blue",
    "pack": "tab:cyan",
    "send": "tab:orange",
    "commit": "tab:red",
    "recover": "tab:brown",
    "other": "tab:olive",
    "check": "tab:purple",
}
_COPIES = 5


def measure_copy_s(size_bytes: int, *, on_gpu: bool) -> float:
    """The median time of one copy of so many bytes on this machine, which no update can beat, in seconds."""
    import torch

    source = torch.ones(size_bytes, dtype=torch.uint8, device="cuda" if on_gpu else "cpu")
    target = torch.zeros_like(source)
    times: list[float] = []
    for _ in range(_COPIES):
        started_s = time.perf_counter()
        target.copy_(source)
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started_s)
    return sorted(times)[_COPIES // 2]


def headline(report: DemoReport, *, copy_s: float) -> str:
    """Two lines: model, updates and proof; machine, and the share of its limit."""
    steps = [step for mode in report.modes for step in mode.steps]
    proven = sum(step.digests_matched == step.ranks > 0 for step in steps)
    median = sorted(step.update_s for step in steps)[len(steps) // 2]
    gpus = report.machine["gpus"]
    where = f"{report.machine['cores']} CPU cores" if gpus == "none" else gpus
    return (
        f"{report.model}, {format_bytes(steps[0].bytes)}: {proven} of {count_of(len(steps), 'update')} proven on every "
        f"engine rank\n{where}; median update {median:.2f} s, one copy of the same bytes {copy_s:.3f} s "
        f"({copy_s / median:.1%} of it)"
    )


def phases_of(mode: ModeRecord) -> dict[str, float]:
    """Seconds of the mode's median update by phase; the phases follow one another and add up to that update."""
    middle = sorted(mode.steps, key=lambda step: step.update_s)[len(mode.steps) // 2]
    return parts_of(middle.phases, middle.update_s)


def write_plot(report: DemoReport, folder: Path, *, copy_s: float) -> Path:
    """Plots reward and update time by step, and the phases of each mode, into ``plot.png`` and returns its path.

    ``copy_s``, the time of one copy of the model's bytes, is drawn as the limit.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(14, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(headline(report, copy_s=copy_s), fontsize=10)
    rewards, times, phases = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    for mode in report.modes:
        steps = [step.version for step in mode.steps]
        style = {**_STYLES[mode.mode], "label": f"{mode.mode} ({mode.transport})"}
        rewards.plot(steps, [step.reward for step in mode.steps], **style)
        times.plot(steps, [step.update_s for step in mode.steps], **style)
    times.axhline(copy_s, color="tab:gray", linestyle="--", linewidth=1.2, label="limit: one copy of the bytes")
    rewards.set(title="Mean reward of the sampled answers", ylim=(0, 1.02), xlabel="step", ylabel="reward, 0 to 1")
    times.set(title="Time of one weight update, verified", xlabel="step", ylabel="seconds")
    times.set_ylim(bottom=0)
    for axes in (rewards, times):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, loc="best")
        axes.xaxis.get_major_locator().set_params(integer=True)
    _plot_phases(phases, report.modes)
    path = folder / "plot.png"
    figure.savefig(path, dpi=130)
    return path


def _plot_phases(axes: Any, modes: list[ModeRecord]) -> None:
    """Plots the median update of each mode as a column of its phases."""
    names = [mode.mode for mode in modes]
    parts = [phases_of(mode) for mode in modes]
    below = [0.0] * len(modes)
    for phase in parts[0]:
        took = [found[phase] for found in parts]
        axes.bar(names, took, bottom=below, width=0.5, color=_COLOURS[phase], label=phase)
        below = [low + more for low, more in zip(below, took, strict=True)]
    axes.set(title="Phases of the median update", ylabel="seconds", xlim=(-0.5, len(modes) + 0.3))
    axes.grid(axis="y", alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, loc="center right")
