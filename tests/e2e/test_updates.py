"""Updates that succeed, or are refused before anything moves: toy engines in processes of their own."""

from __future__ import annotations

import gc
import json
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.helpers.harness import (
    Engine,
    ToyTrainer,
    children,
    connect,
    digests_of,
    listening,
    next_version,
    num_fds,
    num_threads,
    push,
    serves_whole,
    trainer_of,
)
from tests.helpers.ranks import Ranks
from tests.helpers.toy_engine import toy_weights
from weightcast import Target, WeightUpdater
from weightcast.adapters.native.adapter import NativeAdapter
from weightcast.comm.http import Client
from weightcast.digest.definition import model_digest
from weightcast.errors import ConfigError, TargetUnreachable, UpdateFailed, WeightcastError
from weightcast.exporters.module import WeightsBucket
from weightcast.report import format_bytes, format_rate
from weightcast.update import bucket_memory
from weightcast.update.head import Head
from weightcast.wire.messages import Close

TRANSPORTS = ("ipc", "broadcast")


def targets(engines, names: str) -> list:
    return [getattr(engines, name) for name in names.split("+")]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("names", ["one", "two", "host", "bare", "one+two", "one+two+host+bare"])
def test_every_engine_ends_with_exactly_the_trainers_weights(engines, transport, names):
    chosen, version = targets(engines, names), next_version()
    before = {engine.url: engine.info().version for engine in chosen}
    assert version not in before.values()

    report = push(chosen, version, transport=transport)

    assert report.ok
    assert report.transport == transport
    assert report.buckets > 5
    # The smaller dtype travels if all of them keep it.
    travels = "bfloat16" if {engine.dtype for engine in chosen} == {"bfloat16"} else "float32"
    itemsize = getattr(torch, travels).itemsize
    assert report.bytes == sum(tensor.numel() * itemsize for tensor in toy_weights(seed=version).values())
    for engine, row in zip(chosen, report.targets, strict=True):
        assert serves_whole(engine) == version
        assert (row.url, row.version_before, row.version_after) == (engine.url, before[engine.url], version)
        assert row.status == "serving"
        assert row.proof == "resident"
        assert row.ranks == row.digests_matched == len(engine.info().ranks)
        assert row.digest == model_digest(digests_of(version, engine.dtype)) == engine.info().digest
        assert row.not_updated == ()
        (leg,) = row.legs
        assert (leg.ranks, leg.bytes) == (tuple(range(row.ranks)), report.bytes * row.ranks)
        assert 0 < leg.seconds < report.seconds
        assert f"{leg.by} from trainer rank 0 to rank" in str(report)
        assert f"{format_bytes(leg.bytes)} at {format_rate(leg.bytes_per_s)}" in str(report)
    assert report.digest == model_digest(digests_of(version, travels))
    assert json.loads(report.to_json())["version"] == version
    assert str(version) in str(report)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tables_travel_once_and_again_after_a_restart(transport, monkeypatch):
    sent: dict[str, int] = {}

    def noting(name):
        send = getattr(Client, name)

        def call(self, path, body=b"", **options):
            sent[path] = max(sent.get(path, 0), len(body) + body.count(b"layers.") * 10_000)
            return send(self, path, body, **options)

        return call

    for name in ("lease", "post"):
        monkeypatch.setattr(Client, name, noting(name))
    engine = Engine("--tp", "2")
    try:
        model = trainer_of(first := next_version())
        with connect(model, [engine], transport=transport) as updater:
            assert sent["/weightcast/apply"] > 10_000  # they come with Prepare
            for turn in range(4):
                version = next_version() if turn else first
                model.set_version(version)
                if turn == 2:
                    port = engine.port
                    engine.close()
                    engine = Engine("--tp", "2", port=port)
                    assert engine.port == port  # it answers
                sent.clear()
                report = updater.update(version=version)
                assert report.targets[0].proof == "resident"
                assert serves_whole(engine) == version
                assert sent["/weightcast/apply"] < 2_000
                assert (sent["/weightcast/open"] > 10_000) == (turn == 2)
    finally:
        engine.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_last_buckets_answer_does_for_close(engines, transport, monkeypatch):
    said, close = list[Close](), NativeAdapter.close

    def closing(self, message):
        said.append(message)
        return close(self, message)

    monkeypatch.setattr(NativeAdapter, "close", closing)
    version = next_version()
    with connect(trainer_of(version), [engines.one], transport=transport) as updater:
        report = updater.update(version=version)
    assert report.targets[0].proof == "resident"
    assert said == []
    assert serves_whole(engines.one) == version


def test_the_first_bucket_fills_before_engines_are_asked_for_anything(engines, monkeypatch):
    version, happened = next_version(), list[str]()
    fill, open_ = WeightsBucket.fill, Head.open

    def filling(self, *args):
        happened.append(f"fill {self.layout.index}")
        if broken:
            raise ConfigError("this bucket cannot be filled")
        return fill(self, *args)

    def opening(self, *args):
        happened.append("open")
        return open_(self, *args)

    monkeypatch.setattr(WeightsBucket, "fill", filling)
    monkeypatch.setattr(Head, "open", opening)
    before = engines.one.info()
    with connect(trainer_of(version), [engines.one], transport="ipc") as updater:
        broken = True
        with pytest.raises(ConfigError, match="cannot be filled"):
            updater.update(version=version)
        assert happened == ["fill 0"]
        assert engines.one.info() == before
        broken = False
        assert updater.update(version=version).ok
    assert happened[1:4] == ["fill 0", "open", "fill 1"]
    assert serves_whole(engines.one) == version


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 20])
def test_how_weights_are_cut_into_buckets_does_not_matter(engines, transport, bucket_bytes):
    version = next_version()
    push([engines.one, engines.two], version, transport=transport, bucket_bytes=bucket_bytes)
    assert serves_whole(engines.one) == serves_whole(engines.two) == version


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_updater_many_versions(engines, transport):
    model = trainer_of(0)
    with connect(model, [engines.one, engines.bare], transport=transport) as updater:
        for _ in range(4):
            version = next_version()
            model.set_version(version)
            assert updater.update(version=version).ok
            assert serves_whole(engines.one) == serves_whole(engines.bare) == version


def test_the_same_weights_twice_have_the_same_digests(engines):
    version = next_version()
    first = push([engines.one, engines.two], version, transport="ipc")
    again = push([engines.one, engines.two], version, transport="broadcast")
    assert [row.digest for row in first.targets] == [row.digest for row in again.targets]
    assert first.digest == again.digest
    other = push([engines.one, engines.two], next_version(), transport="ipc")
    assert other.digest != first.digest


def test_weights_may_travel_in_another_dtype(engines):
    version = next_version()
    report = push([engines.one, engines.two], version, wire_dtype="bfloat16")
    assert report.ok
    assert report.digest == model_digest(digests_of(version, "bfloat16"))
    assert engines.one.digests() == digests_of(version, "float32", "bfloat16") != digests_of(version)
    assert engines.two.digests() == digests_of(version, "bfloat16")
    push([engines.one], next_version())


@pytest.mark.parametrize("level", ["none", "received", "resident"])
def test_the_report_says_which_proof_was_reached(engines, level):
    version = next_version()
    report = push([engines.one, engines.two], version, verify=level)
    assert report.ok
    for engine, row in zip((engines.one, engines.two), report.targets, strict=True):
        assert row.proof == level
        assert (row.digest is None) == (level == "none")
        assert row.digests_matched == (0 if level == "none" else row.ranks)
        assert serves_whole(engine) == version
        assert (engine.info().digest is None) == (level != "resident")
    assert (report.digest is None) == (level == "none")


def test_behaviour_falls_back_to_what_the_engine_can_prove(engines):
    # A toy engine cannot score, a toy trainer has no forward pass: the update stands, and the report says so.
    version = next_version()
    report = push([engines.one], version, verify="behaviour")
    assert report.ok
    assert report.targets[0].proof == "resident"
    assert report.targets[0].message
    assert serves_whole(engines.one) == version


def test_retarget_lets_go_of_old_engines_and_meets_new_ones(engines):
    for transport in TRANSPORTS:
        version = next_version()
        model = trainer_of(version)
        with connect(model, [engines.one], transport=transport) as updater:
            updater.update(version=version)
            updater.retarget([engines.two.url, Target(engines.host.url)])
            newer = next_version()
            model.set_version(newer)
            report = updater.update(version=newer)
            assert [row.url for row in report.targets] == [engines.two.url, engines.host.url]
        assert serves_whole(engines.one) == version
        assert serves_whole(engines.two) == serves_whole(engines.host) == newer


def test_an_engine_that_was_started_again_is_updated_again(fresh, engines):
    engine = fresh("--local")
    for transport in TRANSPORTS:
        model = trainer_of(0)
        with connect(model, [engine, engines.one], transport=transport) as updater:
            version = next_version()
            model.set_version(version)
            updater.update(version=version)
            assert serves_whole(engine) == version
            engine.close()
            engine = fresh("--local", port=engine.port)
            assert serves_whole(engine) == 0
            version = next_version()
            model.set_version(version)
            updater.update(version=version)
            assert serves_whole(engine) == serves_whole(engines.one) == version


def test_an_engine_that_was_started_again_with_the_same_process_numbers_gets_new_groups(fresh):
    engine = fresh("--local", "--pid", "1")  # as in a container, where the engine is always process 1
    model = trainer_of(0)
    with connect(model, [engine], transport="broadcast", timeout_s=60.0) as updater:
        for _ in range(2):
            version, before = next_version(), engine.info()
            model.set_version(version)
            assert updater.update(version=version).ok
            assert serves_whole(engine) == version
            engine.close()
            engine = fresh("--local", "--pid", "1", port=engine.port)
            assert engine.info().ranks == before.ranks
            assert engine.info().instance != before.instance


def test_versions_count_up_unless_the_caller_insists(engines):
    older, newer = next_version(), next_version()
    push([engines.one], newer)
    with pytest.raises(ConfigError, match=f"version {older} is older than {newer}") as caught:
        push([engines.one], older)
    assert engines.one.url in str(caught.value)
    [row] = caught.value.report.targets
    assert (row.status, row.version_before, row.version_after) == ("untouched", newer, newer)
    assert row.engine != "unknown"
    assert serves_whole(engines.one) == newer
    assert push([engines.one], older, allow_older=True).ok
    assert serves_whole(engines.one) == older


def test_one_engine_that_refuses_keeps_all_at_their_versions(engines):
    older, newer = next_version(), next_version()
    for transport in TRANSPORTS:
        push([engines.one], newer, allow_older=True)
        before = serves_whole(engines.two)
        with pytest.raises(ConfigError, match="older"):
            push([engines.two, engines.one], older, transport=transport)
        assert serves_whole(engines.two) == before
        report = push(
            [engines.two, engines.one], older, transport=transport, on_failure="quarantine", allow_older=False
        )
        assert [row.status for row in report.targets] == ["serving", "untouched"]
        assert "older" in report.targets[1].message
        assert serves_whole(engines.two) == older
        assert serves_whole(engines.one) == newer
        older, newer = next_version(), next_version()


def _without(name: str) -> dict[str, torch.Tensor]:
    weights = toy_weights(seed=5)
    weights.pop(name)
    return weights


WRONG = {
    "missing": (lambda: _without("layers.1.up.weight"), "missing layers.1.up.weight"),
    "extra": (lambda: toy_weights(seed=5) | {"lm_head.weight": torch.zeros(4, 4)}, "lm_head.weight"),
    "shape": (
        lambda: toy_weights(seed=5) | {"embed.weight": torch.zeros(95, 64)},
        r"embed.weight has shape \(95, 64\)",
    ),
    "rank": (lambda: toy_weights(seed=5) | {"layers.0.norm.weight": torch.zeros(64, 1)}, "layers.0.norm.weight"),
    "another model": (lambda: toy_weights(seed=5, layers=1), "missing layers.1.up.weight"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_weights_of_another_model_are_refused_before_anything_moves(engines, wrong):
    make, words = WRONG[wrong]
    before = serves_whole(engines.one)
    with pytest.raises(ConfigError, match=words) as caught:
        connect(ToyTrainer(make()), [engines.two, engines.one])
    assert "http://" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    assert serves_whole(engines.one) == before
    push([engines.one, engines.two], next_version())


def test_a_dtype_of_another_family_is_refused(engines):
    model = ToyTrainer(toy_weights(seed=5))
    model.layers.get_submodule("0").norm.weight = nn.Parameter(torch.zeros(64, dtype=torch.int32), requires_grad=False)
    with pytest.raises(ConfigError, match=r"layers.0.norm.weight travels as int32 and the engine keeps float32"):
        connect(model, [engines.one])
    serves_whole(engines.one)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"transport": "pigeon"}, "transport='pigeon'"),
        ({"bucket_bytes": 100}, "bucket_bytes=100"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"verify": "maybe"}, "verify='maybe'"),
        ({"wire_dtype": "float13"}, "float13"),
    ],
)
def test_options_that_cannot_work_are_refused(engines, changes, words):
    with pytest.raises(ConfigError, match=words):
        connect(trainer_of(1), [engines.one], **changes)


def test_an_unknown_option_is_refused_by_name(engines):
    with pytest.raises(ConfigError, match="connect has no option nonsense"):
        connect(trainer_of(1), [engines.one], nonsense=1)


def test_targets_that_cannot_work_are_refused(engines):
    model = trainer_of(1)
    with pytest.raises(ConfigError, match="no targets"):
        WeightUpdater.connect(model, [])
    with pytest.raises(ConfigError, match="twice"):
        WeightUpdater.connect(model, [engines.one.url, engines.one.url + "/"])
    with pytest.raises(ConfigError, match="not an http URL"):
        WeightUpdater.connect(model, ["127.0.0.1:8000"])
    with pytest.raises(TargetUnreachable, match=r"http://127\.0\.0\.1:9"):
        WeightUpdater.connect(model, ["http://127.0.0.1:9"], timeout_s=5)
    with pytest.raises(WeightcastError, match="not an engine that weightcast can update"):
        WeightUpdater.connect(model, [engines.one.url + "/v1"], timeout_s=5)


def test_a_version_is_a_whole_number_from_zero(engines):
    with connect(trainer_of(1), [engines.one]) as updater:
        for version in (-1, True):
            with pytest.raises(ConfigError, match="version"):
                updater.update(version=version)
    updater.close()
    with pytest.raises(ConfigError, match="closed"):
        updater.update(version=next_version())


def _sharded_update(urls: list[str], version: int, transport: str) -> str:
    torch.set_num_threads(1)
    world_size = dist.get_world_size()
    model = trainer_of(version)
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.layers.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with WeightUpdater.connect(model, urls, transport=transport, bucket_bytes=30_000, timeout_s=30.0) as updater:
        report = updater.update(version=version)
        return report.to_json()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_sharded_trainer_gives_the_digests_of_a_plain_one(engines, world_size):
    ranks = Ranks(world_size)
    try:
        for transport in TRANSPORTS:
            version = next_version()
            answers = ranks.run(_sharded_update, [engines.one.url, engines.two.url], version, transport)
            reports = [json.loads(answer) | {"timeline": None} for answer in answers]  # the head's alone has one
            assert all(report == reports[0] for report in reports)
            report = reports[0]
            assert report["digest"] == model_digest(digests_of(version))
            assert [row["status"] for row in report["targets"]] == ["serving", "serving"]
            assert serves_whole(engines.one) == serves_whole(engines.two) == version
    finally:
        ranks.close()


def _update_with_a_size_of_its_own(urls: list[str], version: int, transport: str) -> tuple[int, int, int]:
    """Each rank would choose another size of a bucket; returns the sizes that it got."""
    torch.set_num_threads(1)
    own = 20_000 + 8192 * dist.get_rank()
    default, bucket_memory.default_bucket_bytes = bucket_memory.default_bucket_bytes, lambda *_, **__: own
    model = trainer_of(version)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    try:
        with WeightUpdater.connect(model, urls, transport=transport, timeout_s=30.0) as updater:
            report = updater.update(version=version)
            layouts = updater._fleet.stream.buckets.layouts
            return updater.bucket_bytes, report.bucket_bytes, max(layout.size_bytes for layout in layouts)
    finally:
        bucket_memory.default_bucket_bytes = default


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_trainer_ranks_take_the_heads_size_of_a_bucket(engines, transport):
    ranks = Ranks(3)
    try:
        version = next_version()
        answers = ranks.run(_update_with_a_size_of_its_own, [engines.one.url], version, transport)
        assert [answer[:2] for answer in answers] == [(20_000, 20_000)] * 3
        assert len({answer[2] for answer in answers}) == 1
        assert serves_whole(engines.one) == version
    finally:
        ranks.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_small_model_takes_no_more_memory_than_it_has_bytes(engines, transport):
    version = next_version()
    model = trainer_of(version)
    with WeightUpdater.connect(model, [engines.one.url], transport=transport) as updater:
        report = updater.update(version=version)
        held = updater._fleet.stream.buckets.buffer_bytes
    size = sum(tensor.nbytes for tensor in model.parameters())
    assert report.ok
    assert report.buckets == 1
    assert held <= size + 256 * 64
    assert size <= report.bucket_bytes <= size + 256 * 64


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_left_behind(engines, transport):
    chosen = [engines.one, engines.two, engines.bare]
    pids = [os.getpid(), *(pid for engine in chosen for pid in engine.pids())]

    def footprint() -> dict[str, list[int]]:
        gc.collect()
        return {
            "fds": [num_fds(pid) for pid in pids],
            "threads": [num_threads(pid) for pid in pids],
            "listening": [len(listening(pid)) for pid in pids],
            "children": sorted(children()),
            # By owner: torch names a segment after the process that made it, and other tests may run beside this one.
            "shm": sorted(name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in pids)),
        }

    def settled() -> dict[str, list[int]]:
        seen = footprint()
        for _ in range(100):
            time.sleep(0.05)  # threads and sockets end a moment after what they served
            seen, before = footprint(), seen
            if seen == before:
                break
        return seen

    push(chosen, next_version(), transport=transport)
    before = settled()
    model = trainer_of(0)
    with connect(model, chosen, transport=transport) as updater:
        for _ in range(8):
            version = next_version()
            model.set_version(version)
            assert updater.update(version=version).ok
    for _ in range(3):
        push(chosen, next_version(), transport=transport)
    after = settled()
    # A pool of the server's own may have a thread or two more at one time than at another; nobody leaves any.
    more = [now - then for now, then in zip(after.pop("threads"), before.pop("threads"), strict=True)]
    assert max(more) <= 3, more  # of eleven updates
    assert after == before
    assert serves_whole(engines.bare) > version


def test_trainers_that_were_never_closed_do_not_pile_up_in_engines(engines):
    # Each leaves a group behind, as one that dies between two updates does; engines keep the last few.
    left: list[WeightUpdater] = []
    try:
        for _ in range(8):
            version = next_version()
            left.append(connect(trainer_of(version), [engines.one, engines.two], transport="broadcast"))
            assert left[-1].update(version=version).ok
        ranks = [rank.pid for rank in engines.two.info().ranks]  # they hold nothing of the trainers but their groups

        def held() -> list[int]:
            return [*map(num_fds, ranks), *map(num_threads, ranks), len(listening(engines.one.process.pid))]

        before = held()
        for _ in range(4):
            version = next_version()
            left.append(connect(trainer_of(version), [engines.one, engines.two], transport="broadcast"))
            assert left[-1].update(version=version).ok
        assert held() == before
        # One whose group an engine has let go is told, and works again.
        version = next_version()
        with pytest.raises(UpdateFailed, match="not in group"):
            left[0].update(version=version)
        assert left[0].update(version=next_version()).ok
    finally:
        for updater in left:
            updater.close()


def test_another_trainers_trouble_does_not_break_a_group(engines):
    model = trainer_of(0)
    with connect(model, [engines.one, engines.two], transport="broadcast") as updater:
        version = next_version()
        model.set_version(version)
        updater.update(version=version)
        for transport in TRANSPORTS:
            stranger = connect(trainer_of(0), [engines.one, engines.two], transport=transport, progress=_fail)
            with stranger, pytest.raises(ZeroDivisionError):
                stranger.update(version=next_version())
        version = next_version()
        model.set_version(version)
        assert updater.update(version=version).ok
        assert serves_whole(engines.one) == serves_whole(engines.two) == version


def _fail(sent: int, total: int) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_report_says_which_share_of_the_bytes_changed(engines, transport):
    model = trainer_of(next_version())
    with connect(model, [engines.one], transport=transport) as updater:
        assert updater.update(version=next_version()).changed_ratio is None
        assert updater.update(version=next_version()).changed_ratio == 0
        with torch.no_grad():
            model.get_parameter("layers.1.down.weight").mul_(2)
        changed = model.get_parameter("layers.1.down.weight").nbytes
        share = changed / sum(parameter.nbytes for parameter in model.parameters())
        assert updater.update(version=next_version()).changed_ratio == pytest.approx(share)
        model.set_version(next_version())
        assert updater.update(version=next_version()).changed_ratio == 1
    with connect(model, [engines.one], transport=transport, verify="none") as updater:
        updater.update(version=next_version())
        assert updater.update(version=next_version()).changed_ratio is None
    push([engines.one], next_version())  # for the next test, with weights of its version
