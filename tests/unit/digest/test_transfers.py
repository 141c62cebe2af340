"""Copying and summing at once, on the CPU: the bytes arrive, and the sums are those of whole tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.exports import ALONE, CPU, bucketize, plan, raw
from tests.helpers.models import FusedModel, ScalingModel, Weights, buckets_of, differing, specs_of, state, weights_of
from tests.helpers.ranks import allocate_slots
from weightcast.digest.bucket_sums import PlanSums
from weightcast.digest.definition import tensor_digest
from weightcast.digest.pieces import TensorPiece, Transfer
from weightcast.digest.transfers import can_transfer, launches_of
from weightcast.exporters.module import ModuleExporter
from weightcast.receiver.loader import Loader
from weightcast.receiver.rank_answers import ResidentFold
from weightcast.wire.answers import RankAck
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import Packing, plan_buckets

OLD, NEW = weights_of(1), weights_of(2)


def digests(weights: Weights) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in weights.items()}


@pytest.mark.parametrize("kind", [FusedModel, ScalingModel])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [200, 1000, 1 << 20])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_loaders_copy_as_ever_and_sum_together_what_they_keep(kind, dtype, bucket_bytes, tp_size):
    ranks = []
    for rank in range(tp_size):
        model, plain = (kind(tp_rank=rank, tp_size=tp_size, dtype=dtype) for _ in range(2))
        for engine in (model, plain):
            engine.load_weights(OLD.items())
        loader = Loader(model, load_weights=model.load_weights, expected=specs_of(NEW))
        if not loader.unstaged_because():
            loader.stage("device")
        ranks.append((model, plain, loader))
    for weights in (NEW, OLD, NEW):  # both sets of weights, and one of them again
        for model, plain, loader in ranks:
            loader.begin()
            for bucket in buckets_of(weights, bucket_bytes=bucket_bytes):
                loader.load(bucket)
            written = loader.written()
            loader.live.commit()
            assert loader.live.held().totals.equal(written.totals[: len(loader.live.held().totals)])
            plain.load_weights(weights.items())
            assert differing(model, state(plain)) == []
        held = [RankAck(rank=rank, **loader.written().fields) for rank, (_, _, loader) in enumerate(ranks)]
        whole = {"scale", "steps", "norm.weight"}  # these have a dtype of their own
        kept = {name: tensor if name in whole else tensor.to(dtype) for name, tensor in weights.items()}
        assert ResidentFold().fold(held).digests == digests(kept)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 3, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(0.5))


def buckets(model: nn.Module, *, bucket_bytes: int, **options):
    exporter = ModuleExporter(model, **options)
    layouts = plan_buckets(exporter.specs(), bucket_bytes=bucket_bytes, packing=Packing())
    for bucket in bucketize(exporter, layouts, ALONE, allocate_slots(CPU, bucket_bytes), sums=True):
        assert bucket is not None
        yield bucket


@pytest.mark.parametrize("bucket_bytes", [64, 300, 1 << 16])
def test_a_trainer_sums_what_it_copies(bucket_bytes):
    torch.manual_seed(4)
    model = Mixed()
    found = list(buckets(model, bucket_bytes=bucket_bytes))
    sums = [(bucket.layout, bucket.sums) for bucket in found if bucket.sums is not None]
    assert len(sums) == len(found)
    whole = {name: value.detach() for name, value in model.named_parameters()}
    assert PlanSums().totals(sums).by_name() == digests(whole)


def test_memory_is_read_as_it_is_viewed_now():
    model = nn.Linear(4, 4, bias=False)
    memory = torch.randn(4, 8)
    model.weight.data = memory.view(-1)[:16].view(4, 4)
    exporter = ModuleExporter(model)
    layouts = plan_buckets(exporter.specs(), bucket_bytes=64, packing=Packing())
    (planned,) = plan(exporter, layouts)
    (data,) = allocate_slots(CPU, 64)[:1]
    for wider in (False, False, True):
        if wider:
            model.weight.data = memory[:, :4]  # the address stays
        planned.fill(data)
        parts = {slot.spec.name: view.clone() for slot, view in Bucket(planned.layout, data).views()}
        assert torch.equal(parts["weight"], model.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_are_cast_and_summed_at_once_to_bfloat16_alone(dtype):
    model = Mixed()
    parts: dict[str, bytes] = {}
    for bucket in buckets(model, bucket_bytes=1 << 16, wire_dtype=dtype):
        parts |= {slot.spec.name: raw(view) for slot, view in bucket.views()}
        if dtype is torch.float16:
            assert bucket.sums is None  # of some slots there are none
        else:
            assert bucket.sums is not None
            whole = {name: value.detach().to(dtype) for name, value in model.named_parameters()}
            assert PlanSums().totals([(bucket.layout, bucket.sums)]).by_name() == digests(whole)
    assert parts == {name: raw(value.to(dtype)) for name, value in model.named_parameters()}


def test_what_cannot_be_one_launch():
    tensor = torch.zeros(4, 6)
    piece = TensorPiece(tensor=tensor, full_shape=(4, 6))
    assert can_transfer(Transfer(piece=piece, target=torch.ones(4, 6), total=0))
    assert not can_transfer(Transfer(piece=piece, target=torch.ones(4, 6, dtype=torch.float64)))
    assert not can_transfer(Transfer(piece=piece, target=torch.ones(4, 6, device="meta")))


def test_sums_of_several_parts_and_copies_alone():
    tensor = torch.arange(12.0).view(4, 3)
    goal = torch.zeros(4, 3)
    some = [
        Transfer(piece=TensorPiece(tensor=tensor, full_shape=(4, 3)), total=1),
        Transfer(piece=TensorPiece(tensor=tensor[:2], full_shape=(2, 3)), target=goal[2:]),
    ]
    sums = launches_of(some, 2, CPU).launch()
    assert sums is not None
    assert (sums != 0).tolist() == [False, True]
    assert goal.tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 2], [3, 4, 5]]
