"""Engines of one role that pass weights on to each other, over ``direct`` by relay."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.e2e.test_direct import RELAY, lose_an_engine, sharded
from tests.helpers.harness import next_version, on_every_rank, serves_whole, set_shards
from tests.helpers.ranks import Ranks
from weightcast.comm.group_moves import Move
from weightcast.comm.update_group import UpdateGroup
from weightcast.lab.connect import connect as connect_in_lab


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    job = Ranks(2)
    yield job
    job.close()


def update_and_count(urls: list[str], versions: list[int], way: str) -> tuple[list[str], int]:
    """The report of each update, and the bytes that this trainer rank sent in all of them."""
    start_moves, sent = UpdateGroup.start_moves, [0]

    def counting(self: UpdateGroup, sends: Sequence[Move]) -> list[Any]:
        sent[0] += sum(move.data.nbytes for move in sends)
        return start_moves(self, sends)

    UpdateGroup.start_moves = counting  # type: ignore[method-assign]
    model = sharded(versions[0], (2,))
    reports: list[str] = []
    try:
        with connect_in_lab(
            model, urls, transport="direct", direct_by=way, bucket_bytes=100_000, timeout_s=60.0
        ) as updater:
            for version in versions:
                set_shards(model, version)
                reports.append(on_every_rank(updater.update(version=version)))
    finally:
        UpdateGroup.start_moves = start_moves  # type: ignore[method-assign]
    return reports, sent[0]


def test_trainer_ranks_send_each_piece_once_however_many_engines_there_are(fresh, ranks):
    chosen = [fresh("--tp", "2") for _ in range(3)]
    urls = [engine.url for engine in chosen]
    sent: dict[str, int] = {}
    for way in ("messages", "relay"):
        versions = [next_version(), next_version()]
        told = ranks.run(update_and_count, urls, versions, way)
        for reports, _ in told:
            for version, text in zip(versions, reports, strict=True):
                rows = json.loads(text)["targets"]
                assert [(row["version_after"], row["proof"]) for row in rows] == [(version, "resident")] * 3
        assert [serves_whole(engine) for engine in chosen] == [versions[-1]] * 3
        sent[way] = sum(count for _, count in told)
    assert sent["messages"] == 3 * sent["relay"] > 0


@pytest.mark.parametrize("place", [1, 2], ids=["in the middle", "at the end"])
def test_only_the_engine_that_dies_is_left_out_wherever_it_stands_in_the_chain(fresh, ranks, place):
    chosen = [fresh("--local") for _ in range(3)]
    versions = [next_version(), next_version()]
    victim = chosen[place].info().ranks[0].pid
    told = ranks.run(lose_an_engine, [engine.url for engine in chosen], victim, versions, RELAY)
    assert told[0] == told[1]
    for version, text in zip(versions, told[0], strict=True):
        rows = json.loads(text)["targets"]
        assert rows.pop(place)["status"] != "serving"
        assert [(row["version_after"], row["proof"]) for row in rows] == [(version, "resident")] * 2
    assert [serves_whole(engine) for engine in chosen if engine is not chosen[place]] == [versions[-1]] * 2
