"""``weightcast bench soak``: updates under load for as long as asked, with faults at random."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weightcast.cli.options import Json, Traceback
from weightcast.cli.render import note, parse_size, say, say_json
from weightcast.errors import ConfigError

if TYPE_CHECKING:
    from weightcast.cli.soaking.run import Result


def soak(
    updates: Annotated[int, typer.Option(metavar="N", help="Updates that have to succeed.", min=1)] = 100,
    seconds: Annotated[float, typer.Option(metavar="S", help="Go on at least this long.", min=0)] = 0.0,
    model: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Hugging Face model; a random one of 300 thousand parameters by default."),
    ] = None,
    engines: Annotated[int, typer.Option(metavar="N", help="Engines to start.", min=1)] = 2,
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="Tensor-parallel ranks of each.", min=1)] = 1,
    clients: Annotated[int, typer.Option(metavar="N", help="Requests always under way.", min=1)] = 4,
    fault_rate: Annotated[
        float, typer.Option("--fault-rate", metavar="P", help="Part of the updates that are hit.", min=0, max=1)
    ] = 0.1,
    seed: Annotated[int, typer.Option(metavar="N", help="Of faults, ways, modes and prompts.")] = 0,
    bucket_bytes: Annotated[str, typer.Option("--bucket-bytes", metavar="SIZE", help="Size of one bucket.")] = "256KiB",
    timeout: Annotated[float, typer.Option(metavar="S", help="Deadline of each single wait, in seconds.")] = 30.0,
    logs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the processes' logs go; thrown away by default.")
    ] = None,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Update engines again and again while they generate, and hit them: kill the trainer, kill an engine and start it
    again, abort, flip a bit. Starts its own engines, on the CPU.

    Transport and pause mode change at random. After each update every engine's weights are compared with those of the
    version that it serves; answers are recomputed with the weights of the versions that they claim. The exit code is 0
    only if nothing hung, nothing was mixed, nothing failed by itself and nothing was left behind.

    \b
    weightcast bench soak --updates 1000 --seed 7
    weightcast bench soak --seconds 3600 --model ./SmolLM2-135M-Instruct --fault-rate 0.02 --json
    """
    size_bytes = parse_size(bucket_bytes)
    try:
        from weightcast.cli.soaking.run import Plan, Soak
        from weightcast.cli.soaking.versions import make_tiny_model
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a soak needs {error.name}, which is not installed", hint='pip install "weightcast[serve]"'
        ) from error
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError(f"{model} is no model folder: it has no config.json", hint="leave --model out for a tiny one")
    with tempfile.TemporaryDirectory(prefix="weightcast-soak-") as scratch:
        folder = logs or Path(scratch) / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        if model is None:
            model = Path(scratch) / "model"
            make_tiny_model(model)
        plan = Plan(
            model=model,
            updates=updates,
            seconds=seconds,
            engines=engines,
            tp=tp,
            clients=clients,
            fault_rate=fault_rate,
            seed=seed,
            bucket_bytes=size_bytes,
            timeout_s=timeout,
            folder=folder,
        )
        with Soak(plan, _show_progress) as running:
            result = running.run()
    if as_json:
        say_json({"ok": result.ok, **_fields(result)})
    else:
        _show(result)
    if not result.ok:
        raise typer.Exit(1)


def _fields(result: Result) -> dict[str, object]:
    return {name: getattr(result, name) for name in result.__struct_fields__}


def _show_progress(done: int, wanted: int) -> None:
    if done % 50 == 0 and done:
        note(f"{done} of {wanted} updates")


def _show(result: Result) -> None:
    for name, value in _fields(result).items():
        if name != "details":
            shown = ", ".join(f"{key} {count}" for key, count in value.items()) if isinstance(value, dict) else value
            say(f"{name.replace('_', ' '):24} {shown if shown != [] else 'none'}")
    for words in result.details:
        note(f"error: {words}")
