"""One number of a version never stands for two sets of weights, whoever sends them and however an update ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.helpers.harness import connect, free, next_version, serves_whole, trainer_of
from weightcast.errors import ConfigError
from weightcast.update.updater import WeightUpdater
from weightcast.watch.events import Asked

pytestmark = pytest.mark.deadlines
LIMIT = 2**53


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """A shell starts what runs in its background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def states(updater: WeightUpdater) -> list[tuple[str, bool]]:
    return [(row.state, row.active) for row in updater.health()]


def interrupted_at(message: str) -> tuple[Callable[[object], None], list[int]]:
    """A listener that presses Ctrl-C when the first engine has answered such a message, while armed; and its armour."""
    armed: list[int] = []

    def listen(event: object) -> None:
        if armed and isinstance(event, Asked) and event.message == message:
            armed.clear()
            os.kill(os.getpid(), signal.SIGINT)

    return listen, armed


@pytest.mark.parametrize("verify", ["resident", "none"])
def test_weights_of_another_trainer_under_the_same_number_do_not_count_as_ours(fresh, verify):
    """Two jobs that number by step meet at one engine."""
    taken, ours = fresh("--local"), fresh("--local")
    version, others = next_version(), next_version()
    with connect(trainer_of(version), [taken, ours], verify=verify) as mine:
        mine.update(version=version)
        with connect(trainer_of(others), [taken]) as theirs:
            theirs.update(version=version)
        assert mine.retarget([taken.url, ours.url]) is None
        assert states(mine) == [("joining", False), ("serving", True)]
        assert f"other weights as version {version}" in mine.health()[0].reason
        if verify == "none":
            return  # no digest says whether the weights are still those of that version
        report = mine.retarget([taken.url, ours.url], catch_up=True)
        assert [(row.url, row.status) for row in report.targets] == [(taken.url, "serving")]
        assert states(mine) == [("serving", True)] * 2
        assert serves_whole(taken) == serves_whole(ours) == version


def test_a_number_that_engines_may_have_switched_to_is_not_given_to_other_weights(fresh):
    """Ctrl-C while engines commit: some may serve the version, which the trainer never heard."""
    engines = [fresh("--local"), fresh("--local")]
    listen, armed = interrupted_at("commit")
    first, second, third = next_version(), next_version(), next_version()
    model = trainer_of(first)
    with connect(model, engines, on_event=listen) as updater:
        updater.update(version=first)
        model.set_version(second)
        armed.append(1)
        with pytest.raises(KeyboardInterrupt):
            updater.update(version=second)
        assert second in [free(engine).version for engine in engines]
        assert not any(active for _, active in states(updater))

        model.set_version(third)  # training goes on
        with pytest.raises(ConfigError, match=f"version {second} was sent before, with other weights") as caught:
            updater.update(version=second)
        assert f"version={second + 1}" in caught.value.hint
        assert [row.status for row in caught.value.report.targets] == ["untouched"] * 2
        assert {free(engine).version for engine in engines} <= {first, second}

        report = updater.update()
        assert report.ok
        assert report.version == second + 1 == third
        assert [serves_whole(engine) for engine in engines] == [third] * 2


def test_the_same_weights_may_be_sent_again_under_their_number(fresh):
    """As a loop does that numbers by step and repeats a step's update which was interrupted."""
    engines = [fresh("--local"), fresh("--local")]
    listen, armed = interrupted_at("commit")
    first, second = next_version(), next_version()
    model = trainer_of(first)
    with connect(model, engines, on_event=listen) as updater:
        updater.update(version=first)
        model.set_version(second)
        armed.append(1)
        with pytest.raises(KeyboardInterrupt):
            updater.update(version=second)
        assert updater.update(version=second).ok
        assert updater.update(version=second).ok
        assert [serves_whole(engine) for engine in engines] == [second] * 2
        assert states(updater) == [("serving", True)] * 2


@pytest.mark.parametrize("verify", ["resident", "none"])
def test_a_version_that_serves_is_not_replaced_by_other_weights_of_its_number(fresh, verify):
    engine = fresh("--local")
    version = next_version()
    model = trainer_of(version)
    with connect(model, [engine], verify=verify) as updater:
        updater.update(version=version)
        model.set_version(next_version())
        with pytest.raises(ConfigError, match=f"version {version} was sent before"):
            updater.update(version=version)
        assert serves_whole(engine) == version
        assert states(updater) == [("serving", True)]


def test_automatic_numbers_go_on_after_what_the_engines_say_when_they_are_asked(fresh):
    """The engine has got a higher version from another trainer since the last update."""
    engine = fresh("--local")
    first, theirs, next_one = next_version(), next_version(), next_version()
    model = trainer_of(first)
    with connect(model, [engine]) as updater:
        updater.update(version=first)
        with connect(trainer_of(theirs), [engine]) as other:
            other.update(version=theirs)
        model.set_version(next_one)
        assert updater.update().version == theirs + 1 == next_one
        assert serves_whole(engine) == next_one


def test_a_number_that_is_too_low_cannot_work_as_asked(fresh):
    engines = [fresh("--local"), fresh("--local")]
    old, new = next_version(), next_version()
    model = trainer_of(new)
    with connect(model, engines) as updater:
        updater.update(version=new)
        model.set_version(old)
        refused = f"version {old} is older than {new}, which {engines[0].url} serves"
        with pytest.raises(ConfigError, match=refused) as caught:
            updater.update(version=old)
        assert "count" in caught.value.hint
        assert [(row.status, row.version_after) for row in caught.value.report.targets] == [("untouched", new)] * 2
        assert states(updater) == [("serving", True)] * 2
    assert [serves_whole(engine) for engine in engines] == [new] * 2


@pytest.mark.parametrize("version", [LIMIT + 1, 2**64, -1, True, 1.0, "3"])
def test_a_number_that_no_engine_takes_is_refused_with_the_limit(engines, version):
    with connect(trainer_of(0), [engines.one]) as updater, pytest.raises(ConfigError, match=str(LIMIT)):
        updater.update(version=version)
