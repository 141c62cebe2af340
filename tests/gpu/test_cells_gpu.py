"""Cells on one GPU and on two: several NCCL communicators at once, and engines that die in one of them."""

from __future__ import annotations

import secrets
import threading
import time
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
from weightcast.comm.rendezvous import GroupFailed, Rendezvous, here, with_token
from weightcast.comm.update_group import UpdateGroup

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


def test_a_member_hears_that_the_head_gives_up_while_nccl_waits_for_another_one() -> None:
    place, token, cancelled = Rendezvous(host="127.0.0.1", timeout_s=300.0), secrets.token_hex(16), threading.Event()
    same: dict[str, Any] = {"name": "g", "token": token, "world_size": 3}
    same |= {"device": torch.device("cuda:0"), "timeout_s": 300.0}
    heard: list[BaseException] = []

    def join() -> None:
        try:
            UpdateGroup.join(host="127.0.0.1", port=place.port, rank=1, **same)
        except GroupFailed as error:
            heard.append(error)

    dead = with_token(place.visit(), token)  # a member that comes, and dies before it enters NCCL
    assert dead.add(here(2, 3), 1) == 1
    assert dead.add("arrived/3", 1) == 1
    member = threading.Thread(target=join, daemon=True)
    member.start()
    threading.Timer(5.0, cancelled.set).start()
    with pytest.raises(GroupFailed, match="cancelled"):
        UpdateGroup(store=lambda: place.store, address="127.0.0.1", rank=0, cancelled=cancelled, **same)
    given_up = time.monotonic()
    member.join(60.0)
    assert heard, "the member still waits"
    assert time.monotonic() - given_up < 20.0
    assert "cancelled" in str(heard[0])
