"""The soak itself: updates under load, faults at random, and what every engine serves looked at after each.

An engine may die at any moment but the first one, which lives through all, so that what it holds can be compared
over the whole time.  It decides what happens and counts; it prints nothing.
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
from pathlib import Path
from typing import Literal

import msgspec

from weightcast.cli.soaking.leaks import Series, buffers_of, segments_of, still_there
from weightcast.cli.soaking.load import Judge, Load, mode_counts
from weightcast.cli.soaking.processes import Reaper, Running, session_of
from weightcast.cli.soaking.trainer import Order, Outcome
from weightcast.cli.soaking.versions import Versions
from weightcast.comm.http import Client
from weightcast.config import Target
from weightcast.errors import DeadlineExceeded, EngineFailure, WeightcastError
from weightcast.wire.messages import EngineInfo, decode_ack, decode_info

Fault = Literal["none", "kill trainer", "kill engine", "abort", "corrupt"]
FAULTS: tuple[Fault, ...] = ("kill trainer", "kill engine", "abort", "corrupt")
_START_S = 180.0
_LATEST_KILL_S = 0.4
_FREE_S = 60.0
_SAMPLE_EVERY = 5
_MARGIN = 3  # of a deadline, for all that an update waits for one after the other


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do.

    Attributes:
        model: Hugging Face folder that the engines start from.
        updates: How many updates have to succeed.
        seconds: Or how long to go on; 0 counts updates alone.
        engines: How many.
        tp: Ranks of each.
        clients: Requests that are always under way.
        fault_rate: Part of the updates that something happens to.
        seed: Of everything random.
        bucket_bytes: Size of a bucket.
        timeout_s: Deadline of each single wait.
        folder: For logs.
    """

    model: Path
    updates: int
    seconds: float
    engines: int
    tp: int
    clients: int
    fault_rate: float
    seed: int
    bucket_bytes: int
    timeout_s: float
    folder: Path


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it; everything after ``answers_spanning`` should be zero or empty.

    Attributes:
        updates: Updates after which every engine served the new version.
        attempts: All that were begun.
        seconds: From the first to the last.
        faults: How often what was done.
        transports: Successful updates by transport.
        modes: Attempts by pause mode.
        engines_started: Engines, the first ones included.
        trainers_started: Likewise.
        answers: Completions that came back.
        answers_dropped: Requests that ended with their engine, or were refused by it.
        answers_checked: Completions recomputed with the weights of the versions that they claim.
        answers_spanning: Those of them that came from several versions.
        hangs: Waits that passed their deadline: of a trainer, an engine, a request.
        mixed: Engines that served something else than one whole version, answers that no version explains, and
            corrupted updates that went through.
        failures: Updates that failed although nothing was done to them.
        leaked_processes: Processes that outlived what had started them.
        leaked_segments: Names in /dev/shm that one of the processes had, and that are there when all have ended.
        leaked_buffers: Shared buffers that an engine still held when nobody updated it any more.
        leaked_fds: Descriptors gained by the first engine.
        slope_bytes_per_update: Memory gained by the first engine, by least squares, in the second half.
        growing: Processes whose descriptors, threads or memory grew beyond noise.
        details: The first of what went wrong, in words.
    """

    updates: int
    attempts: int
    seconds: float
    faults: dict[str, int]
    transports: dict[str, int]
    modes: dict[str, int]
    engines_started: int
    trainers_started: int
    answers: int
    answers_dropped: int
    answers_checked: int
    answers_spanning: int
    hangs: int
    mixed: int
    failures: int
    leaked_processes: int
    leaked_segments: int
    leaked_buffers: int
    leaked_fds: int
    slope_bytes_per_update: int
    growing: list[str]
    details: list[str]

    @property
    def ok(self) -> bool:
        """Did nothing go wrong that was not done on purpose, and was every answer's check worth something?"""
        bad = self.hangs + self.mixed + self.failures + self.leaked_processes + self.leaked_segments
        return not (bad + self.leaked_buffers + len(self.growing)) and self.answers_checked > 0


@dataclass(slots=True)
class _Engine:
    """One of the engines, whichever process it is at the moment."""

    number: int
    running: Running
    series: Series
    url: str = ""
    version: int = 0


class Soak:
    """Everything that runs; a context manager that leaves nothing running."""

    def __init__(self, plan: Plan, on_progress: Callable[[int, int], None]) -> None:
        """Start engines, trainer and load.

        Raises:
            EngineFailure, DeadlineExceeded: Something did not start.
        """
        self._plan = plan
        self._on_progress = on_progress
        self._random = random.Random(plan.seed)
        self._stack = ExitStack()
        self._segments: set[str] = set()
        self._wrong: list[str] = []
        self._faults: Counter[str] = Counter()
        self._transports: Counter[str] = Counter()
        self._hangs = self._mixed = self._failures = self._left = self._buffers = 0
        self._updates = self._attempts = self._engines_started = self._trainers_started = 0
        self._modes: dict[int, str] = {}
        self._series: list[Series] = []
        self._expected: dict[int, dict[str, str]] = {}
        try:
            self._reaper = Reaper()
            self._stack.callback(self._reaper.close)
            self._versions, spare = Versions(plan.model), Versions(plan.model)
            self._engines = [self._start_engine(number) for number in range(plan.engines)]
            self._stack.callback(self._stop_engines)
            self._trainer: Running | None = self._start_trainer()
            self._stack.callback(self._stop_trainer)
            for engine in self._engines:
                self._meet(engine)
            assert self._trainer is not None
            self._trainer.hear(waiting_for="its start", timeout_s=_START_S)
            self._judge = Judge(spare, self._modes)
            vocab = int(getattr(self._versions.model.config, "vocab_size"))  # noqa: B009  transformers' own typing
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
        """Update until there were enough, then look at what is left."""
        plan, started, version = self._plan, time.monotonic(), 0
        while self._updates < plan.updates or time.monotonic() - started < plan.seconds:
            version += 1
            fault: Fault = "none"
            if self._random.random() < plan.fault_rate:
                fault = self._random.choice(FAULTS if len(self._standing) > 1 else ("kill trainer", "abort", "corrupt"))
            self._one(version, fault)
            if version % _SAMPLE_EVERY == 0:
                self._take_samples(version)
            self._on_progress(self._updates, plan.updates)
        seconds = time.monotonic() - started
        self._load.stop()
        self._judge.finish()
        self._stop_trainer()
        for engine in self._standing:
            self._buffers += buffers_of(engine.running.pid)
            self._look(engine, {engine.version})
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
            hangs=self._hangs + self._load.hangs,
            mixed=self._mixed + len(self._judge.wrong),
            failures=self._failures,
            leaked_processes=self._left,
            leaked_segments=len(still_there(self._segments)),
            leaked_buffers=self._buffers,
            leaked_fds=max(0, first.growth("fds")),
            slope_bytes_per_update=round(first.slope_bytes),
            growing=growing,
            details=[*self._wrong, *self._judge.wrong][:20],
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

    def _one(self, version: int, fault: Fault) -> None:
        self._meet_returned()
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
            victim.url = ""  # nobody shall wait for it, and no client blame it
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
            self._look(engine, {engine.version, version} if not done else {version})
        self._updates += done
        self._transports[order.transport] += done

    def _hear(self, trainer: Running) -> Outcome | None:
        """The trainer's answer; None if it died."""
        try:
            line = trainer.hear(waiting_for="its answer", timeout_s=_MARGIN * self._plan.timeout_s)
        except EngineFailure:
            return None
        except DeadlineExceeded as error:
            self._hangs += 1
            self._note(str(error))
            trainer.kill()
            self._bury_trainer()
            return None
        return msgspec.json.decode(line, type=Outcome)

    def _judge_outcome(self, order: Order, outcome: Outcome | None, fault: Fault) -> bool:
        """Was it a successful update of every engine that stands?  Counts what should not have been."""
        if outcome is None:
            if fault != "kill trainer":
                self._failures += 1
                self._note(f"version {order.version}: the trainer died")
                self._bury_trainer()
            return False
        if fault == "corrupt":
            if not outcome.noticed and not outcome.error:
                self._mixed += 1
                self._note(f"version {order.version}: a flipped bit went through")
            elif outcome.error:
                self._failures += 1
                self._note(f"version {order.version}: {outcome.error}")
            return False
        standing = {engine.url for engine in self._standing}
        served = {row.url for row in outcome.rows if row.status == "serving" and row.version_after == order.version}
        done = standing <= served
        if not done and fault in ("none", "kill trainer"):
            self._failures += 1
            words = "; ".join(row.message for row in outcome.rows if row.message)
            self._note(f"version {order.version} by {order.transport}: {outcome.error} {words}")
        return done

    def _look(self, engine: _Engine, allowed: set[int]) -> None:
        """An engine serves one whole version of those that it may serve by now, and nobody updates it."""
        client = Client(Target(engine.url), timeout_s=_FREE_S)
        try:
            info = self._free(client)
            if info is None:
                return
            if info.state != "serving" or info.version not in allowed:
                self._mixed += 1
                self._note(f"{engine.url} is {info.state} at {info.version}, not at {sorted(allowed)}: {info.message}")
            engine.version = info.version or 0
            kept = decode_ack(client.get_json("/weightcast/digests")).resident
            expected = self._digests(engine.version)
            wrong = [name for name in kept if kept[name] != expected.get(name)]
            if wrong or not kept:
                self._mixed += 1
                self._note(f"{engine.url} keeps other weights than version {engine.version}: {', '.join(wrong[:4])}")
        except WeightcastError as error:
            self._hangs += isinstance(error, DeadlineExceeded)
            self._failures += 1
            self._note(f"{engine.url}: {error}")
        finally:
            client.close()

    def _free(self, client: Client) -> EngineInfo | None:
        deadline = time.monotonic() + _FREE_S
        while True:
            info = decode_info(client.get_json("/weightcast/info"))
            if info.state != "updating":
                return info
            if time.monotonic() > deadline:
                self._hangs += 1
                self._note(f"{client.target.url} is still being updated by {info.session_owner}")
                return None
            time.sleep(0.02)

    def _digests(self, version: int) -> dict[str, str]:
        if version not in self._expected:
            if len(self._expected) > 16:
                self._expected.pop(next(iter(self._expected)))
            self._expected[version] = self._versions.digests(version)
        return self._expected[version]

    def _note(self, words: str) -> None:
        self._wrong.append(words)

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
        """Another process in its place; it takes part again when it answers."""
        again = self._start_engine(engine.number)
        engine.running, engine.series, engine.version = again.running, again.series, 0

    def _meet(self, engine: _Engine, *, timeout_s: float = _START_S) -> None:
        said = msgspec.json.decode(
            engine.running.hear(waiting_for="its address", timeout_s=timeout_s), type=dict[str, str | int]
        )
        engine.url = str(said["url"])

    def _meet_returned(self) -> None:
        for engine in self._engines:
            if not engine.url:
                with suppress(DeadlineExceeded):
                    self._meet(engine, timeout_s=0.01)

    def _start_trainer(self) -> Running:
        plan = self._plan
        self._trainers_started += 1
        command = [sys.executable, "-m", "weightcast.cli.soaking.trainer", str(plan.model)]
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
            self._trainer.process.stdin.close()  # it closes its updaters, and they leave
        self._left += self._trainer.bury()
        self._trainer = None

    def _stop_engines(self) -> None:
        for engine in self._engines:
            self._left += engine.running.stop()
            engine.url = ""
            assert not session_of(engine.running.pid)
        self._engines.clear()
