"""Cells: an engine that fails in the middle of an update takes nobody with it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner, Result

from tests.helpers.clock import wait_until
from tests.helpers.harness import (
    SMALL_BUCKETS,
    Engine,
    connect,
    next_version,
    on_every_rank,
    serves_whole,
    set_shards,
    trainer_of,
)
from tests.helpers.ranks import Ranks
from tests.helpers.toy_engine import toy_weights
from weightcast import UpdateFailed
from weightcast.cli.app import app
from weightcast.comm.update_group import UpdateGroup
from weightcast.lab.connect import connect as connect_in_lab
from weightcast.report import UpdateReport
from weightcast.transports.channel import Channel
from weightcast.update import choose
from weightcast.watch.events import AttemptStarted, Event
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout

pytestmark = pytest.mark.deadlines


def once_half_way(do: Callable[[], object]) -> Callable[[int, int], None]:
    """A progress callback that does something once, when a third of the bytes was sent."""
    done: list[int] = []

    def look(sent: int, total: int) -> None:
        if sent > total // 3 and not done:
            done.append(sent)
            do()

    return look


def update(engines: list[Engine], version: int, **options: Any) -> UpdateReport:
    options = {"transport": "broadcast", "on_failure": "quarantine", "timeout_s": 5.0} | options
    with connect(trainer_of(version), engines, **options) as updater:
        return updater.update(version=version)


def check_others(report: UpdateReport, dead: Engine, others: list[Engine], version: int) -> None:
    """The report blames the dead engine alone, and the others serve the version, which was proven."""
    rows = {row.url: row for row in report.targets}
    assert rows[dead.url].status == "quarantined"
    assert dead.url in rows[dead.url].message
    for engine in others:
        row = rows[engine.url]
        assert (row.status, row.version_after, row.proof) == ("serving", version, "resident")
        assert row.message == ""
        assert row.digest
        assert serves_whole(engine) == version


@pytest.mark.parametrize("other", ["two", "bare"])
def test_the_cell_of_a_lost_engine_is_built_anew_and_the_others_get_the_update(engines, fresh, other):
    doomed, rest, apart = fresh("--tp", "2"), getattr(engines, other), fresh("--local")
    assert serves_whole(doomed) == serves_whole(apart) == 0
    version, advanced = next_version(), {"cell_ranks": 2 + rest.info().tp_size}
    report = update([doomed, rest, apart], version, progress=once_half_way(doomed.close), advanced=advanced)
    check_others(report, doomed, [rest, apart], version)
    assert all(row.notes == () for row in report.targets[1:])


@pytest.mark.parametrize("cell_ranks", [2, 64])
@pytest.mark.parametrize("at_once", [True, False])
def test_several_engines_die_in_one_update(engines, fresh, at_once, cell_ranks):
    """At once or one after the other, in two cells or in one."""
    doomed, others = [fresh("--local"), fresh("--local")], [engines.one, engines.host]
    assert [serves_whole(engine) for engine in doomed] == [0, 0]
    version, left = next_version(), list(doomed)

    def strike(sent: int, total: int) -> None:
        if sent > total // 4 and len(left) == 2:
            left.pop().close()
        if left and len(left) < 2 and (at_once or sent > total // 2):
            left.pop().close()

    chosen = [doomed[0], others[0], doomed[1], others[1]]
    report = update(chosen, version, advanced={"cell_ranks": cell_ranks}, progress=strike)

    assert not left
    for engine in doomed:
        check_others(report, engine, others, version)


def test_with_on_failure_raise_no_cell_switches(engines, fresh):
    doomed, before = fresh("--local"), serves_whole(engines.one)
    with pytest.raises(UpdateFailed, match=doomed.url) as caught:
        update(
            [doomed, engines.one],
            next_version(),
            advanced={"cell_ranks": 1},
            on_failure="raise",
            progress=once_half_way(doomed.close),
        )
    assert [row.status for row in caught.value.report.targets] == ["quarantined", "untouched"]
    assert serves_whole(engines.one) == before


def test_an_engine_that_comes_back_is_in_its_cell_again(engines, fresh):
    doomed = fresh("--local")
    model = trainer_of(version := next_version())
    options = {"transport": "broadcast", "on_failure": "quarantine", "timeout_s": 5.0, "advanced": {"cell_ranks": 1}}
    with connect(
        model, [doomed, engines.one, engines.host], progress=once_half_way(doomed.close), **options
    ) as updater:
        assert updater.cells == ((doomed.url,), (engines.one.url,), (engines.host.url,))
        check_others(updater.update(version=version), doomed, [engines.one, engines.host], version)
        model.set_version(version := next_version())
        check_others(updater.update(version=version), doomed, [engines.one, engines.host], version)
        doomed.close()
        back = fresh("--local", port=doomed.port)
        assert serves_whole(back) == 0
        model.set_version(version := next_version())
        report = updater.update(version=version)
        assert report.ok
        assert serves_whole(back) == version


def test_a_group_that_fails_with_nobody_to_blame_is_divided_for_the_next_update(engines, monkeypatch, caplog):
    monkeypatch.setattr(choose, "FEW_RANKS", 1)
    start, cut = UpdateGroup.start_broadcast, list[str]()

    def cut_between_engines(self: UpdateGroup, data: torch.Tensor, **options: Any) -> Any:
        if self.world_size > 2:  # a group of the head and one engine never has the cut in it
            cut.append(self.name)
            self.abort("the link between the engines is cut")
        return start(self, data, **options)

    monkeypatch.setattr(UpdateGroup, "start_broadcast", cut_between_engines)
    chosen, version = [engines.one, engines.host], next_version()
    before = [serves_whole(engine) for engine in chosen]
    model = trainer_of(version)
    options = {"transport": "broadcast", "on_failure": "quarantine", "timeout_s": 5.0}
    with connect(model, chosen, **options) as updater:
        assert [len(cell) for cell in updater.cells] == [2]
        with pytest.raises(UpdateFailed) as caught:
            updater.update(version=version)
        assert len(set(cut)) > 1, "the group is made again before it is given up"
        assert {row.status for row in caught.value.report.targets} == {"untouched"}
        assert [serves_whole(engine) for engine in chosen] == before
        assert "later groups have at most 1 engine ranks" in caplog.text

        report = updater.update(version=version)
    assert report.ok
    assert [row.proof for row in report.targets] == ["resident"] * 2
    assert [serves_whole(engine) for engine in chosen] == [version] * 2


def test_weights_that_are_not_finite_are_not_blamed_on_a_bucket_that_was_on_its_way(engines, monkeypatch):
    """The abort of the group then makes that bucket's broadcast fail."""
    send, layouts, on_its_way = Channel.send, list[BucketLayout](), list[int]()

    def note(self: Channel, bucket: Bucket, *args: Any) -> None:
        layouts.append(bucket.layout)
        send(self, bucket, *args)

    def wait_for_the_abort(self: Channel, bucket: Bucket, *args: Any) -> None:
        if bucket.layout.index == not_finite - 1:
            on_its_way.append(bucket.layout.index)
            group = self.member()
            assert group is not None
            wait_until(lambda: not group.alive, "the abort")
        send(self, bucket, *args)

    attempts = list[int]()

    def hear(event: Event) -> None:
        if isinstance(event, AttemptStarted):
            attempts.append(event.number)

    model = trainer_of(served := next_version())
    options = {"transport": "broadcast", "on_failure": "quarantine", "on_event": hear}
    chosen = [engines.one, engines.host, engines.bare]
    with connect(model, chosen, **options) as updater:
        monkeypatch.setattr(Channel, "send", note)
        assert updater.update(version=served).ok
        name = layouts[-1].slots[-1].spec.name
        not_finite = min(one.index for one in layouts if name in {slot.spec.name for slot in one.slots})
        monkeypatch.setattr(Channel, "send", wait_for_the_abort)
        attempts.clear()
        with torch.no_grad():
            model.get_parameter(name).fill_(float("nan"))
        with pytest.raises(UpdateFailed, match=f"NaN.*{re.escape(name)}") as caught:
            updater.update(version=next_version())
        assert (on_its_way, attempts) == ([not_finite - 1], [1])
        rows = caught.value.report.targets
        assert [row.status for row in rows] == ["untouched", "untouched", "quarantined"]
        assert [row.notes for row in rows] == [()] * 3
        assert serves_whole(engines.one) == serves_whole(engines.host) == served
        monkeypatch.setattr(Channel, "send", send)
        model.set_version(version := next_version())
        assert updater.update(version=version).ok
    assert [serves_whole(engine) for engine in chosen] == [version] * 3


def push_to(urls: list[str], version: int, folder: Path, *options: object) -> Result:
    """``weightcast push`` of a version's weights by broadcast, in this process."""
    save_file(toy_weights(seed=version), folder / "model.safetensors")
    to = [word for url in urls for word in ("--to", url)]
    words = ["push", folder, *to, "--version", version, "--via", "broadcast", "--bucket-bytes", "30KB", *options]
    return CliRunner().invoke(app, list(map(str, words)), prog_name="weightcast")


@pytest.mark.parametrize(("options", "cells"), [((), [[0, 1, 2]]), (("--advanced", "cell_ranks=2"), [[0], [1], [2]])])
def test_the_command_push_divides_engines_into_cells(engines, monkeypatch, tmp_path, options, cells):
    chosen, found = [engines.one, engines.two, engines.host], list[list[str]]()
    connect = Channel.connect

    def look(self: Channel) -> None:
        found.append([link.url for link in self.links])
        connect(self)

    monkeypatch.setattr(Channel, "connect", look)
    version = next_version()
    result = push_to([engine.url for engine in chosen], version, tmp_path, *options)
    assert result.exit_code == 0, result.output
    # At connect and again in the update, which finds the groups there.
    assert {*map(tuple, found)} == {tuple(chosen[number].url for number in cell) for cell in cells}
    assert [serves_whole(engine) for engine in chosen] == [version] * 3


def test_the_command_push_refuses_cells_without_ranks(engines, tmp_path):
    before = serves_whole(engines.one)
    result = push_to([engines.one.url], next_version(), tmp_path, "--advanced", "cell_ranks=0")
    assert result.exit_code == 2
    assert "cell_ranks=0: a cell has at least one engine rank" in result.output
    assert serves_whole(engines.one) == before


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    """A trainer of two ranks."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def lose_an_engine(urls: list[str], victim: int, what: int, versions: list[int], options: dict) -> list[str]:
    """Updates by two trainer ranks; a process is killed or stopped after a third of the first one."""

    def strike(done: int, total: int) -> None:
        if done > total / 3 and not seen:
            seen.append(done)
            os.kill(victim, what)

    seen: list[int] = []
    model = trainer_of(versions[0])
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    told = []
    with connect_in_lab(
        model, urls, bucket_bytes=SMALL_BUCKETS, on_failure="quarantine", progress=strike, **options
    ) as updater:
        for version in versions:
            set_shards(model, version)
            told.append(on_every_rank(updater.update(version=version)))
    return told


def test_all_trainer_ranks_send_again_to_those_that_are_left(fresh, two_ranks):
    lost, kept, apart = fresh("--tp", "2"), fresh("--tp", "2"), fresh("--tp", "2")
    versions = [next_version(), next_version()]
    victim = lost.info().ranks[1].pid
    options = {"transport": "direct", "direct_by": "messages", "advanced": {"cell_ranks": 4}, "timeout_s": 10.0}
    urls = [lost.url, kept.url, apart.url]

    told = two_ranks.run(lose_an_engine, urls, victim, int(signal.SIGKILL), versions, options)

    assert told[0] == told[1]
    first, second = (UpdateReport.from_json(text) for text in told[0])
    for version, report in ((versions[0], first), (versions[1], second)):
        lost_row, *rows = report.targets
        assert lost_row.status != "serving"
        assert lost.url in lost_row.message
        for row in rows:
            assert (row.status, row.version_after, row.proof, row.message) == ("serving", version, "resident", "")
    assert "rank 1" in first.targets[0].message
    assert serves_whole(kept) == serves_whole(apart) == versions[1]


def test_cells_of_messages_are_exchanged_side_by_side(fresh, two_ranks):
    engines = [fresh("--tp", str(tp)) for tp in (1, 2, 1)]
    versions = [next_version(), next_version()]
    options = {"transport": "direct", "direct_by": "messages", "advanced": {"cell_ranks": 2}, "timeout_s": 30.0}
    told = two_ranks.run(lose_an_engine, [engine.url for engine in engines], 0, 0, versions, options)
    for text in told[0]:
        report = UpdateReport.from_json(text)
        assert report.ok
        assert [row.notes for row in report.targets] == [()] * 3
    assert [serves_whole(engine) for engine in engines] == [versions[1]] * 3
