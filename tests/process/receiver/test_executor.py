"""One answer for each rank, an error that names the rank that gave none, and no process left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.helpers.clock import PATIENCE_S
from tests.helpers.echo import Echo
from tests.helpers.forking import InsteadOfSpawn
from tests.helpers.harness import wait_for
from tests.helpers.procs import is_stopped, wait_until_gone
from weightcast.errors import EngineFailure
from weightcast.receiver import executor as module
from weightcast.receiver import lost_ranks, rank_connections
from weightcast.receiver.executor import LocalExecutor, MpExecutor
from weightcast.receiver.lost_ranks import FarRanks
from weightcast.wire.answers import RankAck
from weightcast.wire.messages import Abort, Leave, Readback

pytestmark = pytest.mark.deadlines

SESSION = "ab" * 16


@pytest.fixture(autouse=True)
def _quick_starts(monkeypatch):
    """For all but the two ranks below, and those of an engine that is killed: these start Python as in earnest."""
    monkeypatch.setattr(module, "multiprocessing", InsteadOfSpawn("forkserver"))


def test_one_rank_in_this_process():
    worker = Echo(0, 1, "")
    executor = LocalExecutor(worker)
    assert executor.pids() == (os.getpid(),)
    assert executor.apply(Readback(), timeout_s=PATIENCE_S) == [RankAck(rank=0, error="Readback")]
    assert executor.run(b"step") == b"step on 0 of 1"
    executor.interrupt("stop")
    assert worker.stopped.is_set()
    executor.close()
    executor.close()
    assert worker.closed


@pytest.fixture(scope="module")
def two():
    """Two ranks that no test harms."""
    executor = MpExecutor(Echo, 2)
    yield executor
    executor.close()


def test_every_rank_answers_in_its_place(two):
    assert two.tp_size == len(set(two.pids())) == 2
    assert os.getpid() not in two.pids()
    for _ in range(50):
        assert [(ack.rank, ack.error) for ack in two.apply(Leave(), timeout_s=PATIENCE_S)] == [
            (0, "Leave"),
            (1, "Leave"),
        ]
        assert two.run(b"step") == b"step on 0 of 2"
    assert [len(ack.error) for ack in two.apply(Abort(session=SESSION, reason="long 0"), timeout_s=PATIENCE_S)] == [
        5_000_000
    ] * 2


def test_work_goes_on_while_a_message_is_under_way_and_an_interrupt_ends_it(two):
    answers: list[RankAck] = []
    waiting = threading.Thread(
        target=lambda: answers.extend(two.apply(Abort(session=SESSION, reason="wait"), timeout_s=PATIENCE_S))
    )
    waiting.start()
    for _ in range(20):
        assert two.run(b"step") == b"step on 0 of 2"
    assert not answers
    two.interrupt("the trainer is gone")
    waiting.join(PATIENCE_S)
    assert [(ack.rank, ack.error) for ack in answers] == [(0, "interrupted"), (1, "interrupted")]
    assert all(ack.ok for ack in two.apply(Leave(), timeout_s=PATIENCE_S))


def test_an_unforeseen_error_is_an_answer_and_the_rank_stays(two):
    for ack in two.apply(Abort(session=SESSION, reason="raise"), timeout_s=PATIENCE_S):
        assert (ack.ok, ack.error) == (False, "LookupError: unforeseen")
    with pytest.raises(EngineFailure, match=r"rank 0 failed in a step: LookupError: rank 0 cannot") as caught:
        two.run(b"raise")
    assert caught.value.ranks == (0, 1)
    with pytest.raises(EngineFailure, match="only me") as caught:
        two.run(b"raise 1")
    assert caught.value.ranks == (1,)
    assert two.run(b"step") == b"step on 0 of 2"
    assert [ack.ok for ack in two.apply(Readback(), timeout_s=PATIENCE_S)] == [True, True]


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(lost_ranks, "GRACE_S", 0.5)
    monkeypatch.setattr(rank_connections, "_SEND_S", 4)
    monkeypatch.setattr(module, "_STOP_S", 0.5)


@pytest.mark.parametrize(
    ("trouble", "words"),
    [("one", "rank 1 failed in its start: LookupError: no such model"), ("exit", "rank 1 .*exited with 7")],
)
def test_a_rank_that_cannot_start_ends_the_others(short, trouble, words):
    before = set(multiprocessing.active_children())
    with pytest.raises(EngineFailure, match=words) as caught:
        MpExecutor(Echo, 2, {"trouble": trouble}, start_timeout_s=PATIENCE_S)
    assert caught.value.ranks == (1,)
    assert set(multiprocessing.active_children()) <= before


def broken_stays_broken(executor: Any, words: str) -> None:
    """Checks that an executor answers with the first failure from then on, and can be closed."""
    for ask in (lambda: executor.apply(Readback(), timeout_s=PATIENCE_S), lambda: executor.run(b"step")):
        with pytest.raises(EngineFailure, match=words) as caught:
            ask()
        assert caught.value.ranks == (1,)
        assert caught.value.hint == "restart the engine"
    executor.interrupt("nobody hears")
    pids = executor.pids()
    executor.close()
    executor.close()
    wait_until_gone(pids)
    with pytest.raises(EngineFailure, match="shutting down"):
        executor.apply(Readback(), timeout_s=PATIENCE_S)


def test_a_rank_that_dies_is_named_at_once(short):
    executor = MpExecutor(Echo, 2)
    with pytest.raises(EngineFailure, match=r"rank 1 .*exited with 3 during the answer to Abort"):
        executor.apply(Abort(session=SESSION, reason="exit 1"), timeout_s=PATIENCE_S)
    broken_stays_broken(executor, "rank 1 .*exited with 3")


def test_a_rank_that_was_killed_in_its_sleep_is_named(short):
    executor = MpExecutor(Echo, 2)
    os.kill(executor.pids()[1], signal.SIGKILL)
    with pytest.raises(EngineFailure, match=r"rank 1 .*killed by signal 9"):
        executor.apply(Readback(), timeout_s=PATIENCE_S)
    broken_stays_broken(executor, "rank 1 .*killed by signal 9")


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: is_stopped(pid), f"{pid} to stand still")


def test_a_rank_that_stands_still_is_named_at_the_deadline(short):
    executor = MpExecutor(Echo, 2)
    stop(executor.pids()[1])
    with pytest.raises(EngineFailure, match="rank 1 did not take a message within 4 s"):
        executor.run(b"x" * 5_000_000)  # more than a pipe holds
    broken_stays_broken(executor, "rank 1 did not take a message")


def test_a_late_rank_is_named_and_its_late_answer_never_heard(short):
    executor = MpExecutor(Echo, 2, run_timeout_s=60.0)
    stop(executor.pids()[1])
    with pytest.raises(EngineFailure, match=r"rank 1 did not give the answer to Readback within 4 s"):
        executor.apply(Readback(), timeout_s=3.5)
    os.kill(executor.pids()[1], signal.SIGCONT)
    broken_stays_broken(executor, "rank 1 did not give the answer to Readback")


def _be_an_engine(pipe, fork) -> None:
    executor = MpExecutor(Echo, 2, fork=fork)
    stop(executor.pids()[1])
    pipe.send(executor.pids())
    time.sleep(100)


@contextmanager
def engine_process(target, *arguments) -> Iterator[Any]:
    """A process with one thread, and our end of its pipe; both are ended on the way out."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    engine = context.Process(target=target, args=(theirs, *arguments))
    engine.start()
    theirs.close()
    try:
        yield engine, ours
    finally:
        engine.kill()
        engine.join()
        engine.close()
        ours.close()


@pytest.mark.parametrize("fork", [False, True])
def test_ranks_end_with_their_engine_even_if_it_is_killed_and_they_stand_still(fork):
    with engine_process(_be_an_engine, fork) as (engine, ours):
        assert ours.poll(PATIENCE_S)
        pids = ours.recv()
        engine.kill()
        engine.join()
        wait_until_gone(pids)


class Remembers(Echo):
    """A worker that says what its process had before the worker was made."""

    word = "nothing"

    def run(self, command: bytes) -> bytes:
        handler = signal.getsignal(signal.SIGTERM)
        return f"{self.word} on {self.rank}, {handler == signal.SIG_DFL}, {self.rendezvous != ''}".encode()


def _start_with(pipe, threads) -> None:
    Remembers.word = "imported"
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    for _ in range(threads):
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
    executor = MpExecutor(Remembers, 2, fork=True)
    pipe.send((executor.run(b""), executor.apply(Readback(), timeout_s=PATIENCE_S)[1].error))
    os.kill(executor.pids()[1], signal.SIGTERM)
    try:
        executor.apply(Readback(), timeout_s=PATIENCE_S)
    except EngineFailure as error:
        pipe.send(str(error))
    pids = executor.pids()
    executor.close()
    pipe.send(pids)


@pytest.mark.parametrize(
    ("threads", "had"), [pytest.param(0, "imported", id="one thread"), pytest.param(1, "nothing", id="two threads")]
)
def test_forked_ranks_have_what_their_engine_imported_and_not_its_signal_handlers(threads, had):
    with engine_process(_start_with, threads) as (_, ours):
        assert ours.poll(PATIENCE_S)
        assert ours.recv() == (f"{had} on 0, True, True".encode(), "Readback")
        assert ours.poll(PATIENCE_S)
        assert "killed by signal 15" in ours.recv()
        assert ours.poll(PATIENCE_S)
        wait_until_gone(ours.recv())


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self, stops: dict[int, float]) -> None:
        """``stops``: by how many seconds which look ends too late."""
        self.now, self.looks, self.stops = 100.0, 0, stops

    def monotonic(self) -> float:
        return self.now

    def nothing_comes(self, ranks: set[int], limit_s: float) -> dict[int, bytes]:
        self.now += limit_s + self.stops.get(self.looks, 0.0)
        self.looks += 1
        return {}


@pytest.mark.parametrize(
    ("stopped_s", "given_up_s"),
    [
        pytest.param(0.0, 7.0, id="it never stood still"),
        pytest.param(0.3, 7.0, id="a busy machine"),
        pytest.param(5.0, 19.0, id="it goes on before the deadline"),
        pytest.param(6.2, 19.0 + 1.2, id="just past the deadline"),
        pytest.param(30.0, 19.0 + 25.0, id="long past the deadline"),
    ],
)
def test_an_engine_that_stood_still_itself_gives_its_ranks_time_before_it_names_them(
    monkeypatch, stopped_s, given_up_s
):
    clock = Clock({1: stopped_s})
    monkeypatch.setattr(lost_ranks, "time", clock)
    monkeypatch.setattr(lost_ranks, "GRACE_S", 12.0)
    with pytest.raises(EngineFailure, match="rank 0 did not give the answer within 7 s"):
        FarRanks()._gather(2, clock.nothing_comes, 7.0, "the answer", work=False)
    assert clock.now - 100.0 == pytest.approx(given_up_s, abs=0.01)
