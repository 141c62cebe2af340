"""Only a target that completed the fleet's version is active, after any order of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weightcast.fleet.health import NEXT, Fleet

A, B, C = "http://a:1", "http://b:2", "http://c:3"


def serving(*urls: str, version: int = 1) -> Fleet:
    fleet = Fleet(urls)
    for url in urls:
        fleet.answered(url, version=0, incarnation=url)
        fleet.opened(url)
    for url in urls:
        fleet.committed(url, version=version)
    return fleet


def test_answer_to_a_probe_makes_no_target_active():
    fleet = Fleet([A, B])
    assert [row.state for row in fleet.report()] == ["gone", "gone"]
    fleet.answered(A, version=7, incarnation=1)
    assert (fleet.state(A), fleet.active) == ("joining", ())
    fleet.opened(A)
    assert (fleet.state(A), fleet.active) == ("updating", ())
    fleet.committed(A, version=8)
    assert (fleet.state(A), fleet.active, fleet.version) == ("serving", (A,), 8)
    fleet.answered(A, version=8, incarnation=1)
    assert fleet.active == (A,)
    assert fleet.state("http://nobody:1") == "gone"


def test_target_left_behind_is_not_active():
    fleet = serving(A, B)
    for url in (A, B):
        fleet.opened(url)
    fleet.committed(A, version=2)
    fleet.kept(B)  # whole, but old
    assert fleet.state(B) == "serving"
    assert fleet.active == (A,)
    fleet.broken(B, "refused bucket 3")
    assert (fleet.state(B), fleet.report()[1].reason) == ("quarantined", "refused bucket 3")
    fleet.answered(B, version=1, incarnation=B)
    assert fleet.state(B) == "quarantined"
    fleet.opened(B)
    fleet.kept(B)
    assert fleet.state(B) == "quarantined"
    fleet.opened(B)
    fleet.committed(B, version=2)
    assert fleet.active == (A, B)


@pytest.mark.parametrize("version", [0, 1])
def test_restarted_target_waits_for_an_update(version):
    fleet = serving(A)
    fleet.answered(A, version=version, incarnation="other processes")
    assert (fleet.state(A), fleet.active) == ("joining", ())
    assert fleet.report()[0].reason == "came back"


def test_engine_that_no_longer_reports_its_version_has_restarted():
    fleet = serving(A)
    fleet.answered(A, version=None, incarnation=A)
    assert (fleet.state(A), fleet.active) == ("joining", ())
    assert fleet.report()[0].version is None
    assert "no longer says that it serves version 1" in fleet.report()[0].reason
    fleet.opened(A)
    fleet.committed(A, version=2)
    assert fleet.active == (A,)


def test_engine_without_version_stays_active_if_a_restart_would_show():
    fleet = serving(A)
    fleet.answered(A, version=None, incarnation=A, tells_version=False)
    assert (fleet.active, fleet.report()[0].version) == ((A,), 1)
    fleet.answered(A, version=None, incarnation="another start", tells_version=False)
    assert (fleet.state(A), fleet.active) == ("joining", ())


def test_engine_that_shows_neither_version_nor_restart_is_inactive_after_a_probe():
    fleet = serving(A)
    fleet.answered(A, version=None, incarnation=A, tells_version=False, shows_restart=False)
    assert (fleet.state(A), fleet.active) == ("joining", ())
    assert "cannot say whether it has restarted" in fleet.report()[0].reason


def test_target_updated_by_another_trainer_waits_for_an_update():
    fleet = serving(A)
    fleet.answered(A, version=12, incarnation=A)
    assert (fleet.state(A), fleet.active) == ("joining", ())


def test_members_come_and_go():
    fleet = serving(A, B)
    fleet.retarget([B, C])
    assert fleet.active == (B,)
    assert [row.url for row in fleet.report()] == [B, C]
    assert fleet.state(C) == "gone"
    fleet.retarget([A, B])
    assert fleet.state(A) == "gone"  # who knows what became of it meanwhile


def test_impossible_event_fails_an_assertion():
    fleet = Fleet([A])
    with pytest.raises(AssertionError, match="opened while gone"):
        fleet.opened(A)
    with pytest.raises(AssertionError, match="committed while gone"):
        fleet.committed(A, version=1)
    fleet.kept(A)  # harmless: nothing was open


def test_only_a_commit_leads_to_serving():
    ways = [(state, event) for state, moves in NEXT.items() for event, to in moves.items() if to == "serving"]
    assert sorted(ways) == [("serving", "answered"), ("updating", "committed")]
    assert {event for event, to in NEXT["quarantined"].items() if to not in ("quarantined", "gone")} == {
        "restarted",
        "opened",
    }


class AnyHistory(RuleBasedStateMachine):
    """A model of the real engines: which versions they hold whole, and which have only answered a probe."""

    urls = st.sampled_from([A, B, C])

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet([A, B, C])
        self.whole: dict[str, int | None] = dict.fromkeys([A, B, C], 0)  # None: a mixture, or nobody
        self.born: dict[str, int] = dict.fromkeys([A, B, C], 0)
        self.version = 0
        self.births = 0

    @rule(url=urls)
    def probe(self, url):
        self.fleet.answered(url, version=self.whole[url], incarnation=self.born[url])

    @rule(url=urls)
    def restart(self, url):
        self.births += 1
        self.born[url], self.whole[url] = self.births, 0
        self.fleet.answered(url, version=0, incarnation=self.births)

    @rule(url=urls)
    def vanish(self, url):
        self.whole[url] = None
        self.fleet.lost(url, "refused")

    @rule(url=urls)
    def fall_silent(self, url):
        self.fleet.silent(url, "deadline")

    @rule(url=urls)
    def end_half_way(self, url):
        self.whole[url] = None
        self.fleet.broken(url, "half written")

    @rule(members=st.sets(urls), outcome=st.fixed_dictionaries({url: st.booleans() for url in (A, B, C)}))
    @precondition(lambda self: self.version < 20)
    def update(self, members, outcome):
        takes_part = [url for url in sorted(members) if self.fleet.state(url) in ("joining", "serving", "quarantined")]
        self.version += 1
        for url in takes_part:
            self.fleet.opened(url)
        for url in takes_part:
            if outcome[url]:
                self.whole[url] = self.version
                self.fleet.committed(url, version=self.version)
            else:
                self.fleet.kept(url)

    @invariant()
    def active_means_whole_and_current(self):
        for url in self.fleet.active:
            assert self.whole[url] == self.fleet.version
        assert {row.url for row in self.fleet.report() if row.active} == set(self.fleet.active)


AnyHistory.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyHistory = AnyHistory.TestCase
