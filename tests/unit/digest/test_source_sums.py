"""The sums that trainer ranks take of their shards are the digest of the whole tensor; real gloo ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.helpers.exports import ALONE, CPU, bucketize
from tests.helpers.ranks import allocate_slots
from tests.helpers.source_sums import summed
from weightcast.digest import on_cpu
from weightcast.digest.definition import tensor_digest
from weightcast.digest.source_sums import Folded, Ledger, SourceSums
from weightcast.digest.transfers import transfers_on
from weightcast.exporters import own_parts, sum_messages
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.exporters.converter import BridgeExporter
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.multi_module import ComposedExporter, Part
from weightcast.exporters.state_dict import StateDictExporter
from weightcast.protocols import TO_HEAD
from weightcast.wire.layout import Packing, plan_buckets


@pytest.mark.parametrize("slots", [(0, 1, 2), (2, 0, 1), (0, 0, 1), (0, None, 1)])
@pytest.mark.parametrize("again", [False, True])
def test_one_rank_has_its_sums_added_to_the_slots_that_they_are_of(slots, again):
    ledger = Ledger(3)
    for slot in slots:
        ledger.expect(0, ledger.group("t", slot))
    if again:
        ledger.fold([torch.tensor([5, 6, 7])])
    folded = ledger.fold([torch.tensor([10, 20, 30])])
    wanted = [0, 0, 0]
    for slot, value in zip(slots, (10, 20, 30), strict=True):
        if slot is not None:
            wanted[slot] += value
    assert (folded.sums.tolist(), folded.known.tolist(), folded.mismatches) == (wanted, [True] * 3, ())


# -- any mesh


# -- a bit that flips while it is gathered, and replicas that differ


# -- experts, fused tensors, composed models, what is computed


# -- exporters that hold nothing, and arithmetic


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
    slots, sources = allocate_slots(CPU, 80 * 140), SourceSums()

    def found() -> list[bool]:
        filled = bucketize(exporter, layouts, ALONE, slots, sources)
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
    cast = bucketize(half, halves, ALONE, slots, sources)
    assert not any(bucket.finite for bucket in cast if bucket is not None), "values that were cast were not seen"


def test_what_nobody_sums_at_its_source_is_named():
    weights = {"x": torch.ones(3), "y": torch.ones(2, 2)}
    bridge = BridgeExporter(lambda: weights.items())
    assert list(bridge.unsummed()) == ["x", "y"]
    composed = ComposedExporter({"policy": nn_exporter(), "rest": Part(exporter=bridge, prefix="rest.")})
    assert list(composed.unsummed()) == ["rest.x", "rest.y"]
    layouts = plan_buckets(composed.specs(), bucket_bytes=4096, packing=Packing())
    sources = SourceSums()
    list(bucketize(composed, layouts, ALONE, allocate_slots(CPU, 4096), sources))
    folded, _ = sum_messages.decode(composed.plan(layouts, ALONE, TO_HEAD), [sum_messages.encode(sources.values(), ())])
    known = {slot.spec.name: bool(k) for slot, k in zip(layouts[0].slots, folded[0].known, strict=True)}
    assert known == {"weight": True, "bias": True, "rest.x": False, "rest.y": False}


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
    monkeypatch.setattr(own_parts.OwnParts, "_sum_views", None)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    for bucket_bytes in (64, 4096):
        sums, gathered, _, _ = summed(ModuleExporter(model), ALONE, bucket_bytes=bucket_bytes)
        assert sums == gathered == {name: tensor_digest(value) for name, value in model.named_parameters()}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_group_counts_once_and_differences_are_named(world_size, num_slots, rng):
    ledger, values, right = Ledger(num_slots), {}, [0] * num_slots
    wrong: dict[str, tuple[set[int], set[int]]] = {}
    answers: list[list[int]] = [[] for _ in range(world_size)]
    for number in range(rng.randint(0, 8)):
        slot = rng.choice([None, *range(num_slots)])
        holders = sorted(rng.sample(range(world_size), rng.randint(1, world_size)))
        group = ledger.group(f"t{number}", slot)
        value = values[number] = rng.randint(-(2**63), 2**63 - 1)
        odd = rng.choice(holders[1:]) if len(holders) > 1 and rng.random() < 0.3 else None
        for rank in holders:
            assert ledger.expect(rank, group) == len(answers[rank])
            answers[rank].append(value if rank != odd else value ^ 1)
        if slot is not None:
            right[slot] += value
        if odd is not None:
            wrong[f"t{number}"] = {one for one in holders if one != odd}, {odd}
    folded = ledger.fold([torch.tensor(answer, dtype=torch.int64) for answer in answers])
    assert [ledger.count(rank) for rank in range(world_size)] == [len(answer) for answer in answers]
    assert [total % 2**64 for total in folded.sums.tolist()] == [total % 2**64 for total in right]
    assert {one.name: tuple(map(set, one.ranks)) for one in folded.mismatches} == wrong


def test_nothing_is_nothing():
    assert SourceSums().values().tolist() == []
    layout = plan_buckets(nn_exporter().specs(), bucket_bytes=4096, packing=Packing())[0]
    assert not Folded.unknown(layout).known.any()
