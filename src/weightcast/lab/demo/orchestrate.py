"""Runs the demo: prepares the model, starts the processes, prints the table and writes the report.

Engines and trainers are separate processes, started as a user would start them: ``weightcast serve``, and trainer
programs.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import FrameType

import msgspec

from weightcast.errors import ConfigError, EngineFailure
from weightcast.lab.demo import report as reporting
from weightcast.lab.demo import table
from weightcast.lab.demo.children import Child, ChildFailed, Children
from weightcast.lab.demo.console import Console
from weightcast.lab.demo.page import write_page
from weightcast.lab.demo.placement import DemoPlacement, place
from weightcast.lab.demo.processes import TRANSPORTS, describe, start_engines, start_trainers, write_job
from weightcast.lab.demo.records import DemoEvent, ModeRecord, Sample, StepRecord, reward_gain
from weightcast.lab.demo.settings import DemoConfig, Mode
from weightcast.lab.demo.smollm2 import MODEL_NAME, ensure_smollm2, require_packages
from weightcast.lab.demo.waiting import waiting

_LEAVE_S = 60.0


class _Ready(msgspec.Struct):
    """Document that ``weightcast serve --json`` prints when it accepts requests."""

    url: str


_event_decoder = msgspec.json.Decoder(DemoEvent)
_ready_decoder = msgspec.json.Decoder(_Ready)


def run_demo(config: DemoConfig, console: Console) -> int:
    """Runs every mode, prints a row for each step and writes the report.

    Rows and summary go to stdout, or to stderr if stdout shall be JSON; progress and errors go to stderr.
    No process is left behind.  SIGTERM is treated like Ctrl-C.

    Returns:
        0 if every mode finished and every digest matched, else 1.

    Raises:
        ConfigError: A package, GPU or file is missing; no process was started.
        ChildFailed: A process failed; the end of its log has been printed.
        EngineFailure, DeadlineExceeded: A process did not answer or end in time.
    """
    with _sigterm_as_interrupt():
        return _run(config, console)


def _run(config: DemoConfig, console: Console) -> int:
    started_s = time.monotonic()
    say = console.note if config.as_json else _say_now
    require_packages("transformers", "fastapi", "uvicorn")
    num_gpus = _num_gpus(config)
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {config.out}: {error.strerror}", hint="choose another --out"
        ) from error
    if config.model is None:
        with console.progress(f"expanding {MODEL_NAME}") as advance:
            model = ensure_smollm2(advance)
    else:
        model = config.model
    say(f"model: {model}")
    modes = [_run_mode(config, mode, model, place(mode, num_gpus=num_gpus), console, say) for mode in config.modes]
    result = reporting.DemoReport(
        command=sys.argv,
        seed=config.seed,
        model=model.name,
        machine=reporting.machine(),
        versions=reporting.versions(),
        seconds=time.monotonic() - started_s,
        modes=modes,
    )
    written = reporting.write_report(result, config.out)
    page = write_page(result, config.out)
    say("\n" + reporting.summary(result, page=page, written=written))
    if config.as_json:
        console.say_json(result)
    return 0 if result.all_matched else 1


def _run_mode(
    config: DemoConfig, mode: Mode, model: Path, placement: DemoPlacement, console: Console, say: Callable[[str], None]
) -> ModeRecord:
    started_s = time.monotonic()
    steps: list[StepRecord] = []
    samples: list[Sample] = []
    with (
        tempfile.TemporaryDirectory(prefix="weightcast-demo-") as scratch,
        Children(config.out / "logs" / mode) as children,
    ):
        say(f"\n{mode}: {placement.trainers} FSDP2 trainer processes, weights over {TRANSPORTS[mode]}")
        if placement.note:
            say(f"  {placement.note}")
        engines = start_engines(children, model, placement)
        trainers = start_trainers(children, write_job(config, mode, model, placement, Path(scratch)), placement)
        try:
            with waiting("engines and trainers start and load the model", console.note):
                urls = _wait_for_urls(children, engines, timeout_s=config.ready_timeout_s)
            places = [f"{url} {describe(place)}" for url, place in zip(urls, placement.engines, strict=True)]
            for line in places:
                say(f"  engine {line}")
            for trainer in trainers:
                trainer.tell(msgspec.json.encode(urls))
            events = _events(children, trainers[0], timeout_s=4 * config.step_timeout_s)
            with waiting("the trainers connect, and the engines answer the first questions", console.note):
                first = next(events, None)
            for event in chain([] if first is None else [first], events):
                match event:
                    case Sample():
                        samples.append(event)
                        if not steps:
                            say(table.header())
                    case StepRecord():
                        steps.append(event)
                        say(table.row(event))
            children.wait(trainers, timeout_s=_LEAVE_S)
        except ChildFailed as error:
            for name, tail in error.tails.items():
                console.note(f"\n--- last lines of the log of {name} ---\n{tail}\n")
            raise
    if len(steps) != config.steps:
        raise EngineFailure(f"{mode}: the trainer ended after {len(steps)} of {config.steps} steps")
    return ModeRecord(
        mode=mode,
        transport=TRANSPORTS[mode],
        engines=places,
        trainers=placement.trainers,
        reward_gain=reward_gain([step.reward for step in steps]),
        seconds=time.monotonic() - started_s,
        steps=steps,
        samples=samples,
    )


def _wait_for_urls(children: Children, engines: Sequence[Child], *, timeout_s: float) -> list[str]:
    """Waits until the engines serve and returns their URLs, in order."""
    urls: list[str] = []
    for engine in engines:
        document = b""
        while (url := _url_in(document)) is None:
            line = children.read_line(engine, waiting_for="the engine to serve", timeout_s=timeout_s)
            if line is None:
                children.wait([engine], timeout_s=_LEAVE_S)
                raise EngineFailure(f"{engine.name} ended before it served", hint=f"see {engine.log}")
            document += line
        urls.append(url)
    return urls


def _url_in(document: bytes) -> str | None:
    try:
        return _ready_decoder.decode(document).url
    except msgspec.DecodeError:
        return None  # the document is not complete yet


def _events(children: Children, trainer: Child, *, timeout_s: float) -> Iterator[DemoEvent]:
    """Yields the events that a trainer reports, until it closes its stdout."""
    while (line := children.read_line(trainer, waiting_for="the next step", timeout_s=timeout_s)) is not None:
        yield _event_decoder.decode(line)


def _num_gpus(config: DemoConfig) -> int:
    if config.device == "cpu":
        return 0
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and count == 0:
        raise ConfigError("no CUDA device was found", hint="leave --device out to run on the CPU")
    return count


@contextmanager
def _sigterm_as_interrupt() -> Generator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _say_now(text: str) -> None:
    print(text, flush=True)  # a pipe must show each step as it happens
