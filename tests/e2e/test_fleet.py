"""Engines that come late, go, or come back: none counts before it serves the current version in full."""

from __future__ import annotations

import signal

import pytest

from tests.helpers.harness import connect, next_version, push, serves_whole, trainer_of, wait_for
from weightcast import Target
from weightcast.errors import ConfigError, TargetUnreachable

pytestmark = pytest.mark.deadlines


def update_anew(updater, model):
    """To a version that nobody has had."""
    version = next_version()
    model.set_version(version)
    return updater.update(version=version)


def states(updater) -> list[tuple[str, bool]]:
    return [(row.state, row.active) for row in updater.health()]


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_who_comes_late_is_brought_to_the_current_version_and_counts_from_then_on(engines, fresh, transport):
    late = fresh("--local")
    version = next_version()
    model = trainer_of(version)
    with connect(model, [engines.one], transport=transport) as updater:
        assert states(updater) == [("joining", False)]
        updater.update(version=version)
        assert states(updater) == [("serving", True)]
        assert updater.retarget([engines.one.url], catch_up=True) is None  # nobody is behind

        report = updater.retarget([engines.one.url, late.url], catch_up=True)

        assert [(row.url, row.status, row.version_before) for row in report.targets] == [(late.url, "serving", 0)]
        assert report.version == serves_whole(late) == serves_whole(engines.one) == version
        assert states(updater) == [("serving", True)] * 2
        report = update_anew(updater, model)
        assert report.ok
        assert serves_whole(late) == serves_whole(engines.one) == report.version


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_nobody_is_brought_in_with_weights_that_have_changed_since(engines, fresh, transport):
    late = fresh("--local")
    version = next_version()
    model = trainer_of(version)
    with connect(model, [engines.one], transport=transport) as updater:
        updater.update(version=version)
        model.set_version(next_version())
        with pytest.raises(ConfigError, match=f"no longer those of version {version}"):
            updater.retarget([engines.one.url, late.url], catch_up=True)
        assert serves_whole(late) == 0
        assert serves_whole(engines.one) == version
        assert states(updater) == [("serving", True), ("joining", False)]
        report = update_anew(updater, model)
        assert report.ok
        assert serves_whole(late) == serves_whole(engines.one) == report.version
        assert states(updater) == [("serving", True)] * 2


def test_nobody_is_brought_in_where_no_digest_says_what_the_weights_were(engines, fresh):
    late = fresh("--local")
    version = next_version()
    model = trainer_of(version)
    with connect(model, [engines.one], verify="none") as updater:
        updater.update(version=version)
        with pytest.raises(ConfigError, match=f"version {version}: no digest"):
            updater.retarget([engines.one.url, late.url], catch_up=True)
        assert serves_whole(late) == 0
        report = update_anew(updater, model)
        assert report.ok
        assert serves_whole(late) == serves_whole(engines.one) == report.version


def test_a_target_may_get_another_key(engines, fresh):
    dead = fresh("--local")
    dead.close()
    model = trainer_of(next_version())

    def update() -> None:
        report = update_anew(updater, model)
        assert report.ok
        assert serves_whole(engines.one) == report.version

    with connect(model, [engines.one], timeout_s=60.0) as updater:
        update()
        updater.retarget([Target(engines.one.url, api_key="new")])
        update()
        # What cannot be: the old ones stay, with the connection that they had.
        with pytest.raises(TargetUnreachable):
            updater.retarget([Target(engines.one.url, api_key="newer"), dead.url])
        update()
        with pytest.raises(ConfigError, match="CA file"):
            updater.retarget([Target("https://127.0.0.1:1", ca_file="/nowhere")])
        update()
    with pytest.raises(ConfigError, match="closed"):
        updater.retarget([engines.one.url])


def test_before_the_first_update_there_is_nothing_to_catch_up_with(engines, fresh):
    late = fresh("--local")
    with connect(trainer_of(1), [engines.one]) as updater:
        assert updater.retarget([engines.one.url, late.url], catch_up=True) is None
    assert serves_whole(late) == 0


def test_states_follow_what_happens(engines, fresh):
    spare = fresh("--local")
    model = trainer_of(next_version())

    def update():
        return update_anew(updater, model)

    with connect(model, [engines.one, spare], timeout_s=8.0, on_failure="quarantine") as updater:
        update()
        assert states(updater) == [("serving", True)] * 2
        spare.signal(signal.SIGSTOP)
        update()
        assert states(updater) == [("serving", True), ("quarantined", False)]
        spare.signal(signal.SIGCONT)

        def is_back() -> bool:
            update()  # which does not wait for one that stood still
            return states(updater) == [("serving", True)] * 2

        wait_for(is_back, "the engine that goes on")
        spare.close()
        update()
        assert states(updater) == [("serving", True), ("gone", False)]
        assert spare.url in updater.health()[1].reason
        back = fresh("--local", port=spare.port)
        assert serves_whole(back) == 0
        report = update()
        assert states(updater) == [("serving", True)] * 2
        assert serves_whole(back) == report.version

        # Somebody else updates it: what it serves is not what we gave it.
        push([back], next_version())
        updater.retarget([engines.one.url, back.url])
        assert states(updater) == [("serving", True), ("joining", False)]
