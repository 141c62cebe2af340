"""The soak: updates under load with random faults, and an inspection of every engine after each update.

Any engine but the first may die at any moment.  The first one lives to the end, so that its memory can be compared
over the whole time.  This module prints nothing.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Literal

import msgspec

from weightcast.errors import DeadlineExceeded, EngineFailure
from weightcast.lab.soak.inspector import Inspector, Tally
from weightcast.lab.soak.leaks import Series, buffers_of, segments_of, still_there
from weightcast.lab.soak.load import Judge, Load, mode_counts
from weightcast.lab.soak.processes import Reaper, Running, session_of
from weightcast.lab.soak.result import Plan, Result
from weightcast.lab.soak.trainer import Order, Outcome
from weightcast.lab.soak.versions import Versions

Fault = Literal["none", "kill trainer", "kill engine", "abort", "corrupt"]
FAULTS: tuple[Fault, ...] = ("kill trainer", "kill engine", "abort", "corrupt")
_START_S = 180.0
_LATEST_KILL_S = 0.4
_FREE_S = 60.0
_SAMPLE_EVERY = 5
_MARGIN = 3  # deadlines of single waits that one update may use up, one after another


@dataclass(slots=True)
class _Engine:
    """One engine slot; its process is replaced after a kill, and its URL is empty until it answers again."""

    number: int
    running: Running
    series: Series
    url: str = ""
    version: int = 0


class Soak:
    """Runs engines, trainer and load; a context manager that leaves no process running."""

    def __init__(self, plan: Plan, on_progress: Callable[[int, int], None]) -> None:
        """Starts engines, trainer and load.

        Raises:
            EngineFailure, DeadlineExceeded: Something did not start.
        """
        self._plan = plan
        self._on_progress = on_progress
        self._random = random.Random(plan.seed)
        self._stack = ExitStack()
        self._segments: set[str] = set()
        self._tally = Tally()
        self._faults: Counter[str] = Counter()
        self._transports: Counter[str] = Counter()
        self._left = self._buffers = 0
        self._updates = self._attempts = self._engines_started = self._trainers_started = 0
        self._modes: dict[int, str] = {}
        self._series: list[Series] = []
        try:
            self._reaper = Reaper()
            self._stack.callback(self._reaper.close)
            versions = Versions(plan.model)
            self._inspector = Inspector(versions, self._tally, idle_within_s=_FREE_S)
            self._engines = [self._start_engine(number) for number in range(plan.engines)]
            self._stack.callback(self._stop_engines)
            self._trainer: Running | None = self._start_trainer()
            self._stack.callback(self._stop_trainer)
            for engine in self._engines:
                self._meet(engine)
            assert self._trainer is not None
            self._trainer.hear(waiting_for="its start", timeout_s=_START_S)
            self._judge = Judge(Versions(plan.model), self._modes)
            vocab = int(getattr(versions.model.config, "vocab_size"))  # noqa: B009  transformers' own typing
            self._load = Load(
                lambda: [engine.url for engine in self._engines if engine.url],
                self._judge,
                clients=plan.clients,
                vocab=vocab,
                seed=plan.seed,
                timeout_s=_FREE_S,
            )
            self._stack.callback(self._load.stop)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self) -> Result:
        """Repeats updates until enough have succeeded, then inspects the engines and counts the leaks."""
        plan, started, version = self._plan, time.monotonic(), 0
        while self._updates < plan.updates or time.monotonic() - started < plan.seconds:
            version += 1
            fault: Fault = "none"
            if self._random.random() < plan.fault_rate:
                fault = self._random.choice(FAULTS if len(self._standing) > 1 else ("kill trainer", "abort", "corrupt"))
            self._update(version, fault)
            if version % _SAMPLE_EVERY == 0:
                self._take_samples(version)
            self._on_progress(self._updates, plan.updates)
        seconds = time.monotonic() - started
        self._load.stop()
        self._judge.finish()
        self._stop_trainer()
        for engine in self._standing:
            self._buffers += buffers_of(engine.running.pid)
            self._inspect(engine, {engine.version})
        growing = [f"{series.name}: {series.leaks}" for series in self._series if series.leaks]
        first = self._series[0]
        self._stop_engines()
        return Result(
            updates=self._updates,
            attempts=self._attempts,
            seconds=round(seconds, 1),
            faults=dict(sorted(self._faults.items())),
            transports=dict(sorted(self._transports.items())),
            modes=mode_counts(self._modes),
            engines_started=self._engines_started,
            trainers_started=self._trainers_started,
            answers=self._load.asked - self._load.dropped,
            answers_dropped=self._load.dropped,
            answers_checked=self._judge.checked,
            answers_spanning=self._judge.spanning,
            hangs=self._tally.hangs + self._load.hangs,
            mixed=self._tally.mixed + len(self._judge.wrong),
            failures=self._tally.failures,
            leaked_processes=self._left,
            leaked_segments=len(still_there(self._segments)),
            leaked_buffers=self._buffers,
            leaked_fds=max(0, first.growth("fds")),
            slope_bytes_per_update=round(first.slope_bytes),
            growing=growing,
            details=[*self._tally.details, *self._judge.wrong][:20],
        )

    def _take_samples(self, update: int) -> None:
        for series in self._series:
            series.take(update)
        leaders = [engine.running.pid for engine in self._engines]
        leaders += [self._trainer.pid] if self._trainer is not None else []
        for leader in leaders:
            for process in session_of(leader):
                self._segments |= segments_of(process.pid)

    # -- one update

    @property
    def _standing(self) -> list[_Engine]:
        return [engine for engine in self._engines if engine.url]

    def _update(self, version: int, fault: Fault) -> None:
        self._admit_restarted()
        if self._trainer is None:
            self._trainer = self._start_trainer()
            self._trainer.hear(waiting_for="its start", timeout_s=_START_S)
        engines = self._standing
        order = Order(
            version=version,
            urls=[engine.url for engine in engines],
            transport=self._random.choice(("ipc", "broadcast")),
            pause=self._random.choice(("abort", "retract", "in_place", "wait")),
            abort_at=self._random.random() if fault == "abort" else None,
            corrupt=fault == "corrupt",
        )
        delay_s = self._random.random() * _LATEST_KILL_S
        self._modes[version] = order.pause
        self._attempts += 1
        if fault != "none":
            self._faults[fault] += 1
        trainer, victim = self._trainer, engines[-1]
        timer: threading.Timer | None = None
        if fault == "kill trainer":
            timer = threading.Timer(delay_s, trainer.kill)
        elif fault == "kill engine":
            timer = threading.Timer(delay_s, victim.running.kill)
            victim.url = ""  # no client may send it requests or count its death as a failure
        trainer.tell(order)
        if timer is not None:
            timer.start()
        outcome = self._hear(trainer)
        if timer is not None:
            timer.join()
        if fault == "kill trainer":
            self._bury_trainer()
        if fault == "kill engine":
            self._left += victim.running.bury()
            self._restart(victim)
        done = self._judge_outcome(order, outcome, fault)
        for engine in self._standing:
            self._inspect(engine, {engine.version, version} if not done else {version})
        self._updates += done
        self._transports[order.transport] += done

    def _hear(self, trainer: Running) -> Outcome | None:
        """Returns the trainer's answer, or None if it died."""
        try:
            line = trainer.hear(waiting_for="its answer", timeout_s=_MARGIN * self._plan.timeout_s)
        except EngineFailure:
            return None
        except DeadlineExceeded as error:
            self._tally.hangs += 1
            self._tally.note(str(error))
            trainer.kill()
            self._bury_trainer()
            return None
        return msgspec.json.decode(line, type=Outcome)

    def _judge_outcome(self, order: Order, outcome: Outcome | None, fault: Fault) -> bool:
        """Returns True if every running engine was updated, and counts the outcomes that the fault does not explain."""
        tally = self._tally
        if outcome is None:
            if fault != "kill trainer":
                tally.failures += 1
                tally.note(f"version {order.version}: the trainer died")
                self._bury_trainer()
            return False
        if fault == "corrupt":
            if not outcome.noticed and not outcome.error:
                tally.mixed += 1
                tally.note(f"version {order.version}: the engine accepted a flipped bit")
            elif outcome.error:
                tally.failures += 1
                tally.note(f"version {order.version}: {outcome.error}")
            return False
        standing = {engine.url for engine in self._standing}
        served = {row.url for row in outcome.rows if row.status == "serving" and row.version_after == order.version}
        done = standing <= served
        if not done and fault in ("none", "kill trainer"):
            tally.failures += 1
            words = "; ".join(row.message for row in outcome.rows if row.message)
            tally.note(f"version {order.version} by {order.transport}: {outcome.error} {words}")
        return done

    def _inspect(self, engine: _Engine, allowed: set[int]) -> None:
        version = self._inspector.inspect(engine.url, allowed)
        if version is not None:
            engine.version = version

    # -- processes

    def _start_engine(self, number: int) -> _Engine:
        plan = self._plan
        command = [sys.executable, "-m", "weightcast", "serve", str(plan.model), "--port", "0", "--json"]
        command += ["--tp", str(plan.tp), "--device", "cpu", "--dtype", "float32", "--threads", "1"]
        self._engines_started += 1
        name = f"engine {number}.{self._engines_started}"
        log = plan.folder / f"engine-{number}.log"
        running = Running(name, command, log=log, reaper=self._reaper)
        series = Series(name=name, pid=running.pid)
        self._series.append(series)
        return _Engine(number=number, running=running, series=series)

    def _restart(self, engine: _Engine) -> None:
        """Starts another process in the engine's place; updates include it again once it answers."""
        again = self._start_engine(engine.number)
        engine.running, engine.series, engine.version = again.running, again.series, 0

    def _meet(self, engine: _Engine, *, timeout_s: float = _START_S) -> None:
        said = msgspec.json.decode(
            engine.running.hear(waiting_for="its address", timeout_s=timeout_s), type=dict[str, str | int]
        )
        engine.url = str(said["url"])

    def _admit_restarted(self) -> None:
        for engine in self._engines:
            if not engine.url:
                with suppress(DeadlineExceeded):
                    self._meet(engine, timeout_s=0.01)

    def _start_trainer(self) -> Running:
        plan = self._plan
        self._trainers_started += 1
        command = [sys.executable, "-m", "weightcast.lab.soak.trainer", str(plan.model)]
        command += [str(plan.bucket_bytes), str(plan.timeout_s)]
        name = f"trainer {self._trainers_started}"
        running = Running(name, command, log=plan.folder / "trainer.log", reaper=self._reaper)
        self._series.append(Series(name=name, pid=running.pid))
        return running

    def _bury_trainer(self) -> None:
        if self._trainer is not None:
            self._trainer.kill()
            self._left += self._trainer.bury()
            self._trainer = None

    def _stop_trainer(self) -> None:
        if self._trainer is None:
            return
        assert self._trainer.process.stdin is not None
        with suppress(BrokenPipeError):
            self._trainer.process.stdin.close()  # the trainer then closes its updaters, which leave their groups
        self._left += self._trainer.bury()
        self._trainer = None

    def _stop_engines(self) -> None:
        for engine in self._engines:
            self._left += engine.running.stop()
            engine.url = ""
            assert not session_of(engine.running.pid)
        self._engines.clear()
