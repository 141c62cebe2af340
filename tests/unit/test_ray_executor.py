"""Ranks as Ray actors: what is asked of the other executors, and an actor that dies is named."""

from __future__ import annotations

import os
import signal

import pytest
from ray.util.placement_group import placement_group, remove_placement_group

from tests.raycluster import HEAD, HIGH, LOW, three_nodes  # noqa: F401  a fixture
from tests.unit.test_executor import (
    Echo,
    test_an_unforeseen_error_is_an_answer_and_the_rank_stays,  # noqa: F401  run here too, with the `two` of this module
    test_every_rank_answers_in_its_place,  # noqa: F401
    test_work_goes_on_while_a_message_is_under_way_and_an_interrupt_ends_it,  # noqa: F401
    wait_until_gone,
)
from weightcast.errors import ConfigError, EngineFailure
from weightcast.ray import Bundles, EngineKind, RayExecutor, RolloutEngines
from weightcast.ray import executor as module
from weightcast.ray.serving import named_group
from weightcast.receiver import executor as shared
from weightcast.wire.messages import Leave, Readback

pytestmark = pytest.mark.usefixtures("three_nodes")


@pytest.fixture(scope="module")
def two(three_nodes):  # noqa: F811
    """Two ranks that no test harms."""
    executor = RayExecutor(Echo, 2)
    yield executor
    executor.close()


@pytest.fixture
def short(monkeypatch):
    for home in (module, shared):
        monkeypatch.setattr(home, "_GRACE_S", 0.5)
        monkeypatch.setattr(home, "_STOP_S", 0.5)


def broken_stays_broken(executor: RayExecutor, words: str) -> None:
    for ask in (lambda: executor.apply(Readback(), timeout_s=1), lambda: executor.run(b"step")):
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
        executor.apply(Readback(), timeout_s=1)


def run_on(executor: RayExecutor) -> None:
    """Ray may hand one more answer out before it knows who is dead."""
    for _ in range(100):
        executor.run(b"step")


def test_a_rank_that_cannot_start_ends_the_others(short):
    with pytest.raises(EngineFailure, match="rank 1 failed in its start: LookupError: no such model") as caught:
        RayExecutor(Echo, 2, {"trouble": "one"}, start_timeout_s=60)
    assert caught.value.ranks == (1,)


def test_an_actor_that_was_killed_between_two_steps_is_named_at_the_next(short):
    executor = RayExecutor(Echo, 2)
    assert executor.run(b"step") == b"step on 0 of 2"
    os.kill(executor.pids()[1], signal.SIGKILL)
    with pytest.raises(EngineFailure, match=r"rank 1 \(pid \d+ on .*is gone during a step: The actor is dead"):
        run_on(executor)
    broken_stays_broken(executor, "rank 1 .*is gone")


def test_an_actor_that_stands_still_is_named_at_the_deadline(short):
    executor = RayExecutor(Echo, 2)
    os.kill(executor.pids()[1], signal.SIGSTOP)
    with pytest.raises(EngineFailure, match=r"rank 1 did not give the answer to Leave within 0\.6 s"):
        executor.apply(Leave(), timeout_s=0.1)
    os.kill(executor.pids()[1], signal.SIGCONT)
    broken_stays_broken(executor, "rank 1 did not give the answer to Leave")


@pytest.fixture(scope="module")
def spread(three_nodes):  # noqa: F811
    """A group of ours, a bundle on each node, not in the order of their addresses."""
    group = placement_group([{"CPU": 1}] * 3, strategy="STRICT_SPREAD")
    assert group.wait(60)
    yield group
    remove_placement_group(group)


def test_ranks_come_in_the_order_of_addresses_or_in_the_callers(spread):
    by_address = Bundles.of(spread, 3)
    chosen = [by_address.indices[place] for place in (2, 0, 1)]
    executor = RayExecutor(Echo, 3, bundles=Bundles.of(spread, 3, indices=chosen))
    assert [place.address for place in executor.places] == [HIGH, LOW, HEAD]  # so by_address is LOW, HEAD, HIGH
    assert executor.run(b"step") == b"step on 0 of 3"
    assert [ack.rank for ack in executor.apply(Readback(), timeout_s=20)] == [0, 1, 2]
    executor.close()
    assert spread.wait(5)  # the caller's group is still there


def test_mistakes_in_placement(spread):
    bundles = Bundles.of(spread, 2)
    with pytest.raises(ConfigError, match="2 bundles for 3 ranks"):
        RayExecutor(Echo, 3, bundles=bundles)
    with pytest.raises(ConfigError, match="bundle index 3 for rank 1: the group has bundles 0 to 2"):
        Bundles.of(spread, 2, indices=[0, 3])
    with pytest.raises(ConfigError, match=r"bundle 0 for rank 0 holds .*a rank takes 1 GPU"):
        Bundles.of(spread, 1, indices=[0], resource="GPU")
    with pytest.raises(ConfigError, match=r"no 1 bundles of .*GPU.* after 1 s; free now"):
        Bundles.create(1, resource="GPU", timeout_s=1)
    with pytest.raises(ConfigError, match="a server is one process on one node"):
        RolloutEngines(EngineKind(command=("true",)), [bundles])
    with pytest.raises(ConfigError, match="no placement group 'theirs'"):
        named_group("theirs")
