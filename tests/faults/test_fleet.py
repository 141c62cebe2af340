"""Faults at the switch of several engines, and of several engines or trainer ranks at once.

The matrix of ``cases.py`` has one victim and one bystander.  Here stand the cases that need more of either.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.faults.kinds import KINDS
from tests.faults.wire import Loop, Trap, Wire
from tests.helpers.harness import Engine, next_version, serves_whole, trainer_of, wait_for
from tests.helpers.ranks import Ranks
from weightcast import WeightUpdater
from weightcast.errors import TargetLost, TargetsFailed, TargetUnreachable, UpdateFailed, WeightcastError
from weightcast.exporters.gather import GatherBucket
from weightcast.update import head
from weightcast.update.messages import AttemptResult

pytestmark = pytest.mark.deadlines
SMALL = {"bucket_bytes": 30_000, "timeout_s": 20.0}


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def two() -> Iterator[list[Engine]]:
    """Engines with a second set of weights, kept for all tests."""
    made = [Engine("--local"), Engine("--local")]
    yield made
    for engine in made:
        engine.close()


@pytest.fixture
def fresh() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def start(*args: str) -> Engine:
        made.append(Engine(*args))
        assert made[-1].port
        return made[-1]

    yield start
    for engine in made:
        engine.close()


@contextmanager
def wire_to(loop: Loop, engine: Engine) -> Iterator[Wire]:
    wire = Wire(loop, KINDS["native"].step_of, engine.port)
    try:
        yield wire
    finally:
        wire.close()


def health(updater: WeightUpdater) -> dict[str, bool]:
    return {row.url: row.active for row in updater.health()}


@pytest.mark.parametrize("on_failure", ["raise", "quarantine"])
def test_a_lost_answer_to_commit_is_asked_for_again(two, loop, on_failure):
    version = next_version()
    with wire_to(loop, two[1]) as wire:
        wire.set_trap(Trap("commit", fault="lose answer"))
        model = trainer_of(version)
        options = {**SMALL, "timeout_s": 3.0, "on_failure": on_failure, "transport": "ipc"}
        with WeightUpdater.connect(model, [two[0].url, wire.url], **options) as updater:
            report = updater.update(version=version)
            rows = {row.url: row for row in report.targets}
            assert report.ok
            assert (rows[wire.url].proof, rows[wire.url].version_after) == ("resident", version)
            assert "its answer to Commit was lost" in rows[wire.url].notes[0]
            assert health(updater) == {two[0].url: True, wire.url: True}
    assert [serves_whole(engine) for engine in two] == [version] * 2


def test_an_engine_that_is_cut_off_at_commit_is_unknown_until_a_full_update(two, loop):
    before, version = [serves_whole(engine) for engine in two], next_version()
    with wire_to(loop, two[1]) as wire:
        wire.set_trap(Trap("commit", fault="drop"))
        model = trainer_of(version)
        options = {**SMALL, "timeout_s": 2.0, "transport": "ipc"}
        with WeightUpdater.connect(model, [two[0].url, wire.url], **options) as updater:
            with pytest.raises(UpdateFailed, match="switched back to the version before") as caught:
                updater.update(version=version)
            rows = {row.url: row for row in caught.value.report.targets}
            assert (rows[wire.url].status, rows[wire.url].version_after) == ("unknown", None)
            assert "it is not known whether the engine has switched" in rows[wire.url].message
            assert (rows[two[0].url].status, rows[two[0].url].version_after) == ("untouched", before[0])
            assert caught.value.half_updated == (wire.url,)
            assert not health(updater)[wire.url]
            assert serves_whole(two[0]) == before[0]
            wire.heal()
            version = next_version()
            model.set_version(version)
            wait_for(lambda: "commit" not in wire.seen, "the wire")

            def updated() -> bool:
                try:
                    return updater.update(version=version).ok
                except (TargetUnreachable, TargetLost):  # the last question to it is still out, or is cut off only now
                    return False

            wait_for(updated, "an update of all")
            assert health(updater) == {two[0].url: True, wire.url: True}
    assert [serves_whole(engine) for engine in two] == [version] * 2


def dies_while_switching(
    loop: Loop, victim: Engine, others: Sequence[Engine], version: int, **options: object
) -> tuple[WeightUpdater, str, list[Wire]]:
    """A trainer; the victim will be killed by its Commit, once the others have switched."""
    wire = Wire(loop, KINDS["native"].step_of, victim.port)

    def strike() -> None:
        for engine in others:
            wait_for(lambda engine=engine: engine.info().version == version, "the others to switch")
        victim.signal(9)

    wire.set_trap(Trap("commit", strike=strike))
    urls = [*(engine.url for engine in others), wire.url]
    updater = WeightUpdater.connect(trainer_of(version), urls, **SMALL, **options)
    return updater, wire.url, [wire]


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_those_that_switched_are_switched_back_when_another_dies_while_switching(two, fresh, loop, transport):
    # The version before is one that an update brought, so that there is a digest to compare with.
    first, version = next_version(), next_version()
    with WeightUpdater.connect(trainer_of(first), [engine.url for engine in two], **SMALL) as updater:
        assert updater.update(version=first).ok
    digests = [engine.info().digest for engine in two]
    updater, lost, wires = dies_while_switching(loop, fresh("--local"), two, version, transport=transport)
    try:
        with pytest.raises(UpdateFailed, match="switched back to the version before") as caught:
            updater.update(version=version)
        *rows, dead = caught.value.report.targets
        assert (dead.url, dead.status, dead.version_after) == (lost, "unknown", None)
        for engine, row, digest in zip(two, rows, digests, strict=True):
            assert (row.status, row.version_after) == ("untouched", first)
            assert f"switched back to version {first}; its digest is {digest} again" in row.message
            assert serves_whole(engine) == first
            assert (engine.info().digest, engine.info().paused) == (digest, False)
        assert not health(updater)[lost]
        updater.retarget([engine.url for engine in two])
        last = next_version()
        for row in updater.health():
            assert row.state != "quarantined"
        with WeightUpdater.connect(trainer_of(last), [engine.url for engine in two], **SMALL) as next_updater:
            assert next_updater.update(version=last).ok
        assert [serves_whole(engine) for engine in two] == [last] * 2
    finally:
        updater.close()
        wires[0].close()


def test_with_quarantine_those_that_switched_go_on_when_another_dies_while_switching(two, fresh, loop):
    version = next_version()
    updater, lost, wires = dies_while_switching(loop, fresh("--local"), two, version, on_failure="quarantine")
    try:
        report = updater.update(version=version)
        assert [row.status for row in report.targets] == ["serving", "serving", "unknown"]
        assert [serves_whole(engine) for engine in two] == [version] * 2
        assert health(updater) == {two[0].url: True, two[1].url: True, lost: False}
    finally:
        updater.close()
        wires[0].close()


def test_an_engine_without_a_second_set_cannot_go_back_and_the_report_says_so(two, fresh, loop):
    bare, version = fresh("--local", "--staging", "none"), next_version()
    before = serves_whole(two[0])
    updater, _, wires = dies_while_switching(loop, fresh("--local"), [two[0], bare], version)
    try:
        with pytest.raises(UpdateFailed, match=f"could not be switched back: {bare.url}") as caught:
            updater.update(version=version)
        staged, stuck, _ = caught.value.report.targets
        assert (staged.status, staged.version_after) == ("untouched", before)
        assert (stuck.status, stuck.version_after) == ("quarantined", version)
        assert "keeps no second set of weights" in stuck.message
        assert (serves_whole(two[0]), serves_whole(bare)) == (before, version)
        assert not health(updater)[bare.url]
    finally:
        updater.close()
        wires[0].close()


def test_where_nobody_can_go_back_those_that_switched_serve_the_new_version(fresh, loop):
    bare, version = fresh("--local", "--staging", "none"), next_version()
    updater, lost, wires = dies_while_switching(loop, fresh("--local"), [bare], version)
    try:
        with pytest.raises(UpdateFailed, match=f"{bare.url} had switched by then and could not be switched") as caught:
            updater.update(version=version)
        assert [row.status for row in caught.value.report.targets] == ["serving", "unknown"]
        assert serves_whole(bare) == version
        assert health(updater) == {bare.url: True, lost: False}
    finally:
        updater.close()
        wires[0].close()


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize("on_failure", ["raise", "quarantine"])
def test_engines_that_refuse_at_the_same_step_are_all_named_at_once(
    two, fresh, loop, transport, on_failure, monkeypatch
):
    before, version = serves_whole(two[0]), next_version()
    attempts: list[int] = []
    open_ = head.Head.open

    def count(self: head.Head, *args: object) -> AttemptResult:
        attempts.append(len(attempts))
        return open_(self, *args)

    monkeypatch.setattr(head.Head, "open", count)
    victims = [two[1], fresh("--local")]
    with wire_to(loop, victims[0]) as one, wire_to(loop, victims[1]) as other:
        urls = [one.url, two[0].url, other.url]
        for wire in (one, other):
            wire.set_trap(Trap("open", fault="flip"))  # neither can read it
        options = {**SMALL, "transport": transport, "on_failure": on_failure}
        with WeightUpdater.connect(trainer_of(version), urls, **options) as updater:
            if on_failure == "raise":
                with pytest.raises(UpdateFailed, match="2 engines failed") as caught:
                    updater.update(version=version)
                rows, text = caught.value.report.targets, str(caught.value)
                assert attempts == [0]
                assert one.url in text
                assert other.url in text
                assert serves_whole(two[0]) == before
            else:
                rows = updater.update(version=version).targets
                assert attempts == [0, 1]  # both are left out at once
                assert [row.status for row in rows] == ["untouched", "serving", "untouched"]
                assert serves_whole(two[0]) == version
            for row in (rows[0], rows[2]):
                assert row.url in row.message


def test_a_group_that_an_engine_did_not_leave_is_noted_in_the_next_report(two, loop):
    wire = Wire(loop, lambda path, body: json.loads(body)["type"] if path.endswith("/apply") else "", two[0].port)
    options = {**SMALL, "transport": "broadcast"}
    try:
        with WeightUpdater.connect(trainer_of(version := next_version()), [wire.url, two[1].url], **options) as updater:
            assert updater.update(version=version).targets[0].notes == ()
            wire.set_trap(Trap("leave", fault="flip"))  # the engine cannot read it, and says so
            updater.retarget([wire.url])
            [row] = updater.update(version=next_version()).targets
            assert row.status == "serving"
            [note] = row.notes
            assert "did not leave the group weightcast-" in note
            assert "refused POST /weightcast/apply" in note
            assert updater.update(version=next_version()).targets[0].notes == ()
    finally:
        wire.close()
    with WeightUpdater.connect(trainer_of(last := next_version()), [engine.url for engine in two], **SMALL) as updater:
        assert updater.update(version=last).ok


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_nothing_is_said_of_the_memory_of_an_engine_that_has_ended(two, fresh, transport, caplog):
    ended = fresh("--local")
    options = {**SMALL, "transport": transport}
    with WeightUpdater.connect(trainer_of(version := next_version()), [ended.url, two[0].url], **options) as updater:
        assert updater.update(version=version).ok
        ended.close()
        caplog.clear()
    assert not caplog.messages


def test_all_engines_that_are_gone_are_named_at_once(two, fresh):
    dead = [fresh("--local"), fresh("--local")]
    urls = [two[0].url, *(engine.url for engine in dead)]
    with WeightUpdater.connect(trainer_of(next_version()), urls, **SMALL) as updater:
        for engine in dead:
            engine.close()
        with pytest.raises(UpdateFailed) as caught:
            updater.update(version=next_version())
        assert caught.value.half_updated == tuple(urls[1:])
        cause = caught.value.__cause__
        assert isinstance(cause, TargetsFailed)
        assert cause.urls == tuple(urls[1:])
        assert {type(error) for error in cause.failures} == {TargetUnreachable}


def _fails_once(url: str, versions: Sequence[int], victim: int) -> list[str]:
    """One rank of a sharded trainer; the victim's first gather raises."""
    model = trainer_of(versions[0])
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    said: list[str] = []
    dist.barrier()
    with WeightUpdater.connect(model, [url], **SMALL) as updater:
        fill, times = GatherBucket.fill, [0]

        def fail_once(self: GatherBucket, data: Any, sources: Any = None) -> Any:
            times[0] += 1
            if dist.get_rank() == victim and times[0] == 3:
                raise torch.OutOfMemoryError("for a moment")
            return fill(self, data, sources)

        GatherBucket.fill = fail_once  # type: ignore[method-assign]
        for version in versions:
            try:
                said.append("ok" if updater.update(version=version).ok else "not ok")
            except (WeightcastError, torch.OutOfMemoryError) as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("victim", [0, 1])
def test_a_trainer_rank_that_raises_once_updates_again(two, victim):
    before = serves_whole(two[0])
    versions = [next_version(), next_version(), next_version()]
    # All updates send the weights of the first; the engine's own check of versions is not what this is about.
    ranks = Ranks(3)
    try:
        told = ranks.run(_fails_once, two[0].url, versions, victim)
    finally:
        ranks.close()
    for rank, said in enumerate(told):
        wanted = "OutOfMemoryError: for a moment" if rank == victim else f"trainer rank {victim} gave up"
        assert wanted in said[0]
        assert said[1:] == ["ok", "ok"]
    assert two[0].info().version == versions[-1]
    assert two[0].info().version != before
    assert two[0].info().state == "serving"
    with WeightUpdater.connect(trainer_of(last := next_version()), [two[0].url], **SMALL) as updater:
        assert updater.update(version=last).ok
