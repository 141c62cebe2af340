"""Every way of ``direct`` takes two buckets of extra memory at most on either side, however large the model is."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from tests.e2e.test_direct import EVERY_WAY, RELAY, SHARDS
from tests.helpers.clock import PATIENCE_S
from tests.helpers.harness import ToyTrainer, next_version, on_every_rank, share_memory
from tests.helpers.ranks import Ranks
from tests.helpers.toy_engine import toy_weights
from weightcast.lab.connect import connect

MIB = 1 << 20
ROWS = 400_000
BUCKET_BYTES = 8 * MIB
# Threads, connections, tables, and what the allocator keeps: measured in whole processes.
ROOM_BYTES = 24 * MIB
LIMIT_BYTES = 2 * BUCKET_BYTES + ROOM_BYTES


def update_large(urls: list[str], versions: list[int], options: dict) -> list[str]:
    """The report of each update of a model that is larger than the limit; the weights are changed before each."""
    model = ToyTrainer(toy_weights(seed=versions[0], rows=ROWS))
    model.buffer = share_memory(model, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    found: list[str] = []
    chosen = {"transport": "direct", "timeout_s": PATIENCE_S, "bucket_bytes": BUCKET_BYTES} | options
    with connect(model, urls, **chosen) as updater:
        for version in versions:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
            found.append(on_every_rank(updater.update(version=version)))
    return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    job = Ranks(2)
    yield job
    job.close()


@EVERY_WAY
def test_no_side_needs_more_than_two_buckets(fresh, ranks, way):
    # Without staging: a second set of weights would be touched in the first update.
    chosen = [fresh("--tp", "2", "--rows", str(ROWS), "--staging", "none") for _ in range(2 if way is RELAY else 1)]
    before = [engine.digests() for engine in chosen]
    versions = [next_version(), next_version()]
    answers = ranks.run(update_large, [engine.url for engine in chosen], versions, way)
    reports = [json.loads(report) for answer in answers for report in answer]
    for report in reports:
        assert report["bytes"] > 2 * LIMIT_BYTES
        assert [row["proof"] for row in report["targets"]] == ["resident"] * len(chosen)
        assert report["peak_extra_bytes"] <= LIMIT_BYTES
        # Pages of the trainer's weights that an engine rank reads in their place are counted as its own.
        mapped = report["bytes"] if way is SHARDS else 0
        for row in report["targets"]:
            assert row["peak_extra_bytes"] - mapped <= LIMIT_BYTES
    if way is not SHARDS:
        # What is measured is there: each side has a bucket, or its share of one.
        assert reports[0]["peak_extra_bytes"] >= BUCKET_BYTES
    assert all(engine.digests() != old for engine, old in zip(chosen, before, strict=True))
