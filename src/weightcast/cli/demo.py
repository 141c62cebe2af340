"""``weightcast demo``: the command; the demo itself is in ``weightcast.lab.demo``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from weightcast.cli import render
from weightcast.cli.options import Json, Traceback

if TYPE_CHECKING:
    from weightcast.lab.demo.settings import DeviceChoice, Mode

_STEPS = 12
_QUICK_STEPS = 3


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for report.html, report.json and logs.")] = Path(
        "weightcast-demo"
    ),
    modes: Annotated[
        str,
        typer.Option(metavar="MODE,MODE", help="Modes to run, in order: colocated (ipc), disaggregated (broadcast)."),
    ] = "colocated,disaggregated",
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=f"Training steps in each mode; each is followed by a weight update. "
            f"[default: {_STEPS}, or {_QUICK_STEPS} with --quick]",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Fewer training steps in each mode: enough to show updates, and too few to show learning."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed of the prompts' order and of sampling.")] = 0,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="auto uses GPUs if there are any.")] = "auto",
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Hugging Face model folder to use instead of SmolLM2-135M-Instruct."),
    ] = None,
    bucket_bytes: Annotated[
        str, typer.Option("--bucket-bytes", metavar="SIZE", help="Size of one bucket of an update.")
    ] = "64MiB",
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Trains a small real model on this machine and updates two engines after every step.

    Two processes train with FSDP2 and GRPO; a program computes the reward. Two engines generate the rollouts in
    processes of their own. Each step's weights are sent to both engines and verified. The demo takes some minutes on
    two cores.

    \b
    weightcast demo
    weightcast demo --quick
    weightcast demo --steps 4 --modes disaggregated --out /tmp/demo
    """
    from weightcast.lab.demo import DemoConfig, run_demo

    chosen = tuple(mode.strip() for mode in modes.split(",") if mode.strip())
    config = DemoConfig(
        out=out,
        modes=cast("tuple[Mode, ...]", chosen),
        steps=steps if steps is not None else _QUICK_STEPS if quick else _STEPS,
        seed=seed,
        device=cast("DeviceChoice", device),
        model=model,
        bucket_bytes=render.parse_size(bucket_bytes),
        as_json=as_json,
    )
    code = run_demo(config, render)
    if code:
        raise typer.Exit(code)
