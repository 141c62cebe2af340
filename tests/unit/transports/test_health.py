"""Only a target that completed the fleet's version is active, after any order of events."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.helpers.roster import info
from weightcast.transports.health import NEXT, LinkHealth
from weightcast.wire.engine_info import NO_RECEIVER, EngineInfo

STOCK = {"protocol": NO_RECEIVER, "kind": "sglang", "tells_version": False}


def said(version: int | None = 1, start: str = "a", **more: Any) -> EngineInfo:
    """The answer of an engine to a probe; ``start`` names its processes."""
    return msgspec.structs.replace(info("native"), version=version, instance=start, **more)


def serving(version: int = 1, answer: EngineInfo | None = None) -> LinkHealth:
    return LinkHealth().answered(answer or said(0)).opened().committed(version)


def test_answer_to_a_probe_makes_no_target_active():
    health = LinkHealth()
    assert health.state == "gone"
    health = health.answered(said(7))
    assert (health.state, health.is_active(None), health.is_active(7)) == ("joining", False, False)
    health = health.opened()
    assert (health.state, health.is_active(7)) == ("updating", False)
    health = health.committed(8)
    assert (health.state, health.is_active(8)) == ("serving", True)
    assert health.answered(said(8)).is_active(8)


def test_target_left_behind_is_not_active():
    health = serving().opened().kept()  # whole, but old
    assert (health.state, health.is_active(1), health.is_active(2)) == ("serving", True, False)
    health = health.broken("refused bucket 3")
    row = health.row("http://b", 2)
    assert (row.state, row.reason, row.active) == ("quarantined", "refused bucket 3", False)
    assert health.answered(said(1)).state == "quarantined"
    assert health.opened().kept().state == "quarantined"
    assert health.opened().committed(2).is_active(2)


@pytest.mark.parametrize("version", [0, 1])
def test_restarted_target_waits_for_an_update(version):
    health = serving().answered(said(version, "other processes"))
    assert (health.state, health.is_active(1)) == ("joining", False)
    assert health.reason == "came back"


def test_engine_that_no_longer_reports_its_version_has_restarted():
    health = serving().answered(said(None))
    assert (health.state, health.version) == ("joining", None)
    assert "no longer says that it serves version 1" in health.reason
    assert health.opened().committed(2).is_active(2)


def test_engine_without_version_stays_active_if_a_restart_would_show():
    health = serving(answer=said(None, **STOCK)).answered(said(None, **STOCK))
    assert (health.is_active(1), health.version) == (True, 1)
    assert health.answered(said(None, "another start", **STOCK)).state == "joining"


def test_engine_that_shows_neither_version_nor_restart_is_inactive_after_a_probe():
    unsure = said(None, "", ranks=(), **STOCK)
    health = serving(answer=unsure).answered(unsure)
    assert (health.state, health.is_active(1)) == ("joining", False)
    assert "cannot say whether it has restarted" in health.reason


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (said(12), "says that it serves version 12"),
        (said(1, digest="0" * 16), f"they have the digest {'0' * 16}, and ours had no digest"),
    ],
)
def test_target_updated_by_another_trainer_waits_for_an_update(answer, reason):
    health = serving().answered(answer)
    assert (health.state, health.is_active(1)) == ("joining", False)
    assert reason in health.reason


def test_impossible_event_fails_an_assertion():
    with pytest.raises(AssertionError, match="opened while gone"):
        LinkHealth().opened()
    with pytest.raises(AssertionError, match="committed while gone"):
        LinkHealth().committed(1)
    assert LinkHealth().kept().state == "gone"  # harmless: nothing was open


def test_only_a_commit_leads_to_serving():
    ways = [(state, event) for state, moves in NEXT.items() for event, to in moves.items() if to == "serving"]
    assert sorted(ways) == [("serving", "answered"), ("updating", "committed")]
    assert {event for event, to in NEXT["quarantined"].items() if to not in ("quarantined", "gone")} == {
        "restarted",
        "opened",
    }


class AnyHistory(RuleBasedStateMachine):
    """A model of the real engines: which versions they hold whole, and which have only answered a probe."""

    names = st.sampled_from("abc")

    def __init__(self) -> None:
        super().__init__()
        self.health = {name: LinkHealth() for name in "abc"}
        self.whole: dict[str, int | None] = dict.fromkeys("abc", 0)  # None: a mixture, or nobody
        self.born: dict[str, int] = dict.fromkeys("abc", 0)
        self.version: int | None = None
        self.births = 0

    def answers(self, name: str) -> None:
        self.health[name] = self.health[name].answered(said(self.whole[name], f"{name}{self.born[name]}"))

    @rule(name=names)
    def probe(self, name):
        self.answers(name)

    @rule(name=names)
    def restart(self, name):
        self.births += 1
        self.born[name], self.whole[name] = self.births, 0
        self.answers(name)

    @rule(name=names)
    def vanish(self, name):
        self.whole[name] = None
        self.health[name] = self.health[name].lost("refused")

    @rule(name=names)
    def fall_silent(self, name):
        self.health[name] = self.health[name].silent("deadline")

    @rule(name=names)
    def end_half_way(self, name):
        self.whole[name] = None
        self.health[name] = self.health[name].broken("half written")

    @rule(members=st.sets(names), outcome=st.fixed_dictionaries({name: st.booleans() for name in "abc"}))
    @precondition(lambda self: (self.version or 0) < 20)
    def update(self, members, outcome):
        takes_part = [name for name in sorted(members) if self.health[name].state != "gone"]
        version = (self.version or 0) + 1
        for name in takes_part:
            opened = self.health[name].opened()
            self.health[name] = opened.committed(version) if outcome[name] else opened.kept()
            if outcome[name]:
                self.whole[name] = self.version = version

    @invariant()
    def active_means_whole_and_current(self):
        for name, health in self.health.items():
            assert not health.is_active(self.version) or self.whole[name] == self.version


AnyHistory.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyHistory = AnyHistory.TestCase
