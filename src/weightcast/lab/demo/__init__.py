"""``weightcast demo``: trains a small real model and updates two engines after every step."""

from __future__ import annotations

from weightcast.lab.demo.console import Console
from weightcast.lab.demo.settings import DemoConfig


def run_demo(config: DemoConfig, console: Console) -> int:
    """Runs the demo; returns 0 only if every mode finished and every digest matched."""
    from weightcast.lab.demo.orchestrate import run_demo as run

    return run(config, console)


__all__ = ["DemoConfig", "run_demo"]
