"""``weightcast bench soak``: repeats updates under load, with random faults."""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weightcast.cli.options import FAILURE, UNWRITTEN, HtmlFile, Json, Traceback, check_writable
from weightcast.cli.render import note, parse_size, say, say_json, write_beside
from weightcast.errors import ConfigError
from weightcast.report import count_of

if TYPE_CHECKING:
    from weightcast.lab.soak.result import Result


_INTERVAL_S = 10.0


def soak(
    updates: Annotated[int, typer.Option(metavar="N", help="Number of updates that must succeed.", min=1)] = 100,
    seconds: Annotated[float, typer.Option(metavar="S", help="Shortest running time, in seconds.", min=0)] = 0.0,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Hugging Face model folder; the default is a random model of 300,000 parameters."
        ),
    ] = None,
    engines: Annotated[int, typer.Option(metavar="N", help="Number of engines to start.", min=1)] = 2,
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="Tensor-parallel ranks of each engine.", min=1)] = 1,
    clients: Annotated[int, typer.Option(metavar="N", help="Number of requests kept running.", min=1)] = 4,
    fault_rate: Annotated[
        float, typer.Option("--fault-rate", metavar="P", help="Share of updates that get a fault.", min=0, max=1)
    ] = 0.1,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Random seed of the faults, transports, pause modes and prompts.")
    ] = 0,
    bucket_bytes: Annotated[str, typer.Option("--bucket-bytes", metavar="SIZE", help="Size of one bucket.")] = "256KiB",
    timeout: Annotated[float, typer.Option(metavar="S", help="Deadline of each single wait, in seconds.")] = 30.0,
    logs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for the processes' logs; deleted by default.")
    ] = None,
    html: HtmlFile = None,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Updates engines repeatedly while they generate, and injects random faults. It starts its own engines on the CPU.

    A fault kills the trainer, kills an engine and restarts it, aborts the update, or flips a bit. Transport and pause
    mode are chosen at random. After each update the command compares every engine's weights with the version that it
    serves. It also recomputes answers with the weights of the versions that they claim.

    The exit code is 0 only if there was no hang, no mixed weights, no failure without a fault and no leak.

    \b
    weightcast bench soak --updates 1000 --seed 7
    weightcast bench soak --seconds 3600 --model ./SmolLM2-135M-Instruct --fault-rate 0.02 --json
    """
    size_bytes = parse_size(bucket_bytes)
    if html is not None:
        check_writable(html)
    try:
        from weightcast.lab.soak.page import write_soak_page
        from weightcast.lab.soak.result import Plan
        from weightcast.lab.soak.run import Soak
        from weightcast.lab.soak.versions import make_tiny_model
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"`bench soak` needs {error.name}, which is not installed", hint='pip install "weightcast[serve]"'
        ) from error
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError(
            f"--model {model} is not a model folder: it has no config.json",
            hint="leave --model out to use a tiny random model",
        )
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
        of = f"of {updates} updates" + (f" and of {seconds:.0f} s" if seconds else "")
        note(f"starting {count_of(engines, 'engine')} and the trainer; logs in {folder}")
        with Soak(plan, _Progress(of)) as running:
            result = running.run()
    if as_json:
        say_json({"ok": result.ok, **_fields(result)})
    else:
        _show(result)
    written = True
    if html is not None:
        page = partial(write_soak_page, _fields(result), ok=result.ok, command=shlex.join(sys.argv))
        written = write_beside(html, page, "open it in a browser")
    if not result.ok:
        raise typer.Exit(FAILURE)
    if not written:
        raise typer.Exit(UNWRITTEN)


def _fields(result: Result) -> dict[str, object]:
    return {name: getattr(result, name) for name in result.__struct_fields__}


class _Progress:
    """Shows the number of updates: the first one, and then the number every ten seconds."""

    def __init__(self, of: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._of = of
        self._clock = clock
        self._started = clock()
        self._next = 0.0

    def __call__(self, done: int, wanted: int) -> None:
        now = self._clock()
        if done and now >= self._next:
            self._next = now + _INTERVAL_S
            note(f"{done} {self._of}, {now - self._started:.0f} s")


def _show(result: Result) -> None:
    for name, value in _fields(result).items():
        if name != "details":
            shown = ", ".join(f"{key} {count}" for key, count in value.items()) if isinstance(value, dict) else value
            say(f"{name.replace('_', ' '):24} {shown if shown not in ('', []) else 'none'}")
    for words in result.details:
        note(f"error: {words}")
