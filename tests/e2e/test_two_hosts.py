"""A trainer on two hosts updates the engines of both: on each host one rank speaks to the engines there.

The hosts are processes with another boot id, another name, and no way into the memory of the other hosts' processes.
"""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch.distributed as dist

from tests.e2e.test_direct import SHARDS, in_shared_memory, sharded
from tests.helpers.harness import Engine, next_version, on_every_rank, serves_whole, set_shards
from tests.helpers.placed import move_to_host_a, move_to_host_b, move_to_host_c, needs_root
from tests.helpers.ranks import Ranks
from weightcast.comm.shared_buckets import SharedSlot
from weightcast.errors import ConfigError, TrainerRankFailed
from weightcast.lab.connect import connect as connect_in_lab

pytestmark = [pytest.mark.deadlines, needs_root]
PATIENT_S = 60.0
RANKS_ON_A = 2


def to_its_host(rank: int) -> None:
    """Ranks 0 and 1 run on host a, ranks 2 and 3 on host b."""
    move_to_host_a() if rank < RANKS_ON_A else move_to_host_b()


@pytest.fixture(scope="module")
def job():
    ranks = Ranks(4, place=to_its_host)
    yield ranks
    ranks.close()


def update_each(urls: list[str], versions: list[int], mesh_shape: tuple[int, ...], options: dict) -> list[str]:
    """The transport chosen at connect, and the report of each update; the weights are changed before each."""
    options = {"bucket_bytes": 30_000, "timeout_s": PATIENT_S} | options
    model = (in_shared_memory if options.get("keep_mapped") else sharded)(next_version(), mesh_shape)
    with connect_in_lab(model, urls, **options) as updater:
        told = [updater.transport]
        for version in versions:
            set_shards(model, version)
            told.append(on_every_rank(updater.update(version=version)))
    return told


def check_updates(job: Ranks, engines: list[Engine], ways: list[str], mesh: tuple[int, ...], **options) -> None:
    """Updates twice, and checks that every rank heard of the same proven reports and every engine has the weights."""
    versions = [next_version(), next_version()]
    before = [serves_whole(engine) for engine in engines]
    assert before == [0] * len(engines)
    answers = job.run(update_each, [engine.url for engine in engines], versions, mesh, options)
    assert all(answer == answers[0] for answer in answers)
    chosen, *reports = answers[0]
    assert chosen == "+".join(dict.fromkeys(ways))
    for version, report in zip(versions, reports, strict=True):
        rows = json.loads(report)["targets"]
        assert [(row["transport"], row["proof"]) for row in rows] == [(way, "resident") for way in ways]
        assert [row["version_after"] for row in rows] == [version] * len(engines)
        assert not any("gave way" in note for row in rows for note in row["notes"])
    assert [serves_whole(engine) for engine in engines] == [versions[-1]] * len(engines)
    digests = [engine.digests() for engine in engines]
    assert digests == [digests[0]] * len(engines)


def test_engines_on_both_hosts_map_the_buckets_of_a_rank_on_their_own_host(job, placed):
    check_updates(job, [placed(move_to_host_a), placed(move_to_host_b)], ["ipc", "ipc"], (4,))


def test_engines_on_the_second_host_alone_map_the_buckets_of_its_rank(job, placed):
    check_updates(job, [placed(move_to_host_b), placed(move_to_host_b)], ["ipc", "ipc"], (4,), transport="ipc")


def test_engine_on_a_host_without_a_trainer_rank_goes_by_broadcast_in_the_same_update(job, placed):
    chosen = [placed(move_to_host_a), placed(move_to_host_b), placed(move_to_host_c)]
    check_updates(job, chosen, ["ipc", "ipc", "broadcast"], (4,))


@pytest.mark.parametrize(
    "options",
    [{"transport": "direct", "direct_by": "memory"}, SHARDS | {"transport": "auto"}],
    ids=["memory", "shards"],
)
def test_engines_read_the_replica_on_their_own_host(job, placed, options):
    chosen = [placed(move_to_host_a), placed(move_to_host_b), placed(move_to_host_b)]
    check_updates(job, chosen, ["direct"] * 3, (2, 2), **options)


def test_auto_gathers_where_no_host_has_a_whole_replica(job, placed):
    check_updates(job, [placed(move_to_host_a), placed(move_to_host_b)], ["ipc", "ipc"], (4,), **SHARDS)


def refused(urls: list[str], mesh_shape: tuple[int, ...], options: dict) -> str:
    with pytest.raises(ConfigError) as raised:
        update_each(urls, [next_version()], mesh_shape, options)
    return str(raised.value)


def test_memory_that_is_no_whole_replica_and_a_host_without_trainer_ranks_are_refused_by_name(job, placed):
    there, beyond = placed(move_to_host_b), placed(move_to_host_c)
    for text in job.run(refused, [there.url], (4,), {"transport": "direct", "direct_by": "memory"}):
        assert f"the trainer ranks on the host of {there.url} do not hold all weights together" in text
    for text in job.run(refused, [beyond.url], (4,), {"transport": "ipc"}):
        assert f"{beyond.url} runs on another host; ipc needs a trainer rank on the engine's host" in text
    assert serves_whole(there) == serves_whole(beyond) == 0


def lose_the_speaker(urls: list[str], version: int, number: int) -> str:
    """An update in which the rank that speaks on host b is gone, or silent, when it should tell of its third bucket."""
    share, seen = SharedSlot.share, []

    def lost(self, **options):
        seen.append(1)
        if dist.get_rank() == RANKS_ON_A and len(seen) == 3:
            os.kill(os.getpid(), number)
        return share(self, **options)

    SharedSlot.share = lost
    model = sharded(version, (4,))
    try:
        with connect_in_lab(model, urls, bucket_bytes=30_000, timeout_s=10.0) as updater:
            updater.update(version=version)
    except TrainerRankFailed as error:
        return str(error)
    return "updated"


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.wide)],
)
def test_speaker_that_is_lost_is_named_with_its_host_and_no_engine_switches(job, placed, number):
    chosen, ranks = [placed(move_to_host_a), placed(move_to_host_b)], Ranks(4, place=to_its_host)
    try:
        ranks.start(lose_the_speaker, [engine.url for engine in chosen], next_version(), number)
        for rank in (0, 1, 3):
            assert "trainer rank 2 (host host-b)" in ranks.answer(rank)
    finally:
        ranks.close()
    check_updates(job, chosen, ["ipc", "ipc"], (4,))  # which first sees that both serve version 0 whole
