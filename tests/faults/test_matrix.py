"""The fault matrix has the cases that it should, plays them in any order, and writes what came out."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import get_args

import pytest

from tests.faults import playing
from tests.faults.cases import STEPS, all_cases
from tests.faults.kinds import KINDS
from tests.faults.playing import play_side_by_side
from tests.faults.table import write_page
from tests.faults.world import Result
from tests.helpers.commands import parents
from weightcast.config import DirectBy

pytestmark = pytest.mark.deadlines

LIMITS = {"deadline_s": 4.0, "patience_s": 30.0}  # for a slow machine beside other tests
NOTHING = {"words": "", "deadline_s": 1.5}
CASES = {case.name: case for case in all_cases()}


SOME = [
    CASES[name]
    for name in (
        "native, ipc: engine, kill at commit",
        "native, ipc: engine, stop at after",
        "native, ipc: trainer head, delay at middle bucket",
    )
]


@pytest.fixture
def _quick_players(monkeypatch: pytest.MonkeyPatch) -> None:
    """Players come from the tests' fork server.  Python would import all for each, and for a server of its own."""
    monkeypatch.setattr(playing, "_spawned", parents)


@pytest.mark.wide  # as `make faults` plays them; twenty seconds
@pytest.mark.usefixtures("_quick_players")
def test_cases_side_by_side_are_those_of_one_after_the_other() -> None:
    played = list(play_side_by_side(SOME, jobs=2, **LIMITS))
    for result, _ in played:
        assert not result.wrong, result
    assert [result.outcome for case in SOME for result, _ in played if result.case == case.name] == [
        *("left out", "left out", "unharmed"),
    ]


@pytest.mark.usefixtures("_quick_players")
def test_a_case_whose_process_died_is_wrong_and_the_next_one_is_played(monkeypatch) -> None:
    monkeypatch.setattr(playing, "_serve", _dies_at_ipc)
    chosen = [
        CASES[name] for name in ("native, ipc: engine, kill at commit", "native, broadcast: engine, kill at open")
    ]
    results = [result for result, _ in play_side_by_side(chosen, jobs=1, **LIMITS)]
    assert [(result.case, result.wrong) for result in results] == [
        (chosen[0].name, (playing.PLAYER_DIED,)),
        (chosen[1].name, ()),
    ]


def test_an_engine_that_does_not_start_costs_its_case_and_not_the_run(monkeypatch) -> None:
    class Broken:
        def __init__(self, kind: str, **_: object) -> None:
            assert kind != "native", "the engine did not start:\nits log"
            raise KeyboardInterrupt

    monkeypatch.setattr(playing, "World", Broken)
    sglang = CASES["sglang, ipc: trainer rank, kill at middle bucket"]
    played = playing.play([*SOME[:2], sglang], deadline_s=None)
    assert [next(played)[0].wrong for _ in range(2)] == [("the engine did not start:",)] * 2
    with pytest.raises(KeyboardInterrupt):  # what ends a run still does
        next(played)


def _dies_at_ipc(pipe: Connection, deadline_s: float | None, patience_s: float) -> None:
    case = pipe.recv()
    if case.transport == "ipc":
        os._exit(3)
    row = {"case": case.name, "kind": case.kind, "transport": case.transport, "on": case.on, "fault": case.fault}
    pipe.send((Result(**row, **NOTHING, step=case.step, outcome="", seconds=1.0, later_s=0.0, wrong=()), 1.0))


def test_every_case_has_a_name_of_its_own_and_every_step_has_cases() -> None:
    assert len(CASES) == len(list(all_cases())) > 350
    for kind in KINDS.values():
        mine = [case for case in CASES.values() if case.kind == kind.name]
        assert {case.transport for case in mine} == set(kind.transports)
        ends = {"last bucket"} if kind.stock else {"close"}
        assert {case.step for case in mine} >= set(STEPS) - {"first bucket"} - ends
        assert {case.fault for case in mine} >= {"kill", "stop", "delay", "drop", "refuse", "flip"}
        direct = all(transport.startswith("direct") for transport in kind.transports)
        assert {case.on for case in mine} >= ({"replica"} if direct else {"gather", "replica"})
    ways = {case.transport.removeprefix("direct ") for case in CASES.values() if case.transport.startswith("direct ")}
    assert ways == set(get_args(DirectBy)) - {"auto"}
    assert {case.transport for case in CASES.values() if case.step == "join"} == {
        *("broadcast", "direct messages", "direct mixed", "direct relay"),
    }
    assert {case.step for case in CASES.values() if case.on == "memory"} == {
        *("first bucket", "middle bucket", "last bucket"),
    }


@pytest.mark.parametrize(
    ("words", "late"),
    [
        ("trainer rank 0: update 1 took 9.1 s of 6.2 s", True),
        ("nobody was updated: UpdateFailed: update to version 3 failed: http://a: waited 4 s for bucket 1", True),
        ("nobody was updated: the rendezvous cannot listen at a: The client socket has timed out after 4000ms", True),
        ("the bystander did not go on: http://a: waited 4 s for the answer to POST /open", True),
        ("nobody was updated: UpdateFailed: http://a refused POST /open", False),
        ("a flipped bit was not found: http://a: waited 4 s for bucket 1", False),
        ("bystander serves 3 after an update to 4", False),
    ],
)
def test_lack_of_time_explains_deadlines_and_never_what_is_served(words: str, late: bool) -> None:
    row = {"case": "x", "kind": "native", "transport": "ipc", "on": "engine", "fault": "kill"} | NOTHING
    result = Result(**row, step="open", outcome="given up", seconds=9.0, later_s=0.5, wrong=(words,))
    assert result.only_late is late


def test_the_page_has_a_table_and_names_what_was_wrong(tmp_path) -> None:
    page = tmp_path / "page.md"
    row = {"case": "x", "kind": "native", "transport": "ipc", "on": "engine", "fault": "kill"} | NOTHING
    good = Result(**row, step="commit", outcome="left out", seconds=1.25, later_s=0.5, wrong=())
    bad = Result(**row, step="open", outcome="left out", seconds=9.0, later_s=0.5, wrong=("it hung",))
    again = Result(**row, step="join", outcome="left out", seconds=1.0, later_s=0.5, wrong=(), before=("was late",))
    write_page(page, [bad, good, again], played="Played today.")
    text = page.read_text()
    assert text.endswith("Played today.\n")
    assert "\n## native, ipc, `timeout_s=1.5`" in text
    assert "| engine | kill | **wrong** 9.0 | left out 1.0 | left out 1.2 |" in text
    assert f"3 of {len(CASES)} cases were played, 1 came out wrong" in text
    assert "it hung" in text
    assert "Wrong when first played, and right when played again, alone: 1.\n\n- x: was late" in text
