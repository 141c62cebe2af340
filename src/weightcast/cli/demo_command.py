"""``weightcast demo``: the command; what it does is in the package ``demo``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from weightcast.cli.options import Json, Traceback
from weightcast.cli.render import parse_size

if TYPE_CHECKING:
    from weightcast.cli.demo.settings import DeviceChoice, EngineChoice, Mode


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for plot.png, report.json and logs.")] = Path(
        "weightcast-demo"
    ),
    modes: Annotated[
        str, typer.Option(metavar="MODE,MODE", help="Which of colocated (ipc) and disaggregated (broadcast), in order.")
    ] = "colocated,disaggregated",
    steps: Annotated[int, typer.Option(metavar="N", help="Training steps, and so weight updates, in each mode.")] = 14,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the prompts' order and of sampling.")] = 0,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="auto takes GPUs where there are any.")] = "auto",
    engine: Annotated[
        str,
        typer.Option(metavar="reference|vllm", help="weightcast's own engine, or vLLM with its receiver in it."),
    ] = "reference",
    engine_python: Annotated[
        Path | None, typer.Option(metavar="PYTHON", help="A Python that has vLLM; looks for one otherwise.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Hugging Face folder to start from instead of SmolLM2-135M-Instruct."),
    ] = None,
    bucket_bytes: Annotated[
        str, typer.Option("--bucket-bytes", metavar="SIZE", help="Size of one bucket of an update.")
    ] = "64MiB",
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Train a real small model while two engines follow every step, all on this machine.

    Two trainer processes with FSDP2, two engines in processes of their own, GRPO with a reward that a program can
    check; every step's weights go to both engines, verified. Takes some minutes on two cores.

    \b
    weightcast demo
    weightcast demo --steps 4 --modes disaggregated --out /tmp/demo
    weightcast demo --engine vllm --engine-python /opt/vllm/bin/python
    """
    from weightcast.cli.demo import DemoConfig, run_demo

    chosen = tuple(mode.strip() for mode in modes.split(",") if mode.strip())
    config = DemoConfig(
        out=out,
        modes=cast("tuple[Mode, ...]", chosen),
        steps=steps,
        seed=seed,
        device=cast("DeviceChoice", device),
        engine=cast("EngineChoice", engine),
        engine_python=engine_python,
        model=model,
        bucket_bytes=parse_size(bucket_bytes),
        as_json=as_json,
    )
    code = run_demo(config)
    if code:
        raise typer.Exit(code)
