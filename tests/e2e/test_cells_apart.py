"""The checks of ``tests/gpu/cells.py`` on CPUs, with gloo and shared memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.cells import (
    Fleet,
    Layout,
    check_killed,
    check_mixed,
    check_stopped_in_two_cells,
    check_three_updates,
    fleet_on,
)

# Python starts each of their processes, which is what GPUs need; test_cells.py has more cases, and forks.
pytestmark = [pytest.mark.wide, pytest.mark.deadlines]

MESSAGES = {"transport": "direct", "direct_by": "messages"}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with fleet_on(Layout(trainer="cpu", engines="cpu")) as started:
        yield started


@pytest.mark.parametrize(("cell_ranks", "cells"), [(2, [[0, 1], [2]]), (1, [[0], [1], [2]])])
def test_engines_in_cells_hold_what_was_broadcast(fleet: Fleet, cell_ranks: int, cells: list[list[int]]) -> None:
    check_three_updates(
        fleet, {"transport": "broadcast", "advanced": {"cell_ranks": cell_ranks}}, cells=cells, copies=0
    )


@pytest.mark.parametrize(("way", "copies"), [("messages", 3), ("relay", 2)])
def test_engines_in_cells_hold_what_trainer_ranks_sent_them(fleet: Fleet, way: str, copies: int) -> None:
    options = MESSAGES | {"direct_by": way, "advanced": {"cell_ranks": 2}}
    check_three_updates(fleet, options, cells=[[0, 1], [2]], copies=copies)


def test_memory_on_one_host_and_messages_between_two_in_one_update(fleet: Fleet) -> None:
    check_mixed(fleet)


def test_engines_that_stop_in_two_cells_at_once_hold_up_nobody_for_ever(fleet: Fleet) -> None:
    check_stopped_in_two_cells(fleet, {"transport": "broadcast"})


def test_the_rest_of_the_cell_of_a_killed_engine_commits_in_the_same_update(fleet: Fleet) -> None:
    check_killed(fleet, {"transport": "broadcast"})


def test_an_engine_that_is_killed_in_messages_is_named_and_the_others_commit(fleet: Fleet) -> None:
    check_killed(fleet, MESSAGES)
