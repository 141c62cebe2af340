"""Ranks sum what they copy out of buckets, and together they answer for exactly what the trainer sent."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.models import FusedModel, ScalingModel, Weights, specs_of, weights_of
from tests.helpers.sessions import Sender
from weightcast.digest import on_cpu
from weightcast.digest.definition import unequal
from weightcast.receiver import WeightReceiver
from weightcast.receiver.rank_answers import Resident, ResidentFold
from weightcast.wire.answers import RankAck
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import TensorSpec, dtype_name


class TiedModel(FusedModel):
    """It keeps one embedding for both ends, and drops the head that a checkpoint has beside it."""

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name != "head.weight":
            super().load_one(name, tensor)


def tied(weights: Weights) -> Weights:
    return weights | {"head.weight": weights["embed.weight"].clone()}


def ranks_of(kind: type[FusedModel], weights: Weights, *, tp_size: int, dtype: torch.dtype) -> list[WeightReceiver]:
    """All ranks of an engine that serves these weights."""
    ranks: list[WeightReceiver] = []
    for rank in range(tp_size):
        model = kind(tp_rank=rank, tp_size=tp_size, dtype=dtype)
        with torch.no_grad():
            model.load_weights(weights.items())
        receiver = WeightReceiver(
            model, load_weights=model.load_weights, expected=specs_of(weights), tp_rank=rank, tp_size=tp_size
        )
        receiver.loader.expect_kept_dtypes()
        if kind is TiedModel:
            receiver.loader.copies = {"head.weight": "embed.weight"}
            kept, expected = dtype_name(dtype), receiver.loader.expected
            expected["head.weight"] = msgspec.structs.replace(expected["head.weight"], dtype=kept)
        ranks.append(receiver)
    return ranks


def sent_to(ranks: list[WeightReceiver], sender: Sender, flip: tuple[int, int, int] | None = None) -> list[RankAck]:
    """The ranks' answers to Close; ``flip`` is the bucket and byte that changes on its way to a rank."""
    for receiver in ranks:
        assert receiver.apply(sender.open).ok
    for index, layout in enumerate(sender.layouts):
        message = sender.announce(index)
        for rank, receiver in enumerate(ranks):
            bucket = Bucket(layout, sender.buffer.data)
            changed = flip is not None and flip[0] == index and rank == flip[2]
            if changed:
                bucket.data[flip[1]] ^= 1
            ack = receiver.apply(message)
            assert ack.ok, ack.error
            if changed:
                bucket.data[flip[1]] ^= 1
    return [receiver.apply(sender.close()) for receiver in ranks]


def answered(acks: list[RankAck]) -> Resident:
    assert all(ack.ok for ack in acks), [ack.error for ack in acks]
    return ResidentFold().fold(acks)


def specs_kept(receiver: WeightReceiver) -> list[TensorSpec]:
    loader = receiver.loader
    return [spec for name, spec in loader.expected.items() if name not in loader.skipped]


@pytest.fixture(params=["compiled", "torch"])
def summed_by(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(on_cpu, "_found", (None,))


@pytest.mark.usefixtures("summed_by")
@pytest.mark.parametrize("kind", [FusedModel, ScalingModel, TiedModel])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("bucket_bytes", [64, 200, 4000])
def test_ranks_answer_for_every_tensor_that_they_keep_as_they_keep_it(kind, dtype, tp_size, bucket_bytes):
    """Fused, sliced, cast, computed or tied, and whole or in rows that several buckets bring."""
    make = tied if kind is TiedModel else dict
    ranks = ranks_of(kind, make(weights_of(1)), tp_size=tp_size, dtype=dtype)
    for seed in (2, 3):  # the second time from plans that are known
        sender = Sender(make(weights_of(seed)), bucket_bytes=bucket_bytes)
        acks = sent_to(ranks, sender)
        found, specs = answered(acks), specs_kept(ranks[0])
        assert not found.broken
        kept = sender.digests({spec.name: spec.dtype for spec in specs})[1]
        assert found.digests == {spec.name: kept[spec.name] for spec in specs}
        for receiver in ranks:
            assert receiver.apply(sender.commit()).ok
    for receiver in ranks:
        receiver.close()


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(
    tp_size=st.integers(1, 2),
    rank=st.integers(0, 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kind=st.sampled_from([FusedModel, ScalingModel]),
    bucket_bytes=st.sampled_from([64, 200, 4000]),
    where=st.integers(0, 1 << 20),
)
def test_a_byte_that_changes_on_its_way_to_a_rank_that_keeps_it_is_found_and_named(
    tp_size, rank, dtype, kind, bucket_bytes, where
):
    ranks = ranks_of(kind, weights_of(1), tp_size=tp_size, dtype=dtype)
    sender = Sender(weights_of(2), bucket_bytes=bucket_bytes)
    index = where % len(sender.layouts)
    layout = sender.layouts[index]
    slot = layout.slots[where // 7 % len(layout.slots)]
    # The last byte of an element: a cast to bfloat16 keeps the change.
    size = slot.spec.torch_dtype.itemsize
    element = where // 49 % (slot.size_bytes // size)
    at = slot.offset_bytes + (element + 1) * size - 1
    rank %= tp_size
    right = answered(sent_to(ranks, sender)).digests
    for receiver in ranks:
        assert receiver.apply(sender.abort()).ok
    acks = sent_to(ranks, sender, flip=(index, at, rank))
    found, name = answered(acks), slot.spec.name
    wrong = unequal(right, found.digests)
    assert wrong in ([], [name])
    assert wrong == [name] or not keeps(ranks[rank], name, slot.first_row * slot.spec.row_bytes + element * size)
    for receiver in ranks:
        receiver.close()


def keeps(receiver: WeightReceiver, name: str, byte: int) -> bool:
    """True if a rank keeps the element at this byte of a tensor, or computes with the tensor."""
    loader = receiver.loader
    if name in loader.computed:
        return True
    spec = next(spec for spec in specs_of(weights_of(1)) if spec.name == name)
    marks = torch.zeros(spec.shape, dtype=torch.bool)
    for route in loader.routes[name]:
        marks[tuple(slice(a, a + n) for a, n in zip(route.box_offset, route.box_shape, strict=True))] = True
    return bool(marks.view(-1)[byte // spec.torch_dtype.itemsize])


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("verify", ["none", "received", "resident"])
def test_a_tied_tensor_that_arrives_otherwise_than_its_original_is_refused_by_name(tp_size, verify):
    ranks = ranks_of(TiedModel, tied(weights_of(1)), tp_size=tp_size, dtype=torch.float32)
    weights = tied(weights_of(2))
    for more, right in ((1, False), (0, True)):
        changed = weights | {"head.weight": weights["head.weight"] + more}
        sender = Sender(changed, verify=verify, bucket_bytes=64)
        for ack in sent_to(ranks, sender):
            assert ack.ok == right
            assert right or "head.weight differs from embed.weight" in ack.error
        for receiver in ranks:
            assert receiver.apply(sender.abort()).ok
    for receiver in ranks:
        receiver.close()
