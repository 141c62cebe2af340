"""`weightcast demo`: a real small model, trained while two engines follow every step.

Orchestration, training, the task and the report live here; moving weights does not.
"""

from __future__ import annotations

from weightcast.cli.demo.settings import DemoConfig


def run_demo(config: DemoConfig) -> int:
    """Run the demo and print it; see ``orchestrate.run_demo``.

    Returns:
        The exit code: 0 only if every mode finished and every digest matched.
    """
    from weightcast.cli.demo.orchestrate import run_demo as run

    return run(config)


__all__ = ["DemoConfig", "run_demo"]
