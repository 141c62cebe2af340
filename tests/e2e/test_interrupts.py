"""After Ctrl-C anywhere the next call works, and no engine is left in the hands of a trainer that has gone on.

Python raises KeyboardInterrupt at the beginning of a function, among other moments.  The tests do it at such moments of
this package's code, counted through a whole call, so that they hit the same places on a slow machine.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import weightcast
from tests.helpers.harness import connect, free, next_version, process, push, serves_whole, trainer_of
from tests.helpers.ranks import Ranks
from weightcast import WeightUpdater
from weightcast.errors import ConfigError, TrainerRankFailed
from weightcast.runtime.peak_memory import PeakMemory
from weightcast.update.bucket_stream import BucketStream
from weightcast.watch.events import Asked, AttemptStarted

pytestmark = [
    pytest.mark.deadlines,
    # An interrupt may come between the making of a coroutine and its start.
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
OURS = str(Path(weightcast.__file__).parent)
TIMES = 40


class CtrlC:
    """Raises KeyboardInterrupt in this thread, at the moment with this number; counts moments if there is none.

    With ``within``, the end of a file's path, only calls of that file's functions are moments.
    """

    def __init__(self, at: int | None = None, within: str = "") -> None:
        self._at, self._within = at, within
        self.moments = 0
        self.where = ""

    def __enter__(self) -> CtrlC:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        # Not where a block of `with` begins or ends: there the interpreter loses what a profiler raises.
        name = frame.f_code.co_name
        if event != "call" or name.startswith("__") or not _is_ours(frame):
            return
        if not frame.f_code.co_filename.endswith(self._within):
            return
        self.moments += 1
        if self.moments == self._at:
            sys.setprofile(None)
            self.where = f"{frame.f_code.co_filename}: {name}"
            raise KeyboardInterrupt


def _is_ours(frame: FrameType) -> bool:
    """True if this package's code runs, or has called what runs, such as a wait for an answer."""
    caller = frame.f_back
    frames = (frame,) if caller is None else (frame, caller)
    return any(one.f_code.co_filename.startswith(OURS) for one in frames)


def moments(do: Callable[[], object], times: int = TIMES, within: str = "") -> Iterator[int]:
    """Moments from the beginning of a call to its end; the call itself is made once, and not interrupted."""
    with CtrlC(within=within) as whole:
        do()
    yield from sorted({1 + number * whole.moments // times for number in range(times)})


@contextmanager
def interrupted(at: int, within: str = "") -> Iterator[CtrlC]:
    with CtrlC(at, within) as press:
        try:
            yield press
        except KeyboardInterrupt:
            return


def states(updater: WeightUpdater) -> list[tuple[str, bool]]:
    return [(row.state, row.active) for row in updater.health()]


# Anywhere, and between any two steps: between the last bucket and the proof, nothing waits for an engine.
@pytest.mark.parametrize(("transport", "within"), [("ipc", ""), ("broadcast", ""), ("ipc", "update/attempts.py")])
def test_update_works_after_an_interrupt_anywhere_in_the_one_before(fresh, transport, within):
    engines = [fresh("--local"), fresh("--local", "--staging", "none")]
    model = trainer_of(0)

    def update() -> None:
        version = next_version()
        model.set_version(version)
        updater.update(version=version)

    with connect(model, engines, transport=transport) as updater:
        update()
        for at in moments(update, within=within):
            with interrupted(at, within) as press:
                update()
            # Whoever generates answers is whole; whoever was stopped half way says so, and waits for the next update.
            for engine in engines:
                info = free(engine)
                assert info.state == "quarantined" or (serves_whole(engine), info.paused) == (info.version, False), (
                    press.where
                )
            update()
            assert states(updater) == [("serving", True)] * 2, press.where
            assert len({serves_whole(engine) for engine in engines}) == 1, press.where


def test_a_session_that_was_asked_for_is_ended_when_the_wait_is_interrupted(fresh):
    """The answer to Open comes after the interrupt."""
    engines = [fresh("--local"), fresh("--local", "--staging", "none")]
    armed: list[int] = []

    def listen(event: object) -> None:
        if armed and isinstance(event, AttemptStarted):
            armed.clear()
            signal.setitimer(signal.ITIMER_REAL, delay_s)

    def press(*_: object) -> None:
        raise KeyboardInterrupt

    model = trainer_of(0)
    before = signal.signal(signal.SIGALRM, press)
    try:
        with connect(model, engines, on_event=listen) as updater:
            for number in range(60):
                version, delay_s = next_version(), 1e-4 + number * 5e-5
                model.set_version(version)
                armed.append(1)
                try:
                    updater.update(version=version)
                except KeyboardInterrupt:
                    pass
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                assert updater.update(version=version).ok
            assert [serves_whole(engine) for engine in engines] == [version] * 2
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_retarget_that_is_interrupted_leaves_the_old_targets(fresh):
    a, b, c = (fresh("--local") for _ in range(3))
    model = trainer_of(0)
    now = [a, b]

    def change() -> None:
        nonlocal now
        new = [a, c] if now == [a, b] else [a, b]
        updater.retarget([engine.url for engine in new])
        now = new

    def update() -> None:
        version = next_version()
        model.set_version(version)
        report = updater.update(version=version)
        assert [row.url for row in report.targets] == [engine.url for engine in now]
        assert [serves_whole(engine) for engine in now] == [version] * 2

    with connect(model, now) as updater:
        update()
        for at in moments(change):
            with interrupted(at) as press:
                change()
            assert [row.url for row in updater.health()] == [engine.url for engine in now], press.where
            update()
            assert states(updater) == [("serving", True)] * 2, press.where
        change()
        update()


def test_a_retarget_that_fails_after_it_has_begun_leaves_the_old_targets(fresh, monkeypatch):
    a, b, c = (fresh("--local") for _ in range(3))
    first, second = next_version(), next_version()
    model = trainer_of(first)

    def fail(*_: object) -> None:
        raise ConfigError("this model cannot be planned for")

    with connect(model, [a, b], transport="broadcast") as updater:
        updater.update(version=first)
        with monkeypatch.context() as patched:
            patched.setattr(BucketStream, "prepare", fail)  # one of the last steps
            with pytest.raises(ConfigError, match="cannot be planned for"):
                updater.retarget([a.url, c.url])
        assert [row.url for row in updater.health()] == [a.url, b.url]
        model.set_version(second)
        report = updater.update(version=second)
        assert [(row.url, row.status) for row in report.targets] == [(a.url, "serving"), (b.url, "serving")]
        assert states(updater) == [("serving", True)] * 2
        assert [serves_whole(engine) for engine in (a, b, c)] == [second, second, 0]


def test_connect_and_close_may_be_interrupted_anywhere(fresh):
    engine = fresh("--local", "--staging", "none")
    model = trainer_of(0)

    def run() -> None:
        version = next_version()
        model.set_version(version)
        with connect(model, [engine]) as updater:
            updater.update(version=version)

    run()
    for at in moments(run):
        with interrupted(at) as press:
            run()
        assert gc.isenabled(), press.where
        assert free(engine).state in ("serving", "quarantined"), press.where
        run()
        serves_whole(engine)


def test_a_second_thread_is_refused_and_the_first_goes_on(fresh):
    engine, other = fresh("--local"), fresh("--local")
    version = next_version()
    model = trainer_of(version)
    refused: list[str] = []

    def meddle() -> None:
        for call in (
            lambda: updater.update(version=version + 1),
            lambda: updater.retarget([other.url]),
            updater.release,
            updater.close,
        ):
            try:
                call()
            except ConfigError as error:
                refused.append(str(error))

    def beside(sent: int, total: int) -> None:
        if not refused:
            thread = threading.Thread(target=meddle, name="meddler")
            thread.start()
            thread.join()

    with connect(model, [engine], progress=beside) as updater:
        report = updater.update(version=version)
        assert report.ok
        assert len(refused) == 4
        assert all(
            "thread meddler" in words and "update() still runs in thread MainThread" in words for words in refused
        )
        assert serves_whole(engine) == version
        updater.retarget([engine.url, other.url], catch_up=True)
        assert serves_whole(other) == version


def _rank_interrupted(url: str, versions: list[int], victim: int) -> list[str]:
    """Runs one rank of a sharded trainer, which is interrupted while it begins to measure memory."""
    model = trainer_of(versions[0])
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    enter, said = PeakMemory.__enter__, list[str]()

    def press(self: PeakMemory) -> PeakMemory:
        PeakMemory.__enter__ = enter  # type: ignore[method-assign]
        raise KeyboardInterrupt

    with WeightUpdater.connect(model, url, bucket_bytes=30_000, timeout_s=60.0) as updater:
        dist.barrier()
        if dist.get_rank() == victim:
            PeakMemory.__enter__ = press  # type: ignore[method-assign]
        for version in versions:
            try:
                said.append("updated" if updater.update(version=version).ok else "not updated")
            except (KeyboardInterrupt, TrainerRankFailed) as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("victim", [0, 1])
def test_an_interrupt_of_one_rank_ends_the_wait_of_the_others(engines, victim):
    ranks = Ranks(2)
    versions = [next_version(), next_version()]
    try:
        ranks.start(_rank_interrupted, engines.one.url, versions, victim)
        said = [ranks.answer(rank) for rank in range(2)]
    finally:
        ranks.close()
    assert said[victim][0] == "KeyboardInterrupt: "
    assert f"trainer rank {victim} gave up: KeyboardInterrupt" in said[1 - victim][0]
    assert [one[1] for one in said] == ["updated"] * 2
    push([engines.one], next_version())  # with the weights that the tests expect of a version
    serves_whole(engines.one)


def _pressed_twice(urls: list[str]) -> None:
    """A trainer that is interrupted again while it ends its sessions, and goes on."""
    times: list[int] = []

    def listen(event: object) -> None:
        if len(times) < 2 and (isinstance(event, AttemptStarted) or (times and isinstance(event, Asked))):
            times.append(1)
            os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    version = 1_000_000
    with WeightUpdater.connect(trainer_of(version), urls, timeout_s=60.0, on_event=listen) as updater:
        try:
            updater.update(version=version)
        except KeyboardInterrupt:
            times.append(1)
        assert updater.update(version=version).ok


def test_a_second_interrupt_while_sessions_end_leaves_none_behind(fresh):
    engines = [fresh("--local"), fresh("--local", "--staging", "none")]
    trainer: Any = process(_pressed_twice, [engine.url for engine in engines])
    trainer.join()
    assert trainer.exitcode == 0
    assert [serves_whole(engine) for engine in engines] == [1_000_000] * 2
