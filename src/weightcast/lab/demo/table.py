"""Text of the demo's table: a header, and one line for each step."""

from __future__ import annotations

from weightcast.lab.demo.records import StepRecord

_PHASES = ("gather", "pack", "send", "load", "verify", "commit")


def header() -> str:
    """Returns the names of the columns; the phases of an update overlap."""
    phases = "".join(f"{name:>8}" for name in _PHASES)
    return f"{'version':>7}{'reward':>8}{'update s':>10}{phases}{'GB/s':>8}{'digests':>10}{'stall s':>9}{'step s':>8}"


def row(step: StepRecord) -> str:
    """Returns the line of one step."""
    phases = "".join(f"{step.phases[name]:8.2f}" if name in step.phases else f"{'-':>8}" for name in _PHASES)
    digests = f"{step.digests_matched} of {step.ranks}"
    step_s = step.generate_s + step.train_s + step.update_s
    return (
        f"{step.version:7d}{step.reward:8.3f}{step.update_s:10.2f}{phases}"
        f"{step.gb_per_s:8.2f}{digests:>10}{step.stall_s:9.2f}{step_s:8.1f}"
    )
