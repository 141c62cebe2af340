"""Cells on one GPU and on two: several NCCL communicators at once, and engines that die in one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.gpu.cells import (
    Fleet,
    Layout,
    check_killed,
    check_mixed,
    check_stopped_in_two_cells,
    check_three_updates,
    fleet_on,
)
from tests.gpu.needs import needs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(400),  # the first test waits for all processes to start
]

MESSAGES = {"transport": "direct", "direct_by": "messages"}
Record = Callable[[str, Any], None]


# On one GPU, NCCL takes each process for another machine's and reaches it over sockets.  On two, it reaches at most one
# engine of each cell over NVLink, and the others over sockets.
LAYOUTS = [
    pytest.param(Layout(trainer="cuda:0", engines="cuda:0"), id="one GPU"),
    pytest.param(Layout(trainer="cuda:0", engines="cuda:1", together=(0, 2)), id="two GPUs", marks=needs(2)),
]


@pytest.fixture(scope="module", params=LAYOUTS)
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with fleet_on(request.param) as started:
        yield started


@pytest.mark.parametrize(("cell_ranks", "cells"), [(2, [[0, 1], [2]]), (1, [[0], [1], [2]])])
def test_engines_in_cells_hold_what_was_broadcast(
    fleet: Fleet, cell_ranks: int, cells: list[list[int]], record: Record
) -> None:
    answers = check_three_updates(
        fleet, {"transport": "broadcast", "advanced": {"cell_ranks": cell_ranks}}, cells=cells, copies=0
    )
    record("seconds_of_the_third", answers[0]["seconds"])


@pytest.mark.parametrize(("way", "copies"), [("messages", 3), ("relay", 2)])
def test_engines_in_cells_hold_what_trainer_ranks_sent_them(
    fleet: Fleet, way: str, copies: int, record: Record
) -> None:
    options = MESSAGES | {"direct_by": way, "advanced": {"cell_ranks": 2}}
    answers = check_three_updates(fleet, options, cells=[[0, 1], [2]], copies=copies)
    record("seconds_of_the_third", answers[0]["seconds"])


def test_memory_on_one_host_and_messages_between_two_in_one_update(fleet: Fleet, record: Record) -> None:
    answers = check_mixed(fleet)
    record("sent_bytes", [answer["sent_bytes"] for answer in answers])


def test_engines_that_stop_in_two_cells_at_once_hold_up_nobody_for_ever(fleet: Fleet, record: Record) -> None:
    record("answer", check_stopped_in_two_cells(fleet, {"transport": "broadcast"}))


def test_the_rest_of_the_cell_of_a_killed_engine_commits_in_the_same_update(fleet: Fleet, record: Record) -> None:
    record("answer", check_killed(fleet, {"transport": "broadcast"}))


def test_an_engine_that_is_killed_in_messages_is_named_and_the_others_commit(fleet: Fleet, record: Record) -> None:
    record("answer", check_killed(fleet, MESSAGES))
