"""``transport="auto"`` reaches each engine in the best way for it, in one update, and leaves a way that fails."""

from __future__ import annotations

import json
import logging
import signal

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.e2e.test_direct import in_shared_memory, needs_nixl, sharded
from tests.helpers import engines as reference
from tests.helpers.clock import PATIENCE_S
from tests.helpers.harness import connect, next_version, on_every_rank, serves_whole, set_shards, trainer_of, unnamed_s
from tests.helpers.hosts import become_another_user
from tests.helpers.placed import PlacedEngine, move_to_another_host, move_to_host_b, needs_root
from tests.helpers.ranks import Ranks
from tests.helpers.tiny import tiny_model, tiny_tokenizer
from weightcast import WeightUpdater
from weightcast.comm.remote_memory import Arena
from weightcast.errors import ConfigError, UpdateFailed
from weightcast.lab.connect import connect as connect_in_lab
from weightcast.watch.events import Asked, UpdateEnded
from weightcast.wire.bucket_sources import RemoteMemory

pytestmark = [pytest.mark.deadlines, needs_root]


@pytest.fixture(scope="module")
def away():
    """An engine on another host."""
    engine = PlacedEngine(move_to_another_host)
    yield engine
    engine.close()


def update(updater, model):
    version = next_version()
    model.set_version(version)
    report = updater.update(version=version)
    assert report.version == version
    return report


def ways(report) -> list[tuple[str, str]]:
    return [(row.transport, row.proof) for row in report.targets]


def test_engines_here_and_elsewhere_get_one_update_by_two_transports(engines, away):
    model, events = trainer_of(next_version()), []
    with connect(model, [engines.one, away, engines.two], timeout_s=PATIENCE_S, on_event=events.append) as updater:
        assert updater.transport == "ipc+broadcast"
        for _ in range(2):
            report = update(updater, model)
            assert report.ok
            assert report.transport == "ipc+broadcast"
            assert ways(report) == [("ipc", "resident"), ("broadcast", "resident"), ("ipc", "resident")]
            assert {serves_whole(engine) for engine in (engines.one, away, engines.two)} == {report.version}
    assert f"{away.url} (toy 1)" in str(report)
    assert "by broadcast" in str(report)
    assert {event.transport for event in events if isinstance(event, UpdateEnded)} == {"ipc+broadcast"}
    asked = [event for event in events if isinstance(event, Asked)]
    joined = {event.target for event in asked if event.message == "join"}
    assert joined == {away.url}  # nobody else is in the group
    # Nobody commits before everybody has everything.
    commits = [event.began for event in asked if event.message == "commit"]
    buckets = [event.ended for event in asked if event.message == "bucket"]
    middle = (len(buckets)) // 2
    assert min(commits) >= max(sorted(buckets)[:middle])


def test_two_engines_elsewhere_pass_the_weights_on_and_one_alone_gets_a_broadcast(away, placed, caplog):
    caplog.set_level(logging.INFO, "weightcast.update.choose")
    model, other = trainer_of(next_version()), placed(move_to_host_b)
    with connect(model, [away, other], timeout_s=PATIENCE_S) as updater:
        assert updater.transport == "direct"
        for _ in range(2):
            report = update(updater, model)
            assert ways(report) == [("direct", "resident")] * 2
            assert {leg.bytes for row in report.targets for leg in row.legs} == {report.bytes}
            assert serves_whole(away) == serves_whole(other) == report.version
        assert "auto takes direct by relay" in caplog.text
        updater.retarget([away.url])
        assert updater.transport == "broadcast"
        assert ways(update(updater, model)) == [("broadcast", "resident")]


@pytest.mark.parametrize("name", ["auto", "broadcast"])
def test_the_group_is_made_at_connect_and_not_in_the_first_update(engines, away, name):
    model, events = trainer_of(next_version()), []
    with connect(model, [engines.one, away], transport=name, timeout_s=PATIENCE_S, on_event=events.append) as updater:
        joined = {event.target for event in events if isinstance(event, Asked) and event.message == "join"}
        assert joined == ({away.url} if name == "auto" else {engines.one.url, away.url})
        events.clear()
        for _ in range(2):
            report = update(updater, model)
            assert {proof for _, proof in ways(report)} == {"resident"}
            assert {serves_whole(engine) for engine in (engines.one, away)} == {report.version}
        assert not [event for event in events if isinstance(event, Asked) and event.message == "join"]


def test_an_engine_that_is_updated_at_connect_joins_the_group_in_the_first_update(away, caplog):
    caplog.set_level(logging.WARNING, "weightcast")
    model, late = trainer_of(next_version()), list[WeightUpdater]()

    def connect_another(*_: object) -> None:
        if not late:
            late.append(connect(model, [away], transport="broadcast", timeout_s=PATIENCE_S))

    with connect(model, [away], transport="broadcast", timeout_s=PATIENCE_S, progress=connect_another) as first:
        update(first, model)
    assert "no process group could be made with the engines yet" in caplog.text
    assert "being updated by" in caplog.text
    with late[0] as updater:
        assert ways(update(updater, model)) == [("broadcast", "resident")]


@pytest.mark.parametrize("name", ["ipc", "broadcast"])
def test_a_transport_that_is_named_is_used_for_all_or_refused(engines, away, name):
    model = trainer_of(next_version())
    if name == "ipc":
        with pytest.raises(ConfigError, match="runs on another host"):
            connect(model, [engines.one, away], transport=name)
        return
    with connect(model, [engines.one, away], transport=name, timeout_s=PATIENCE_S) as updater:
        report = update(updater, model)
    assert ways(report) == [(name, "resident")] * 2
    assert report.transport == name


def kill_at_bucket(engine, number: int):
    """Returns a listener that kills an engine when another one has answered a bucket."""

    def listen(event) -> None:
        if isinstance(event, Asked) and event.bucket == number and event.target != engine.url:
            engine.signal(signal.SIGKILL)

    return listen


@pytest.mark.parametrize("dies", ["here", "elsewhere"])
@pytest.mark.parametrize("on_failure", ["raise", "quarantine"])
def test_killed_engine_fails_alone_and_no_other_engine_keeps_a_mixture(fresh, placed, dies, on_failure):
    here, there = fresh("--local"), placed(move_to_another_host)
    doomed, other = (here, there) if dies == "here" else (there, here)
    model = trainer_of(next_version())
    with connect(
        model, [here, there], timeout_s=PATIENCE_S, on_failure=on_failure, on_event=kill_at_bucket(doomed, 3)
    ) as updater:
        if on_failure == "raise":
            with pytest.raises(UpdateFailed) as raised:
                update(updater, model)
            report = raised.value.report
        else:
            report = update(updater, model)
        status = {row.url: row.status for row in report.targets}
        assert status == {doomed.url: "quarantined", other.url: "untouched" if on_failure == "raise" else "serving"}
        assert serves_whole(other) == (0 if on_failure == "raise" else report.version)
        updater.retarget([other.url])
        report = update(updater, model)
        assert report.ok
        assert serves_whole(other) == report.version
    assert not any("gave way" in note for row in report.targets for note in row.notes)


@pytest.mark.parametrize("on_failure", ["raise", "quarantine"])
def test_engine_that_cannot_map_memory_gets_the_same_update_by_broadcast(engines, placed, on_failure):
    walled = placed(become_another_user)
    model = trainer_of(next_version())
    with connect(model, [engines.one, walled], timeout_s=PATIENCE_S, on_failure=on_failure) as updater:
        assert updater.transport == "ipc"
        report = update(updater, model)
        assert report.ok
        assert ways(report) == [("ipc", "resident"), ("broadcast", "resident")]
        assert report.transport == updater.transport == "ipc+broadcast"
        assert serves_whole(engines.one) == serves_whole(walled) == report.version
        assert report.targets[0].notes == ()
        (note,) = report.targets[1].notes
        assert note.startswith("ipc gave way to broadcast")
        assert "cannot map memory of process" in note  # the engine's own words
        assert report.phases["recover"] > 0  # what the failed attempt took is no riddle
        assert unnamed_s(report) == pytest.approx(0, abs=1e-3)
        report = update(updater, model)  # which stays with what worked, and needs no second attempt
        assert ways(report) == [("ipc", "resident"), ("broadcast", "resident")]
        assert [row.notes for row in report.targets] == [(), ()]
        assert "recover" not in report.phases
        assert serves_whole(engines.one) == serves_whole(walled) == report.version
        updater.retarget([walled.url])  # which tries again
        assert updater.transport == "ipc"
        report = update(updater, model)
        assert "ipc gave way" in report.targets[0].notes[0]
        assert report.transport == "broadcast"
        assert serves_whole(walled) == report.version


def test_every_engine_may_leave_ipc_in_one_attempt(placed):
    walled = [placed(become_another_user) for _ in range(2)]
    model, events = trainer_of(next_version()), []
    with connect(model, walled, timeout_s=PATIENCE_S, on_event=events.append) as updater:
        report = update(updater, model)
    assert ways(report) == [("broadcast", "resident")] * 2
    assert all("ipc gave way" in row.notes[0] for row in report.targets)
    assert sum(isinstance(event, Asked) and event.message == "open" for event in events) == 4


def test_ipc_that_was_asked_for_by_name_does_not_give_way(engines, placed):
    walled = placed(become_another_user)
    model = trainer_of(next_version())
    before = serves_whole(engines.one)
    with connect(model, [engines.one, walled], transport="ipc", timeout_s=PATIENCE_S) as updater:
        with pytest.raises(UpdateFailed, match="cannot map memory of process") as raised:
            update(updater, model)
        assert {row.transport for row in raised.value.report.targets} == {"ipc"}
        assert serves_whole(walled) == 0
        assert serves_whole(engines.one) == before


def test_engine_that_comes_late_is_reached_in_its_own_way(engines, placed):
    late = placed(move_to_another_host)
    model = trainer_of(next_version())
    with connect(model, [engines.one], timeout_s=PATIENCE_S) as updater:
        assert updater.transport == "ipc"
        version = update(updater, model).version
        report = updater.retarget([engines.one.url, late.url], catch_up=True)
        assert [(row.url, row.transport) for row in report.targets] == [(late.url, "broadcast")]
        assert serves_whole(late) == serves_whole(engines.one) == version
        assert updater.transport == "ipc+broadcast"
        report = update(updater, model)
        assert ways(report) == [("ipc", "resident"), ("broadcast", "resident")]
        assert serves_whole(late) == serves_whole(engines.one) == report.version


def test_engine_elsewhere_that_was_away_at_connect_joins_without_retarget(engines, placed):
    late = placed(move_to_another_host)
    url, port = late.url, late.port
    late.close()
    model = trainer_of(next_version())
    with connect(model, [engines.one, late], timeout_s=PATIENCE_S, on_failure="quarantine") as updater:
        assert updater.transport == "ipc"
        assert [row.status for row in update(updater, model).targets] == ["serving", "quarantined"]
        back = placed(move_to_another_host, "--port", str(port))
        assert back.url == url
        report = update(updater, model)
        assert ways(report) == [("ipc", "resident"), ("broadcast", "resident")]
        assert serves_whole(back) == serves_whole(engines.one) == report.version


def test_weights_that_are_not_finite_are_no_reason_to_leave_a_transport(engines, away):
    model = trainer_of(next_version())
    with connect(model, [engines.one, away], timeout_s=PATIENCE_S) as updater:
        served = update(updater, model).version
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))
        with pytest.raises(UpdateFailed, match="NaN"):
            updater.update(version=next_version())
        assert updater.transport == "ipc+broadcast"
        assert serves_whole(engines.one) == serves_whole(away) == served
        assert update(updater, model).ok


def update_sharded(urls: list[str], versions: list[int]) -> list[str]:
    model = trainer_of(versions[0])
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    found = []
    with connect_in_lab(model, urls, bucket_bytes=30_000, timeout_s=PATIENCE_S) as updater:
        for version in versions:
            found += [updater.transport, on_every_rank(updater.update(version=version))]
        found.append(updater.transport)
    return found


def test_every_trainer_rank_follows_when_a_transport_gives_way(engines, placed, away):
    walled = placed(become_another_user)
    chosen = [engines.two, walled, away]
    version = next_version()
    ranks = Ranks(2)
    try:
        answers = ranks.run(update_sharded, [engine.url for engine in chosen], [version, version])
    finally:
        ranks.close()
    assert answers[0] == answers[1]
    before, first, between, second, after = answers[0]
    assert (before, between, after) == ("ipc+broadcast",) * 3
    for report in (first, second):
        rows = json.loads(report)["targets"]
        assert [row["transport"] for row in rows] == ["ipc", "broadcast", "broadcast"]
        assert [row["proof"] for row in rows] == ["resident"] * 3
    assert "ipc gave way to broadcast" in first
    assert "gave way" not in second
    assert [serves_whole(engine) for engine in chosen] == [version] * 3


def test_engine_without_staging_that_cannot_map_memory_is_made_whole_in_the_same_update(placed):
    walled = placed(become_another_user, "--staging", "none")
    model = trainer_of(next_version())
    with connect(model, [walled], timeout_s=PATIENCE_S) as updater:
        report = update(updater, model)
    assert report.ok
    assert ways(report) == [("broadcast", "resident")]
    assert serves_whole(walled) == report.version


def update_mapped(urls: list[str], versions: list[int]) -> list[str]:
    """Updates with shards that stay mapped, in shared memory."""
    model = in_shared_memory(versions[0], (dist.get_world_size(),))
    options = {"bucket_bytes": 30_000, "timeout_s": PATIENCE_S, "keep_mapped": True}
    with connect_in_lab(model, urls, **options) as updater:
        return [updater.transport, *(on_every_rank(updater.update(version=version)) for version in versions)]


def test_direct_gives_way_for_all_and_ipc_for_the_engine_that_cannot_map_either(engines, placed):
    walled = placed(become_another_user)
    chosen = [engines.one, walled]
    version = next_version()
    ranks = Ranks(2)
    try:
        answers = ranks.run(update_mapped, [engine.url for engine in chosen], [version, version])
    finally:
        ranks.close()
    assert answers[0] == answers[1]
    assert answers[0][0] == "direct"
    for report in answers[0][1:]:
        rows = json.loads(report)["targets"]
        assert [(row["transport"], row["proof"]) for row in rows] == [("ipc", "resident"), ("broadcast", "resident")]
    notes = [[note.split(",")[0] for note in row["notes"]] for row in json.loads(answers[0][1])["targets"]]
    assert notes == [[], ["direct gave way to ipc", "ipc gave way to broadcast"]]
    assert [serves_whole(engine) for engine in chosen] == [version] * 2


def update_by(urls: list[str], versions: list[int], options: dict, lost_at: int) -> list[str]:
    """Updates sharded weights; from its bucket ``lost_at`` on, rank 1's memory is not where NIXL looks for it."""
    memory, told = Arena.memory, list[int]()

    def lost(self: Arena, index: int) -> RemoteMemory:
        told.append(index)
        found = memory(self, index)
        if dist.get_rank() != 1 or len(told) <= lost_at:
            return found
        return msgspec.structs.replace(found, first_byte=1 << 40)

    model, found = sharded(versions[0], (dist.get_world_size(),)), list[str]()
    Arena.memory = lost
    try:
        with connect_in_lab(model, urls, bucket_bytes=30_000, timeout_s=PATIENCE_S, **options) as updater:
            for version in versions:
                set_shards(model, version)
                found += [updater.transport, on_every_rank(updater.update(version=version))]
    finally:
        Arena.memory = memory
    return [*found, str(len(told))]


@needs_nixl
def test_rdma_does_not_give_way(fresh):
    engine, version = fresh("--tp", "2"), next_version()
    before = serves_whole(engine)
    ranks = Ranks(2)
    try:
        with pytest.raises(Exception, match="failed while reading from") as raised:
            ranks.run(update_by, [engine.url], [version], {"transport": "rdma"}, 4)
    finally:
        ranks.close()
    assert engine.url in str(raised.value)
    assert serves_whole(engine) == before == 0


def test_engine_that_comes_late_and_cannot_map_memory_catches_up_by_broadcast(engines, placed):
    late = placed(become_another_user)
    model = trainer_of(next_version())
    with connect(model, [engines.one], timeout_s=PATIENCE_S) as updater:
        version = update(updater, model).version
        report = updater.retarget([engines.one.url, late.url], catch_up=True)
        assert [(row.url, row.transport, row.proof) for row in report.targets] == [(late.url, "broadcast", "resident")]
        assert "ipc gave way to broadcast" in report.targets[0].notes[0]
        assert serves_whole(late) == serves_whole(engines.one) == version
        report = update(updater, model)
        assert ways(report) == [("ipc", "resident"), ("broadcast", "resident")]
        assert serves_whole(late) == serves_whole(engines.one) == report.version


def test_engine_killed_in_the_update_in_which_another_one_leaves_ipc_is_left_out(fresh, placed):
    whole, doomed, walled = fresh("--local"), fresh("--local"), placed(become_another_user)
    model = trainer_of(next_version())

    def kill(event) -> None:
        if isinstance(event, Asked) and (event.target, event.message) == (walled.url, "join"):
            doomed.signal(signal.SIGKILL)

    with connect(
        model, [whole, doomed, walled], timeout_s=PATIENCE_S, on_failure="quarantine", on_event=kill
    ) as updater:
        report = update(updater, model)
        assert [row.status for row in report.targets] == ["serving", "quarantined", "serving"]
        assert serves_whole(whole) == serves_whole(walled) == report.version


def test_reference_engines_here_and_elsewhere_answer_alike_after_one_push(tmp_path):
    for seed, name in enumerate(("old", "new")):
        tiny_model(tmp_path / name, seed=seed)
        tiny_tokenizer(tmp_path / name)
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12]]
    settings = {"tp": 2}, {"tp": 1, "program": "tests.e2e.elsewhere"}
    with reference.engines(tmp_path / "old", tmp_path, *settings) as found:
        here, there = found
        assert here.info()["host_id"] != there.info()["host_id"]
        before = here.greedy(prompts, 12)
        report = reference.push(tmp_path / "new", found, 3)
        assert report["transport"] == "ipc+broadcast"
        assert [(row["transport"], row["proof"]) for row in report["targets"]] == [
            ("ipc", "resident"),
            ("broadcast", "resident"),
        ]
        assert here.digests() == there.digests()
        answers = [engine.greedy(prompts, 12) for engine in found]
        assert answers[0] == answers[1] != before
