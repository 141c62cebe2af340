"""The demo from the outside: the model, the processes, the table, the end.

Starts everything as separate processes, exactly as a user would: engines by ``weightcast serve``, trainers as
programs of their own.  Imports neither torch.distributed nor an engine.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

import msgspec

from weightcast.cli.demo import report as reporting
from weightcast.cli.demo import table
from weightcast.cli.demo.children import Child, ChildFailed, Children
from weightcast.cli.demo.placement import EnginePlace, Placement, place
from weightcast.cli.demo.records import Event, ModeRecord, Sample, StepRecord, reward_gain
from weightcast.cli.demo.settings import DemoConfig, Mode
from weightcast.cli.demo.smollm2 import MODEL_NAME, ensure_smollm2, require_packages
from weightcast.cli.render import note, progress, say_json
from weightcast.errors import ConfigError, DeadlineExceeded, EngineFailure

Say = Callable[[str], None]

_TRANSPORTS = {"colocated": "ipc", "disaggregated": "broadcast"}
_POLL_S = 0.1
_LEAVE_S = 60.0

_event_decoder = msgspec.json.Decoder(Event)


def run_demo(config: DemoConfig) -> int:
    """Run every mode, print a row for each step, write the report.

    Rows and summary go to stdout, or to stderr where stdout is to be JSON; progress and errors go to stderr.
    No process is left behind, whatever happens; SIGTERM is treated like Ctrl-C.

    Returns:
        0 if every mode finished and every digest matched, else 1.

    Raises:
        ConfigError: Something is missing; nothing was started.
        ChildFailed: A process failed; the end of its log has been printed.
        EngineFailure, DeadlineExceeded: A process did not do its part in time.
    """
    with _sigterm_as_interrupt():
        return _run(config)


def _run(config: DemoConfig) -> int:
    started_s = time.monotonic()
    say = note if config.as_json else _say_now
    require_packages("transformers", "matplotlib", "fastapi", "uvicorn")
    num_gpus = _num_gpus(config)
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {config.out}: {error.strerror}", hint="choose another --out"
        ) from error
    if config.model is None:
        with progress(f"expanding {MODEL_NAME}") as advance:
            model = ensure_smollm2(advance)
    else:
        model = config.model
    say(f"model: {model}")
    modes = [_run_mode(config, mode, model, place(mode, num_gpus=num_gpus), say) for mode in config.modes]
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
    plot = reporting.write_plot(modes, config.out)
    say("\n" + reporting.summary(result, plot=plot, written=written))
    if config.as_json:
        say_json(result)
    return 0 if result.all_matched else 1


def _run_mode(config: DemoConfig, mode: Mode, model: Path, placement: Placement, say: Say) -> ModeRecord:
    started_s = time.monotonic()
    steps: list[StepRecord] = []
    samples: list[Sample] = []
    with (
        tempfile.TemporaryDirectory(prefix="weightcast-demo-") as scratch,
        Children(config.out / "logs" / mode) as children,
    ):
        urls = _start_engines(children, model, placement)
        say(f"\n{mode}: {placement.trainers} FSDP2 trainer processes, weights over {_TRANSPORTS[mode]}")
        lines = [
            f"{url} tp {each.tp} {_where(placement, each)}" for url, each in zip(urls, placement.engines, strict=True)
        ]
        for line in lines:
            say(f"  engine {line}")
        if placement.note:
            say(f"  {placement.note}")
        trainers = _start_trainers(
            children, _job(config, mode, model, placement, urls, Path(scratch)), placement, Path(scratch)
        )
        try:
            for event in _events(children, trainers[0], config):
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
                note(f"\n--- the end of what {name} said ---\n{tail}\n")
            raise
    if len(steps) != config.steps:
        raise EngineFailure(f"{mode}: the trainer ended after {len(steps)} of {config.steps} steps")
    return ModeRecord(
        mode=mode,
        transport=_TRANSPORTS[mode],
        engines=lines,
        trainers=placement.trainers,
        reward_gain=reward_gain([step.reward for step in steps]),
        seconds=time.monotonic() - started_s,
        steps=steps,
        samples=samples,
    )


def _start_engines(children: Children, model: Path, placement: Placement) -> list[str]:
    ports = _free_ports(len(placement.engines))
    num_ranks = sum(engine.tp for engine in placement.engines)
    for number, (engine, port) in enumerate(zip(placement.engines, ports, strict=True)):
        command = [sys.executable, "-m", "weightcast", "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--tp", str(engine.tp), "--device", placement.device, "--dtype", _engine_dtype(placement)]
        env = _environment(num_ranks)
        if engine.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(_visible_gpus(engine.gpus))
        children.start(f"engine-{number}", command, env=env)
    return [f"http://127.0.0.1:{port}" for port in ports]


def _start_trainers(children: Children, job: bytes, placement: Placement, scratch: Path) -> list[Child]:
    path = scratch / "job.json"
    path.write_bytes(job)
    trainers: list[Child] = []
    for rank in range(placement.trainers):
        command = [sys.executable, "-m", "weightcast.cli.demo.trainer", str(path), str(rank)]
        env = _environment(placement.trainers)
        trainers.append(children.start(f"trainer-{rank}", command, env=env, pipe_stdout=rank == 0))
    return trainers


def _job(
    config: DemoConfig, mode: Mode, model: Path, placement: Placement, urls: Sequence[str], scratch: Path
) -> bytes:
    # Plain data and not the trainer's own class: importing that module would import torch and FSDP here.
    return msgspec.json.encode(
        {
            "model": str(model),
            "engine_urls": list(urls),
            "transport": _TRANSPORTS[mode],
            "world_size": placement.trainers,
            "gpus": list(placement.trainer_gpus),
            "rendezvous": str(scratch / "rendezvous"),
            "wire_dtype": _engine_dtype(placement),
            "steps": config.steps,
            "seed": config.seed,
            "bucket_bytes": config.bucket_bytes,
            "ready_timeout_s": config.ready_timeout_s,
            "step_timeout_s": config.step_timeout_s,
            "grpo": config.grpo,
        }
    )


def _events(children: Children, trainer: Child, config: DemoConfig) -> Iterator[Event]:
    """What the trainer reports, until it closes its stdout; looks after all children while it waits."""
    waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_pump, args=(trainer.output, waiting), daemon=True).start()
    limit_s = config.ready_timeout_s + config.step_timeout_s
    deadline = time.monotonic() + limit_s
    while True:
        try:
            line = waiting.get(timeout=_POLL_S)
        except queue.Empty:
            children.check()
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    who="demo",
                    waiting_for="the next step",
                    timeout_s=limit_s,
                    hint=f"see the logs in {trainer.log.parent}",
                ) from None
            continue
        if line is None:
            return
        yield _event_decoder.decode(line)
        limit_s = 2 * config.step_timeout_s
        deadline = time.monotonic() + limit_s


def _pump(stream: IO[bytes], waiting: queue.SimpleQueue[bytes | None]) -> None:
    for line in stream:
        waiting.put(line)
    waiting.put(None)


def _engine_dtype(placement: Placement) -> str:
    return "bfloat16" if placement.device == "cuda" else "float32"


def _environment(num_processes: int) -> dict[str, str]:
    """This process's environment, with the cores divided among processes that work at the same time."""
    threads = max(1, len(os.sched_getaffinity(0)) // num_processes)
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def _visible_gpus(indices: Sequence[int]) -> list[str]:
    configured = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = configured.split(",") if configured else None
    return [names[index] if names else str(index) for index in indices]


def _where(placement: Placement, engine: EnginePlace) -> str:
    return f"on GPU {', '.join(map(str, engine.gpus))}" if engine.gpus else f"on the {placement.device.upper()}"


def _num_gpus(config: DemoConfig) -> int:
    if config.device == "cpu":
        return 0
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and count == 0:
        raise ConfigError("no CUDA device was found", hint="leave --device out to run on the CPU")
    return count


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


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
    print(text, flush=True)  # at once: a pipe must show each step as it happens
