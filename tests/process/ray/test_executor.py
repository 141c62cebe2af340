"""Ranks as Ray actors: what is asked of the other executors, and an actor that dies is named."""

from __future__ import annotations

import os
import signal

import pytest

from tests.helpers.clock import PATIENCE_S
from tests.helpers.echo import Echo
from tests.helpers.raycluster import cluster  # noqa: F401  a fixture
from tests.process.receiver.test_executor import (
    broken_stays_broken,
    test_an_unforeseen_error_is_an_answer_and_the_rank_stays,  # noqa: F401  run here too, with the `two` of this module
    test_every_rank_answers_in_its_place,  # noqa: F401
    test_work_goes_on_while_a_message_is_under_way_and_an_interrupt_ends_it,  # noqa: F401
)
from weightcast.errors import EngineFailure
from weightcast.ray import RayExecutor
from weightcast.ray import executor as module
from weightcast.receiver import lost_ranks
from weightcast.wire.messages import Leave

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def two(cluster):  # noqa: F811
    """Two ranks that no test harms."""
    executor = RayExecutor(Echo, 2)
    yield executor
    executor.close()


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(lost_ranks, "GRACE_S", 0.5)
    monkeypatch.setattr(module, "_STOP_S", 0.5)


def run_on(executor: RayExecutor) -> None:
    """Ray may hand one more answer out before it knows who is dead."""
    for _ in range(100):
        executor.run(b"step")


def test_a_rank_that_cannot_start_ends_the_others(short):
    with pytest.raises(EngineFailure, match="rank 1 failed in its start: LookupError: no such model") as caught:
        RayExecutor(Echo, 2, {"trouble": "one"}, start_timeout_s=PATIENCE_S)
    assert caught.value.ranks == (1,)


def test_an_actor_that_was_killed_between_two_steps_is_named_at_the_next(short):
    executor = RayExecutor(Echo, 2)
    assert executor.run(b"step") == b"step on 0 of 2"
    os.kill(executor.pids()[1], signal.SIGKILL)
    with pytest.raises(EngineFailure, match=r"rank 1 \(pid \d+ on .*is gone during a step: The actor is dead"):
        run_on(executor)
    broken_stays_broken(executor, "rank 1 .*is gone")


@pytest.mark.wide  # twelve seconds; test_executor.py has it for processes
def test_an_actor_that_stands_still_is_named_at_the_deadline(short):
    executor = RayExecutor(Echo, 2)
    os.kill(executor.pids()[1], signal.SIGSTOP)
    with pytest.raises(EngineFailure, match=r"rank 1 did not give the answer to Leave within 4 s"):
        executor.apply(Leave(), timeout_s=3.5)
    os.kill(executor.pids()[1], signal.SIGCONT)
    broken_stays_broken(executor, "rank 1 did not give the answer to Leave")
