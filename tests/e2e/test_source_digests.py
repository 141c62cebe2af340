"""Source digests: a gather that corrupts a bit and replicas that differ fail an update."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.helpers.harness import (
    ToyTrainer,
    connect,
    digests_of,
    next_version,
    on_every_rank,
    serves_whole,
    trainer_of,
)
from tests.helpers.ranks import Ranks
from weightcast import UpdateFailed, WeightUpdater
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.bucket_sums import PlanSums
from weightcast.digest.definition import model_digest, tensor_digest
from weightcast.digest.sent import SentDigests
from weightcast.digest.source_sums import Taker
from weightcast.exporters.converter import BridgeExporter
from weightcast.protocols import Exporter
from weightcast.wire.bucket import Bucket


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def sharded(version: int) -> ToyTrainer:
    model = trainer_of(version)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def told(model: torch.nn.Module | Exporter, urls: list[str], versions: list[int], restore, **options) -> list[str]:
    """The end of each update: its report as JSON, or the error and the status of each target."""
    ended = []
    with WeightUpdater.connect(model, urls, **{"bucket_bytes": 30_000, "timeout_s": 30.0} | options) as updater:
        for version in versions:
            try:
                ended.append(on_every_rank(updater.update(version=version)))
            except UpdateFailed as error:
                ended.append(json.dumps([str(error), [row.status for row in error.report.targets]]))
            restore()
    return ended


def update_while_a_bit_flips(urls: list[str], versions: list[int], batch: int, options: dict) -> list[str]:
    """Flips one bit of the bytes that the head received from another rank, in the first update."""
    move, batches = TrainerGroup.move, list[int]()

    def flipping(self, sends, receives, *, what):
        move(self, sends, receives, what=what)
        if receives and self.is_head:
            if len(batches) == batch:
                receives[0].data.view(-1).view(torch.uint8)[1] ^= 1
            batches.append(1)

    def restore():
        TrainerGroup.move = move

    model = sharded(versions[0])
    TrainerGroup.move = flipping
    try:
        return told(model, urls, versions, restore, **options)
    finally:
        restore()


@pytest.mark.parametrize(
    ("transport", "names", "batch"),
    [("ipc", "one", 0), ("broadcast", "one", 7), ("ipc", "two", 7), ("broadcast", "one+two+host", 0)],
)
def test_a_bit_that_flips_in_the_gather_fails_the_update_before_the_commit(engines, two_ranks, transport, names, batch):
    chosen = [getattr(engines, name) for name in names.split("+")]
    before, version = [serves_whole(engine) for engine in chosen], next_version()
    options = {"transport": transport}
    urls = [engine.url for engine in chosen]
    answers = two_ranks.run(update_while_a_bit_flips, urls, [version, version], batch, options)
    assert answers[0] == answers[1]
    words, status = json.loads(answers[0][0])
    assert status == ["untouched"] * len(chosen)
    named = [name for name in digests_of(version) if name in words]
    assert len(named) == 1
    assert "the gather among trainer ranks" in words
    # With one engine rank and a bucket that has left the sender's memory, the wire may be at fault as well.
    assert (f"{engines.one.url} received something else than the trainer ranks hold" in words) == (names == "one")
    # The next update succeeds, and engines move from the old version to it.
    travels = "bfloat16" if names == "two" else "float32"  # the smaller dtype if all engines keep it
    assert json.loads(answers[0][1])["digest"] == model_digest(digests_of(version, travels))
    assert version not in before
    assert [serves_whole(engine) for engine in chosen] == [version] * len(chosen)


def test_engines_serve_the_old_version_after_a_failed_update(engines, two_ranks):
    before, version = serves_whole(engines.one), next_version()
    options = {"transport": "broadcast", "bucket_bytes": 4 << 20}
    options |= {"on_failure": "quarantine"}
    answers = two_ranks.run(update_while_a_bit_flips, [engines.one.url], [version], 0, options)
    words, status = json.loads(answers[0][0])
    # The bucket is still in the sender's buffer, so nothing else can be at fault.
    assert "the bucket of trainer rank 0 has other bytes than the trainer ranks hold, in embed.weight" in words
    assert status == ["untouched"]
    assert serves_whole(engines.one) == before


def update_with_a_diverged_replica(urls: list[str], version: int, wrong_rank: int, options: dict) -> list[str]:
    """Updates with a whole copy on every rank, as under DDP; one copy has a flipped bit in the first update."""
    model = trainer_of(version)
    wrong = dict(model.named_parameters())["layers.1.norm.weight"].data.view(torch.uint8)
    if dist.get_rank() == wrong_rank:
        wrong[2] ^= 1
    done: list[int] = []

    def restore():
        if dist.get_rank() == wrong_rank and not done:
            wrong[2] ^= 1
            done.append(1)

    return told(model, urls, [version, version], restore, **options)


@pytest.mark.parametrize(
    ("transport", "names", "wrong_rank"), [("ipc", "one+two", 0), ("broadcast", "one+two", 1), ("direct", "one", 1)]
)
def test_a_diverged_replica_fails_the_update_and_is_named_with_its_ranks(
    engines, two_ranks, transport, names, wrong_rank
):
    chosen = [getattr(engines, name) for name in names.split("+")]
    for engine in chosen:
        serves_whole(engine)
    version = next_version()
    answers = two_ranks.run(
        update_with_a_diverged_replica, [engine.url for engine in chosen], version, wrong_rank, {"transport": transport}
    )
    assert answers[0] == answers[1]
    words, status = json.loads(answers[0][0])
    assert "layers.1.norm.weight: trainer rank 0 and trainer rank 1 hold different values" in words
    assert "replicas on the trainer have diverged" in words
    assert status == ["untouched"] * len(chosen)
    assert json.loads(answers[0][1])["unsummed"] == []
    assert [serves_whole(engine) for engine in chosen] == [version] * len(chosen)


def update_without_proof(urls: list[str], version: int) -> tuple[int, list[str]]:
    taken, add = list[int](), Taker.add

    def noting(self, places, sums):
        taken.append(len(sums))
        add(self, places, sums)

    Taker.add = noting
    try:
        model = sharded(version)
        return told(model, urls, [version], lambda: None, verify="none"), len(taken)
    finally:
        Taker.add = add


def test_no_rank_sums_without_proof(engines, two_ranks):
    version = next_version()
    answers = two_ranks.run(update_without_proof, [engines.one.url], version)
    assert [count for _, count in answers] == [0, 0]
    assert serves_whole(engines.one) == version


def test_the_head_does_not_sum_a_bucket_that_engines_digest(engines, monkeypatch):
    summed, of = list[int](), PlanSums.of

    def noting(self, bucket):
        summed.append(bucket.layout.index)
        return of(self, bucket)

    monkeypatch.setattr(PlanSums, "of", noting)
    version = next_version()
    with connect(trainer_of(version), [engines.one], transport="ipc") as updater:
        assert updater.update(version=version).targets[0].proof == "resident"
    assert summed == []
    # If an engine keeps another dtype, the head must cast the bucket, and compares it while it reads it.
    version = next_version()
    with connect(trainer_of(version), [engines.two], transport="ipc", wire_dtype=torch.float32) as updater:
        updater.update(version=version)
    assert len(summed) > 10
    assert serves_whole(engines.two) == version


def test_tensors_that_no_rank_sums_are_counted_and_named_and_digested_in_the_bucket(engines, monkeypatch):
    version = next_version()
    weights = dict(trainer_of(version).named_parameters())
    bridge = BridgeExporter(lambda: weights.items())
    with WeightUpdater.connect(bridge, [engines.one.url], bucket_bytes=1 << 20, timeout_s=30.0) as updater:
        report = updater.update(version=version)
    assert report.unsummed == tuple(weights)
    assert f"{len(weights)} tensors were not summed where the trainer holds them: {next(iter(weights))}" in str(report)
    assert report.digest == model_digest({name: tensor_digest(tensor) for name, tensor in weights.items()})
    assert serves_whole(engines.one) == version


def test_a_bucket_that_changes_before_the_head_reads_it_is_caught_there(engines, monkeypatch):
    # With another dtype the head reads its bucket, so both sums can be compared.
    before, version = serves_whole(engines.two), next_version()
    add = SentDigests.add

    def flip_first(self: SentDigests, bucket: Bucket) -> None:
        if bucket.layout.index == 0:
            bucket.data[3] ^= 1
        add(self, bucket)

    monkeypatch.setattr(SentDigests, "add", flip_first)
    with (
        connect(trainer_of(version), [engines.two], transport="ipc", wire_dtype=torch.float32) as updater,
        pytest.raises(UpdateFailed, match="the bucket of trainer rank 0 has other bytes than the trainer ranks hold"),
    ):
        updater.update(version=version)
    assert serves_whole(engines.two) == before
