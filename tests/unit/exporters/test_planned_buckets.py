"""Planned buckets of models that ranks hold in any way: what ranks serve, and what their sums add up to."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.playing import Game
from tests.unit.exporters.test_placements import jobs
from tests.unit.update.test_exchange import Trainer, values_of
from weightcast.digest.bucket_sums import sums_of_slots
from weightcast.digest.source_sums import AllSums, SourceSums
from weightcast.protocols import BucketUse, PlannedBucket
from weightcast.wire.box import Box, tiles
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout, Packing, plan_buckets

SCATTERED = BucketUse(scattered=True)


def trainers_of(job: dict[str, Any], hosts: list[str]) -> list[Trainer]:
    game = Game(math.prod(job["axes"]))
    game.hosts = tuple(hosts[: game.world_size])
    found = game.play(lambda rank, group: Trainer(job, rank, group))
    return [found[rank] for rank in range(game.world_size)]


def planned(
    trainers: list[Trainer], use: BucketUse, bucket_bytes: int
) -> list[tuple[BucketLayout, list[PlannedBucket]]]:
    """Each layout, with its bucket on each rank."""
    layouts = plan_buckets(trainers[0].specs, bucket_bytes=bucket_bytes, packing=Packing())
    return [(layout, [one.gatherer.plan(layout, one.group, use) for one in trainers]) for layout in layouts]


def is_whole(layout: BucketLayout, parts: list[tuple[int, Box]]) -> bool:
    """True if the parts are every element of each slot exactly once."""
    boxes: dict[int, list[Box]] = {}
    for number, box in parts:
        boxes.setdefault(number, []).append(box)
    return all(tiles(boxes.get(number, []), slot.box) for number, slot in enumerate(layout.slots))


def in_memory(job: dict[str, Any]) -> dict[str, Any]:
    return job | {"computed": set()}


job_on_hosts = st.tuples(
    jobs().map(in_memory), st.lists(st.sampled_from("abc"), min_size=16, max_size=16), st.sampled_from([256, 1 << 16])
)


@settings(max_examples=25, deadline=None, database=None, derandomize=True)
@given(case=job_on_hosts)
def test_ranks_serve_every_element_exactly_once(case):
    job, hosts, bucket_bytes = case
    trainers = trainers_of(job, hosts)
    for layout, buckets in planned(trainers, SCATTERED, bucket_bytes):
        assert is_whole(layout, [part for bucket in buckets for part in bucket.serves])


@settings(max_examples=25, deadline=None, database=None, derandomize=True)
@given(case=job_on_hosts)
def test_each_host_that_reads_is_served_every_element_exactly_once(case):
    job, hosts, bucket_bytes = case
    trainers = trainers_of(job, hosts)
    hosts = hosts[: len(trainers)]
    whole = sorted(trainers[0].gatherer.whole_on(hosts))
    use = BucketUse(scattered=True, reading_hosts=tuple(whole))
    for layout, buckets in planned(trainers, use, bucket_bytes):
        for host in whole:
            mine = [bucket for bucket, its in zip(buckets, hosts, strict=True) if its == host]
            assert is_whole(layout, [part for bucket in mine for part in bucket.serves])
    legs = (*sorted(set(hosts)), "")
    for layout, buckets in planned(trainers, BucketUse(scattered=True, leg_hosts=legs), bucket_bytes):
        for host in legs:
            assert is_whole(layout, [part for bucket in buckets for part in bucket.serves_to[host]])


@settings(max_examples=25, deadline=None, database=None, derandomize=True)
@given(case=job_on_hosts)
def test_sums_of_all_ranks_add_up_to_those_of_the_whole(case):
    job, hosts, bucket_bytes = case
    trainers = trainers_of(job, hosts)
    values = values_of(trainers[0].specs, 1)
    for trainer in trainers:
        trainer.fill(values)
    for layout, buckets in planned(trainers, SCATTERED, bucket_bytes):
        whole = Bucket(layout, torch.zeros(max(layout.size_bytes, 1), dtype=torch.uint8))
        for slot, view in whole.views():
            rows = slice(slot.first_row, slot.first_row + slot.num_rows) if slot.spec.shape else ...
            view.copy_(values[slot.spec.name][rows])
        for rank, bucket in enumerate(buckets):
            assert all(rank in part.ranks for part in bucket.sum_places.compared), "a rank plans sums of others"
        ranks = [SourceSums([bucket.sum_places]) for bucket in buckets]
        for bucket, sums in zip(buckets, ranks, strict=True):
            bucket.fill(torch.zeros(max(layout.size_bytes, 1), dtype=torch.uint8), *sums.takers)
        added = torch.stack([sums.to_add_up() for sums in ranks]).sum(0)
        found = AllSums.of(ranks[0], added, {})
        assert (found.sources[0].tolist(), found.differ) == (sums_of_slots(whole).tolist(), False)
