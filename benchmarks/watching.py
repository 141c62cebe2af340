"""Measures what metrics, traces, timelines, log lines and callbacks cost an update, all switched on in both processes.

    python benchmarks/watching.py --rounds 60
    python benchmarks/watching.py --model tiny --rounds 400
    python benchmarks/watching.py --rows benchmarks/results    # all rows that are committed

Updates with and without them take turns in pairs whose order changes.  Both are updates of the same updater into the
same engine, whose listeners are switched off for the one: two updaters have buffers of their own, and may differ by
more than what is measured.  A pause lies between two updates, as a training step would.  On a machine with other work,
the difference of two long updates drowns in noise.  So the processor time of handing events on is also counted by
itself, in both, which noise hardly touches; an update waits for it.  What it takes without a listener is subtracted.
The exit code is 1 if it is more than allowed, or if the whole interval of the updates' difference is.  What is done
later, in a thread of its own (values are counted, spans are made and exported), is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

from weightcast.lab.bench import ours  # noqa: E402
from weightcast.lab.bench.machine import facts  # noqa: E402
from weightcast.lab.bench.methods import Layout, Method, Turn  # noqa: E402
from weightcast.lab.bench.rig import Rig  # noqa: E402
from weightcast.watch import later  # noqa: E402
from weightcast.watch.events import Event  # noqa: E402
from weightcast.watch.listeners import Listener  # noqa: E402
from weightcast.watch.recording import Recording  # noqa: E402
from weightcast.watch.sessions import SessionWatcher  # noqa: E402

_LIMIT_S, _LIMIT_SHARE = 0.001, 0.01
_PAUSE_S = 0.25  # what is done later is done in it
# Model, placement, pairs and pairs before them, by the name of the result.
_ROWS = {
    "watching-cpu-tiny": ("tiny", "colocated", 200, 4),
    "watching-cpu": ("dense-256MiB", "colocated", 200, 2),
    "watching-cpu-1g": ("dense-1GiB", "colocated", 30, 2),
    "watching-cpu-broadcast": ("dense-256MiB", "disaggregated", 60, 2),
    "watching-cpu-broadcast-1g": ("dense-1GiB", "disaggregated", 30, 2),
}
_FIGURES: dict[str, Callable[[Turn], float]] = {
    "processors": lambda turn: turn.extra["trainer_cpu_s"] + turn.extra["engine_cpu_s"],
    "returned": lambda turn: turn.returned_s,
}
_WAITED = ("trainer_listening_s", "engine_listening_s")
_SPENT = (*_WAITED, "trainer_later_s", "trainer_exporting_s", "engine_later_s", "engine_exporting_s")


class Spent:
    """Processor seconds of handing events on in this process, since its start."""

    def __init__(self) -> None:
        self.seconds = {"listening_s": 0.0, "later_s": 0.0, "exporting_s": 0.0}

    def timed(self, name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that does the same and counts its thread's time."""

        def call(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return do(*arguments)
            finally:
                self.seconds[name] += time.thread_time() - began

        return call

    def named(self, role: str) -> dict[str, float]:
        """The seconds by name, for the figures of a turn."""
        return {f"{role}_{name}": seconds for name, seconds in self.seconds.items()}


SPENT, SPENT_SILENT = Spent(), Spent()


class Switch:
    """Switches everything that watches in a process on or off, also the log, spans and timeline that it always has."""

    def __init__(self, watched: Any, *, silent: dict[str, Any], hands: str) -> None:
        """Takes what an object has in place of its attributes when it is silent, and its method that hands on."""
        self._watched = watched
        known = vars(watched)
        call = getattr(watched, hands)
        self._settings = {
            True: {**{name: known[name] for name in silent}, hands: SPENT.timed("listening_s", call)},
            False: {**silent, hands: SPENT_SILENT.timed("listening_s", call)},
        }

    def turn(self, on: bool) -> Spent:
        """Switches, until the next turn; returns where the time is counted."""
        vars(self._watched).update(self._settings[on])
        return SPENT if on else SPENT_SILENT


class Trainer(ours.Trainer):
    """A trainer with every listener."""

    switch: Switch

    def __init__(self, side: Any, **options: Any) -> None:
        super().__init__(side, **options)
        SHARED["trainer"] = self

    def prepare(self) -> None:
        """As ``Trainer.prepare``."""
        super().prepare()
        updater: Any = self._updater
        events = updater._events
        own = dict.fromkeys(events._own, lambda _: None)
        self.switch = Switch(events, silent={"_listeners": (), "_own": own, "recording": Recording()}, hands="emit")

    def listeners(self) -> Sequence[Listener]:
        """Metrics with an exporter, a callback, and a writer like TensorBoard's; ``connect`` adds logs and spans."""
        from weightcast.watch import PrometheusMetrics, to_tensorboard

        switch_on()
        heard: list[Event] = []
        return [PrometheusMetrics(port=0), to_tensorboard(_Writer()), heard.append]

    def update(self, version: int) -> dict[str, float]:
        """As ``Trainer.update``."""
        spent = self.switch.turn(True)
        return super().update(version) | spent.named("trainer")

    def silent_update(self, version: int) -> dict[str, float]:
        """The same without any listener."""
        spent = self.switch.turn(False)
        return super().update(version) | spent.named("trainer")


class Engine(ours.Engine):
    """An engine with every listener."""

    switch: Switch

    def __init__(self, side: Any, **options: Any) -> None:
        super().__init__(side, **options)
        SHARED["engine"] = self

    def prepare(self) -> None:
        """As ``Engine.prepare``."""
        super().prepare()
        served: Any = self._served
        handler = served.engine
        self.switch = Switch(handler._events, silent={"_watchers": ()}, hands="_tell")

    def watchers(self) -> Sequence[SessionWatcher]:
        """Spans and metrics; the log is always there."""
        from prometheus_client import CollectorRegistry

        from weightcast.watch.engine_metrics import EngineMetrics
        from weightcast.watch.spans import EngineSpans

        switch_on()
        return [EngineSpans(), EngineMetrics(CollectorRegistry(), model_name="m", version=0)]

    def update(self, version: int) -> dict[str, float]:
        """As ``Engine.update``.  What comes after the new weights are live counts in the next turn."""
        spent = self.switch.turn(True)
        return super().update(version) | spent.named("engine")

    def silent_update(self, version: int) -> dict[str, float]:
        """The same without any listener."""
        spent = self.switch.turn(False)
        return super().update(version) | spent.named("engine")


SHARED: dict[str, Trainer | Engine] = {}  # of this process


class _Silent:
    """The half of this process once more, silent; the other one is prepared before it."""

    role = ""

    def __init__(self, side: Any, **_: Any) -> None:
        pass

    def prepare(self) -> None:
        """There is nothing to prepare."""

    def update(self, version: int) -> dict[str, float]:
        """One turn without any listener."""
        return SHARED[self.role].silent_update(version)

    def close(self) -> None:
        """The other one closes."""


class SilentTrainer(_Silent):
    """The trainer without any listener."""

    role = "trainer"


class SilentEngine(_Silent):
    """The engine without any listener."""

    role = "engine"


class _Writer:
    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars[tag] = scalar_value


def switch_on() -> None:
    """Gives this process a place for log lines, and an SDK whose exporter writes batches of JSON lines."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
    from opentelemetry.trace import set_tracer_provider

    nowhere = Path(os.devnull).open("w")  # noqa: SIM115  open as long as the process
    logging.basicConfig(stream=nowhere, level=logging.INFO)
    exporter = ConsoleSpanExporter(out=nowhere, formatter=lambda span: span.to_json(indent=None) + "\n")
    export = SPENT.timed("exporting_s", exporter.export)
    # FastAPI makes spans of its own for every request once a process has an SDK; they are not what is measured.
    exporter.export = lambda spans: export([span for span in spans if span.name.startswith("weightcast.")])
    work: Any = later._later
    work.settle = SPENT.timed("later_s", work.settle)
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    set_tracer_provider(provider)


def method(name: str, trainer: str, engine: str, arguments: argparse.Namespace) -> Method:
    transport = "ipc" if arguments.placement == "colocated" else "broadcast"
    options = dict(transport=transport, bucket_bytes=arguments.bucket_mib << 20, verify="resident")
    return Method(name=name, trainer=trainer, engine=engine, options=options, pauses=False)


def measure(arguments: argparse.Namespace) -> tuple[list[Turn], list[Turn]]:
    """Returns the turns without and with everything on; those of one index are a pair."""
    layout = Layout(model=arguments.model, placement=arguments.placement, trainers=1, engines=1, device="cpu")
    everything = method("with", "watching:Trainer", "watching:Engine", arguments)
    without = method("without", "watching:SilentTrainer", "watching:SilentEngine", arguments)
    found: dict[str, list[Turn]] = {without.name: [], everything.name: []}
    with Rig(layout) as rig:
        for one in (everything, without):
            rig.prepare(one, timeout_s=300.0)
        for number in range(arguments.warm + arguments.rounds):
            for one in (without, everything) if number % 2 else (everything, without):
                time.sleep(_PAUSE_S)
                turn, _ = rig.turn(one, timeout_s=300.0)
                if number >= arguments.warm:
                    found[one.name].append(turn)
    return found[without.name], found[everything.name]


def compared(before: Sequence[float], after: Sequence[float]) -> dict[str, float]:
    """Median of both, and the median of the differences of the pairs with its interval of 95 %, by bootstrap."""
    apart = [b - a for a, b in zip(before, after, strict=True)]
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(apart, k=len(apart))) for _ in range(2000))
    base = statistics.median(before)
    return {
        "without_ms": base * 1e3,
        "with_ms": statistics.median(after) * 1e3,
        "difference_ms": statistics.median(apart) * 1e3,
        "least_ms": medians[50] * 1e3,
        "most_ms": medians[-51] * 1e3,
        "allowed_ms": max(_LIMIT_S, _LIMIT_SHARE * base) * 1e3,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dense-256MiB")
    parser.add_argument("--placement", choices=("colocated", "disaggregated"), default="colocated")
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=60, help="pairs of updates; at least 2")
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=Path, metavar="FOLDER", help="measure every row and write one file for each")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    if arguments.rows is None:
        return 0 if show(arguments) else 1
    good = True
    for name, (model, placement, rounds, warm) in _ROWS.items():
        row = dict(model=model, placement=placement, rounds=rounds, warm=warm, out=arguments.rows / f"{name}.json")
        good = show(argparse.Namespace(**{**vars(arguments), **row})) and good
    return 0 if good else 1


def each_ms(turns: Sequence[Turn], name: str) -> float:
    """Milliseconds of an update, of a figure that the turns count up."""
    return (turns[-1].extra[name] - turns[0].extra[name]) / (len(turns) - 1) * 1e3


def show(arguments: argparse.Namespace) -> bool:
    """Measures one case, prints it and writes its file; returns whether watching costs no more than allowed."""
    without, everything = measure(arguments)
    result: dict[str, Any] = {
        name: compared([of(turn) for turn in without], [of(turn) for turn in everything])
        for name, of in _FIGURES.items()
    }
    spent = {name: each_ms(everything, name) for name in _SPENT}
    nobody = sum(each_ms(without, name) for name in _WAITED)
    waited = sum(spent[name] for name in _WAITED) - nobody
    result["spent_ms"] = spent | {
        "without_listeners": nobody,
        "waited_for": waited,
        "allowed": result["returned"]["allowed_ms"],
    }
    print(f"{arguments.model}, {arguments.placement}, {arguments.rounds} pairs; milliseconds of an update")
    for name in _FIGURES:
        row = result[name]
        print(
            f"  {name:<11} without {row['without_ms']:8.3f}   with {row['with_ms']:8.3f}   difference "
            f"{row['difference_ms']:+.3f} ({row['least_ms']:+.3f} to {row['most_ms']:+.3f})   allowed "
            f"{row['allowed_ms']:.3f}"
        )
    parts = "   ".join(f"{name.removesuffix('_s').replace('_', ' ')} {spent[name]:.3f}" for name in _SPENT)
    print(f"  waited for  {waited:.3f}   allowed {result['spent_ms']['allowed']:.3f}")
    print(f"  spent       {parts}   without listeners {nobody:.3f}")
    if arguments.out is not None:
        options = {name: value for name, value in vars(arguments).items() if name not in ("out", "rows")}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"case": options, "machine": facts(), **result}, indent=1) + "\n")
    allowed = result["spent_ms"]["allowed"]
    return waited <= allowed and result["returned"]["least_ms"] <= allowed


if __name__ == "__main__":
    sys.exit(main())
