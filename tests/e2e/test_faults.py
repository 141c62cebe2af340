"""Faults in the middle of an update: engines serve whole versions, and no process waits for ever."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import time
from collections import Counter
from dataclasses import replace

import msgspec
import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.e2e import doomed
from tests.helpers.clock import PATIENCE_S
from tests.helpers.harness import (
    Engine,
    connect,
    digests_of,
    free,
    next_version,
    process,
    push,
    serves_whole,
    trainer_of,
    wait_for,
)
from tests.helpers.procs import is_stopped
from tests.helpers.ranks import Ranks
from weightcast import WeightUpdater
from weightcast.digest.sent import SentDigests
from weightcast.errors import ConfigError, TargetUnreachable, TrainerRankFailed, UpdateFailed, WeightcastError
from weightcast.protocols import Invitation
from weightcast.transports import channel
from weightcast.transports.link import Link
from weightcast.update import head
from weightcast.update.messages import AttemptResult
from weightcast.wire.bucket import Bucket

pytestmark = pytest.mark.deadlines

SHORT = {"timeout_s": 1.0}


def die(engines: list[Engine], version: int, where: str, **options: object) -> None:
    """A trainer that is killed there, by itself."""
    trainer = process(doomed.update, [engine.url for engine in engines], version, where, doomed.KILL, options)
    trainer.join(PATIENCE_S)
    assert trainer.exitcode == -signal.SIGKILL
    trainer.close()


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_without_staging_a_half_written_engine_says_so_and_the_next_update_heals_it(engines, transport):
    bare = engines.bare
    before = serves_whole(bare)
    for where in ("opened", "committed"):
        version = next_version()
        die([bare], version, where, transport=transport)
        assert serves_whole(bare) == (before if where == "opened" else version)

    version = next_version()
    die([bare], version, "posted:5", transport=transport)
    info = wait_for(lambda: (now := bare.info()).state == "quarantined" and now, "the quarantine")
    assert f"update to version {version} ended half way" in info.message
    assert info.session_owner is None
    assert info.digest is None

    version = next_version()
    report = push([engines.one, bare], version, transport=transport)
    assert report.ok
    assert serves_whole(bare) == version
    assert bare.info().message == ""


def test_a_refused_update_says_which_engine_is_half_updated(engines):
    before = serves_whole(engines.one)
    version = next_version()
    model = trainer_of(version)

    def break_down(sent: int, total: int) -> None:
        if sent > total // 2:
            raise RuntimeError("the trainer's own trouble")

    updater = connect(model, [engines.one, engines.bare], transport="ipc", progress=break_down)
    with updater, pytest.raises(RuntimeError, match="own trouble"):
        updater.update(version=version)
    assert engines.bare.info().state == "quarantined"
    assert "own trouble" in engines.bare.info().message
    assert serves_whole(engines.one) == before
    push([engines.bare], next_version())
    serves_whole(engines.bare)


@pytest.mark.parametrize(
    ("transport", "where"),
    [("ipc", "posted:3"), ("broadcast", "announced:3"), pytest.param("ipc", "closed", marks=pytest.mark.wide)],
)
def test_engines_free_themselves_of_a_trainer_that_stands_still(engines, transport, where):
    chosen = [engines.one, engines.two]
    before = [serves_whole(engine) for engine in chosen]
    ours, theirs = multiprocessing.Pipe()
    urls = [engine.url for engine in chosen]
    options = {"transport": transport, **SHORT}
    trainer = process(doomed.update, urls, next_version(), where, doomed.STOP, options, theirs)
    try:
        wait_for(lambda: is_stopped(trainer.pid), "the trainer to stop")
        assert any(engine.info().session_owner for engine in chosen)
        assert [serves_whole(engine) for engine in chosen] == before
        version = next_version()
        push(chosen, version, transport=transport)
        # It wakes up, goes on where it was, and is told.
        os.kill(trainer.pid, signal.SIGCONT)
        assert ours.poll(PATIENCE_S)
        assert "UpdateFailed" in ours.recv()
        assert [serves_whole(engine) for engine in chosen] == [version] * 2
    finally:
        trainer.kill()
        trainer.join()
        trainer.close()
        ours.close()
        theirs.close()


def test_what_an_earlier_attempt_did_is_reported_when_nobody_is_left(engines, fresh, monkeypatch):
    first, second = fresh("--local"), fresh("--local")
    open_, opened = head.Head.open, list[int]()

    def strike(sent: int, total: int) -> None:
        if sent > total // 3:
            first.close()

    def open_again(self: head.Head, *args: object) -> AttemptResult:
        opened.append(len(opened))
        if len(opened) == 2:
            second.close()
        return open_(self, *args)

    monkeypatch.setattr(head.Head, "open", open_again)
    options = {"timeout_s": 3.0, "on_failure": "quarantine", "progress": strike}
    updater = connect(trainer_of(next_version()), [first, second], **options)
    with updater, pytest.raises(UpdateFailed) as caught:
        updater.update(version=next_version())
    assert opened == [0, 1]
    assert [(row.url, row.status) for row in caught.value.report.targets] == [
        (first.url, "quarantined"),
        (second.url, "quarantined"),
    ]


def test_a_rank_that_is_lost_after_the_switch_does_not_hide_it(engines, monkeypatch):
    version = next_version()
    with connect(trainer_of(version), [engines.one]) as updater:

        def lost(*_: object) -> None:
            raise TrainerRankFailed("trainer rank 1 is gone")

        monkeypatch.setattr(updater._attempts, "_conclude", lost)
        with pytest.raises(UpdateFailed, match="have switched, but trainer rank 1 is gone") as caught:
            updater.update(version=version)
        assert caught.value.report.ok
        assert serves_whole(engines.one) == version


def _sharded_and_late(url: str, version: int, late_s: float) -> str:
    """Runs one of two trainer ranks; the second one comes late to the update."""
    model = trainer_of(version)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with WeightUpdater.connect(model, [url], bucket_bytes=30_000, timeout_s=2.0) as updater:
        if dist.get_rank() == 1:
            time.sleep(late_s)
        started = time.monotonic()
        report = updater.update(version=version)
        return f"{report.ok} {time.monotonic() - started:.1f}"


@pytest.mark.wide  # nine seconds in which nothing happens
def test_engines_do_not_wait_for_a_rank_that_comes_late(engines):
    # Later than an engine's lease of four deadlines, sooner than the six that a rank may take.
    version = next_version()
    ranks = Ranks(2)
    try:
        head_said, late_said = ranks.run(_sharded_and_late, engines.one.url, version, 9.0)
    finally:
        ranks.close()
    assert head_said.startswith("True ")
    assert late_said.startswith("True ")
    assert float(head_said.split()[1]) > 8.0
    assert serves_whole(engines.one) == version


def test_all_that_do_not_come_to_the_meeting_are_left_out_at_once(engines, fresh, monkeypatch):
    astray = [fresh("--local"), fresh("--local")]
    join, misled = channel._join, Counter[str]()

    async def misdirect(link: Link, invitation: Invitation) -> None:
        if link.url in {engine.url for engine in astray} and misled[link.url] < 2:  # connect, first update
            misled[link.url] += 1
            told = msgspec.structs.replace(invitation.join, token=secrets.token_hex(16))
            invitation = replace(invitation, join=told)
        await join(link, invitation)

    monkeypatch.setattr(channel, "_join", misdirect)
    version = next_version()
    model = trainer_of(version)
    options = {"transport": "broadcast", "timeout_s": 3.0, "on_failure": "quarantine"}
    with connect(model, [astray[0], engines.one, astray[1], engines.two], **options) as updater:
        report = updater.update(version=version)
        assert [row.status for row in report.targets] == ["untouched", "serving", "untouched", "serving"]
        assert report.phases["open"] < 2 * 3.0  # one deadline: one after the other they would cost two
        for engine, row in zip(astray, report.targets[::2], strict=True):
            assert f"{engine.url}: rank 0 did not come to weightcast-" in row.message
            assert serves_whole(engine) == 0
        assert serves_whole(engines.one) == serves_whole(engines.two) == version

        version = next_version()
        model.set_version(version)
        assert updater.update(version=version).ok
        assert all(serves_whole(engine) == version for engine in [*astray, engines.one, engines.two])


def test_a_dead_engine_is_unreachable_before_anything_moves(engines, fresh):
    dead = fresh("--local")
    url = dead.url
    before = serves_whole(engines.one)
    model = trainer_of(0)
    with connect(model, [engines.one, dead], timeout_s=60.0) as updater:
        dead.close()
        for _ in range(2):
            with pytest.raises(UpdateFailed, match=url) as failed:
                updater.update(version=next_version())
            assert isinstance(failed.value.__cause__, TargetUnreachable)
            assert [row.status for row in failed.value.report.targets] == ["untouched", "quarantined"]
            assert serves_whole(engines.one) == before
        updater.retarget([engines.one.url])
        with pytest.raises(TargetUnreachable, match=url):
            updater.retarget([engines.two.url, url])
        with pytest.raises(ConfigError, match="twice"):
            updater.retarget([engines.two.url, engines.two.url])
        with pytest.raises(ConfigError, match="no targets"):
            updater.retarget([])
        version = next_version()
        model.set_version(version)
        assert [row.url for row in updater.update(version=version).targets] == [engines.one.url]
        assert serves_whole(engines.one) == version
        version = next_version()
    with pytest.raises(TargetUnreachable, match=url) as caught:
        connect(trainer_of(1), [engines.one, dead], timeout_s=60.0)
    assert caught.value.url == url
    with pytest.raises(WeightcastError, match=url):
        connect(trainer_of(1), [dead], timeout_s=60.0, on_failure="quarantine")
    report = push([engines.one, dead], version, timeout_s=60.0, on_failure="quarantine")
    assert [row.status for row in report.targets] == ["serving", "quarantined"]
    assert serves_whole(engines.one) == version


@pytest.mark.parametrize("name", ["embed.weight", "layers.2.norm.weight"])
def test_a_bit_that_flips_on_the_way_is_caught_and_named(engines, name, monkeypatch):
    chosen = [engines.one, engines.host]  # of one dtype, so that what they received can be compared
    before = [serves_whole(engine) for engine in chosen]
    add = SentDigests.add

    def digest_then_flip(self: SentDigests, bucket: Bucket) -> None:
        add(self, bucket)
        for slot in bucket.layout.slots:
            if slot.spec.name == name:
                bucket.data[slot.offset_bytes + slot.size_bytes // 2] ^= 1

    monkeypatch.setattr(SentDigests, "add", digest_then_flip)
    version = next_version()
    # Both engines received the same, so the error blames the sender's buffer and neither of them.
    with pytest.raises(UpdateFailed, match=f"has other bytes than the trainer ranks hold, in {name}:") as caught:
        push(chosen, version)
    assert [row.status for row in caught.value.report.targets] == ["untouched"] * 2
    assert [serves_whole(engine) for engine in chosen] == before
    monkeypatch.undo()
    push(chosen, next_version())
    assert serves_whole(engines.one) > version


def test_what_is_kept_otherwise_than_sent_is_flipped_back(engines, monkeypatch):
    # As if the loader had put a tensor elsewhere: the sender expects other bytes than arrived.
    chosen = [engines.one, engines.two, engines.host]
    before = [serves_whole(engine) for engine in chosen]
    commit = Link.commit

    def expect_another(link: Link, digest: str, **kwargs: object) -> object:
        assert digest
        return commit(link, "0" * 16, **kwargs)

    monkeypatch.setattr(Link, "commit", expect_another)
    with pytest.raises(UpdateFailed, match="what is kept differs from what was sent"):
        push(chosen, next_version())
    assert [serves_whole(engine) for engine in chosen] == before
    assert [free(engine).state for engine in chosen] == ["serving"] * 3
    with pytest.raises(UpdateFailed, match="what is kept differs"):
        push([engines.bare], next_version())
    assert engines.bare.info().state == "quarantined"
    monkeypatch.undo()
    version = next_version()
    push([*chosen, engines.bare], version)
    assert [serves_whole(engine) for engine in (*chosen, engines.bare)] == [version] * 4
    assert engines.two.digests() == digests_of(version, "bfloat16")


def test_a_place_to_meet_that_is_not_ours_is_an_error_and_leaves_engines_free(engines):
    before = serves_whole(engines.one)
    with pytest.raises(UpdateFailed, match=r"cannot listen at 192\.0\.2\.1") as caught:
        push(
            [engines.one],
            next_version(),
            transport="broadcast",
            advanced={"rendezvous_host": "192.0.2.1"},
            timeout_s=60.0,
        )
    assert "rendezvous_host" in (caught.value.hint or "")
    assert engines.one.info().session_owner is None
    assert serves_whole(engines.one) == before


def test_two_trainers_do_not_mix(engines):
    version = next_version()
    model = trainer_of(version)
    refused: list[str] = []

    def second(sent: int, total: int) -> None:
        if not refused:
            with pytest.raises(UpdateFailed, match="already being updated by process") as caught:
                push([engines.one], next_version(), transport="ipc")
            refused.append(str(caught.value))

    with connect(model, [engines.one], transport="ipc", progress=second) as updater:
        assert updater.update(version=version).ok
    assert refused
    assert serves_whole(engines.one) == version


def test_an_engine_that_stands_still_at_connect_is_named(engines, fresh):
    still = fresh("--local")
    still.url  # noqa: B018  it must have started before it stops
    still.signal(signal.SIGSTOP)
    with pytest.raises(TargetUnreachable, match=still.url):
        connect(trainer_of(1), [engines.one, still], timeout_s=5.0)
