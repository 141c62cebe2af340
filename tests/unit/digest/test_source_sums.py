"""The sums that trainer ranks take of their shards are the digest of the whole tensor."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.helpers.exports import ALONE, CPU, bucketize, plan
from tests.helpers.playing import Game
from tests.helpers.ranks import allocate_slots
from tests.helpers.source_sums import summed
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest import on_cpu
from weightcast.digest.definition import tensor_digest
from weightcast.digest.source_sums import AllSums, Mismatch, SourceSums, SumPlaces
from weightcast.digest.transfers import transfers_on
from weightcast.exporters import all_sums, own_parts
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.exporters.converter import BridgeExporter
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.multi_module import ComposedExporter, Part
from weightcast.exporters.state_dict import StateDictExporter
from weightcast.wire.layout import Packing, plan_buckets


def test_a_checkpoint_is_summed_as_it_was_read(tmp_path):
    from safetensors.torch import save_file

    weights = {"a": torch.randn(7, 3), "b": torch.randn(5)}
    save_file(weights, tmp_path / "model.safetensors")
    with CheckpointExporter(tmp_path) as exporter:
        sums, gathered, mismatches, _ = summed(exporter, ALONE, bucket_bytes=64)
    assert sums == gathered == {name: tensor_digest(tensor) for name, tensor in weights.items()}
    assert mismatches == []


def test_a_state_dict_is_summed_where_it_lies():
    weights = {"a": torch.randn(7, 3), "b": torch.randn(5)}
    exporter = StateDictExporter(weights)
    sums, gathered, mismatches, _ = summed(exporter, ALONE, bucket_bytes=64)
    assert sums == gathered == {name: tensor_digest(tensor) for name, tensor in weights.items()}
    assert mismatches == []
    assert exporter.scatters, "engines may read its shards without a gather"


def test_a_bucket_says_that_it_is_finite_where_all_of_it_was_seen():
    assert on_cpu.available()
    model = nn.Module()
    model.a, model.b = (nn.Parameter(torch.randn(80, 70, dtype=torch.bfloat16)) for _ in range(2))
    exporter = ModuleExporter(model)
    layouts = plan_buckets(exporter.specs(), bucket_bytes=80 * 140, packing=Packing())
    slots = allocate_slots(CPU, 80 * 140)

    def found() -> list[bool]:
        filled = bucketize(exporter, layouts, ALONE, slots, sums=True)
        return [bucket.finite for bucket in filled if bucket is not None]

    assert found() == [True, True]
    with torch.no_grad():
        model.b[79, 69] = math.inf
    assert found() == [True, False]
    with torch.no_grad():
        model.b[79, 69] = 0
    assert found() == [True, True]
    unsummed = bucketize(exporter, layouts, ALONE, slots)
    assert not any(bucket.finite for bucket in unsummed if bucket is not None)
    half = ModuleExporter(model, wire_dtype=torch.float16)
    halves = plan_buckets(half.specs(), bucket_bytes=80 * 140, packing=Packing())
    cast = bucketize(half, halves, ALONE, slots, sums=True)
    assert not any(bucket.finite for bucket in cast if bucket is not None), "values that were cast were not seen"


def test_what_nobody_sums_at_its_source_is_named():
    weights = {"x": torch.ones(3), "y": torch.ones(2, 2)}
    bridge = BridgeExporter(lambda: weights.items())
    assert list(bridge.unsummed()) == ["x", "y"]
    composed = ComposedExporter({"policy": nn_exporter(), "rest": Part(exporter=bridge, prefix="rest.")})
    assert list(composed.unsummed()) == ["rest.x", "rest.y"]
    layouts = plan_buckets(composed.specs(), bucket_bytes=4096, packing=Packing())
    [bucket] = plan(composed, layouts)
    sources = SourceSums([bucket.sum_places])
    bucket.fill(torch.zeros(4096, dtype=torch.uint8), *sources.takers)
    [sums] = AllSums.of(sources, sources.to_add_up(), {}).sources
    summed = {slot.spec.name: value != 0 for slot, value in zip(layouts[0].slots, sums.tolist(), strict=True)}
    assert summed == {"weight": True, "bias": True, "rest.x": False, "rest.y": False}


def nn_exporter() -> ModuleExporter:
    return ModuleExporter(nn.Linear(2, 3))


def test_weights_of_now_are_summed_whatever_became_of_their_memory():
    model = nn.Linear(4, 4)
    exporter = ModuleExporter(model)
    for change in range(3):
        with torch.no_grad():
            model.weight.add_(change)
        if change == 2:
            model.weight = nn.Parameter(torch.randn(8, 4).t()[:, :4])  # other strides, another storage
        sums, gathered, _, _ = summed(exporter, ALONE, bucket_bytes=4096)
        assert sums == gathered
        assert sums["weight"] == tensor_digest(model.weight)


def test_what_is_summed_while_it_is_copied_is_not_read_again(monkeypatch):
    assert transfers_on(CPU)
    monkeypatch.setattr(own_parts.OwnParts, "_sums", None)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    for bucket_bytes in (64, 4096):
        sums, gathered, _, _ = summed(ModuleExporter(model), ALONE, bucket_bytes=bucket_bytes)
        assert sums == gathered == {name: tensor_digest(value) for name, value in model.named_parameters()}


@dataclass(slots=True)
class Played:
    """A bucket of random parts, some of which ranks only compare."""

    places: list[SumPlaces]
    added: list[list[tuple[int, int]]]  # place and value, on each rank
    right: list[int]
    wrong: dict[str, set[frozenset[int]]]


def played(bucket: int, world_size: int, num_slots: int, rng: random.Random) -> Played:
    places = [SumPlaces(rank, num_slots) for rank in range(world_size)]
    one = Played(places, [[] for _ in places], [0] * num_slots, {})
    for number in range(rng.randint(0, 8)):
        name, slot = f"{bucket}.{number}", rng.choice([None, *range(num_slots)])
        holders = sorted(rng.sample(range(world_size), rng.randint(1, world_size)))
        value = rng.randint(-(2**63), 2**63 - 1)
        odd = rng.choice(holders) if len(holders) > 1 and rng.random() < 0.3 else None
        for rank in holders:
            place = places[rank].place(name, slot, holders)
            one.added[rank].append((place, value ^ 1 if rank == odd else value))
        if slot is not None:
            one.right[slot] += value ^ 1 if odd == holders[0] else value
        if odd is not None:
            one.wrong[name] = {frozenset(holders) - {odd}, frozenset({odd})}
    return one


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_a_part_counts_once_and_differences_are_named(world_size, sizes, rng):
    buckets = [played(number, world_size, size, rng) for number, size in enumerate(sizes)]

    def add_up(rank: int, group: TrainerGroup) -> tuple[AllSums, list[Mismatch]]:
        own = SourceSums([one.places[rank] for one in buckets])
        for one, taker in zip(buckets, own.takers, strict=True):
            for place, value in one.added[rank]:
                taker.add(torch.tensor([place]), torch.tensor([value]))
        sums = all_sums.add_up(own, None, group, timeout_s=1)
        return sums, all_sums.find_differing(sums, group, timeout_s=1)

    sums, found = Game(world_size).play(add_up)[0]
    for one, totals in zip(buckets, sums.sources, strict=True):
        assert [total % 2**64 for total in totals.tolist()] == [total % 2**64 for total in one.right]
    wrong = {name: groups for one in buckets for name, groups in one.wrong.items()}
    assert {one.name: set(map(frozenset, one.ranks)) for one in found} == wrong
    assert sums.differ == bool(wrong)


def test_values_that_two_tensors_have_exchanged_on_one_rank_differ():
    def add_up(rank: int, group: TrainerGroup) -> tuple[bool, list[str]]:
        buckets = [SumPlaces(rank, 1) for _ in range(2)]
        places = [one.place(f"w{number}", 0, (0, 1)) for number, one in enumerate(buckets)]
        own = SourceSums(buckets)
        for number, (taker, place) in enumerate(zip(own.takers, places, strict=True)):
            taker.add(torch.tensor([place]), torch.tensor([7 if number == rank else 8]))
        sums = all_sums.add_up(own, None, group, timeout_s=1)
        return sums.differ, [one.name for one in all_sums.find_differing(sums, group, timeout_s=1)]

    assert Game(2).play(add_up)[0] == (True, ["w0", "w1"])


def test_nothing_is_nothing():
    sums = SourceSums([])
    assert (sums.takers, AllSums.of(sums, sums.to_add_up(), {}).sources) == ([], [])
