"""The answers of ranks add up to the whole, and ranks that disagree are found."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.digest.definition import model_digest, partial_sums, tensor_digest
from weightcast.digest.pieces import TensorPiece
from weightcast.receiver.rank_answers import ResidentFold, cause_of, failures, suspects
from weightcast.wire.answers import RankAck
from weightcast.wire.blobs import Blobs, SentBlobs, UnknownBlob
from weightcast.wire.box import Box
from weightcast.wire.codec import decode_rank_ack, encode, names_of
from weightcast.wire.held import HeldPart, HeldSums
from weightcast.wire.layout import TensorSpec


def sums(*parts: tuple[HeldPart, int]) -> HeldSums:
    return HeldSums(tuple(part for part, _ in parts), torch.tensor([total for _, total in parts], dtype=torch.int64))


def ack(rank: int, *parts: tuple[HeldPart, int]) -> RankAck:
    return RankAck(rank=rank, **sums(*parts).fields)


def held(name: str, whole: torch.Tensor, *box: slice) -> tuple[HeldPart, int]:
    part = whole[box] if box else whole
    offset = tuple((box[dim].start or 0) if dim < len(box) else 0 for dim in range(whole.dim()))
    place = Box(offset=offset, shape=tuple(part.shape))
    total = int(partial_sums([TensorPiece(tensor=part, full_shape=tuple(whole.shape), box=place)])[0])
    return HeldPart(spec=TensorSpec.of(name, whole), box_offset=offset, box_shape=tuple(part.shape)), total


@pytest.fixture
def weight():
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def test_shards_add_up_to_the_whole(weight):
    norm = weight[0].clone()
    by_rows = [ack(r, held("w", weight, slice(4 * r, 4 * r + 4)), held("n", norm)) for r in range(2)]
    by_columns = [ack(r, held("w", weight, slice(0, 8), slice(2 * r, 2 * r + 2))) for r in range(3)]
    whole = ResidentFold().fold(by_rows)
    assert whole.digests == {"w": tensor_digest(weight), "n": tensor_digest(norm)}
    assert whole.broken == ()
    specs = [TensorSpec.of("n", norm), TensorSpec.of("w", weight)]
    assert whole.digest_of(specs, ()) == model_digest(whole.digests)
    assert whole.digest_of(specs, {"w"}) == model_digest({"n": tensor_digest(norm)})
    assert whole.digest_of([*specs, TensorSpec.of("x", norm)], ()) == ""
    assert ResidentFold().fold(by_columns).digests == {"w": tensor_digest(weight)}


def test_ranks_that_keep_the_same_part_must_agree(weight):
    other = weight.clone()
    other[3, 3] += 1
    agreeing = [ack(r, held("w", weight)) for r in range(2)]
    assert ResidentFold().fold(agreeing).digests == {"w": tensor_digest(weight)}
    differing = [ack(0, held("w", weight)), ack(1, held("w", other))]
    result = ResidentFold().fold(differing)
    assert result.broken == ("w",)
    assert result.digests == {}
    assert result.digest_of([TensorSpec.of("w", weight)], ()) == ""
    dtypes = [ack(0, held("w", weight)), ack(1, held("w", weight.double()))]
    assert ResidentFold().fold(dtypes).broken == ("w",)


def test_parts_that_do_not_make_up_the_whole_are_found(weight):
    missing = [ack(0, held("w", weight, slice(0, 4)))]
    assert ResidentFold().fold(missing).broken == ("w",)
    # As many elements as the whole has, but some twice and some not at all.
    double = [ack(0, held("w", weight, slice(0, 4)), held("w", weight, slice(2, 6)))]
    assert ResidentFold().fold(double).broken == ("w",)
    assert ResidentFold().fold([]).digests == {}


def test_a_rank_may_keep_nothing_of_a_tensor(weight):
    # Pipeline stages: each tensor lives on one rank only.
    acks = [ack(0, held("a", weight)), ack(1, held("b", weight))]
    assert ResidentFold().fold(acks).digests == {"a": tensor_digest(weight), "b": tensor_digest(weight)}


def test_scalars_and_empty_tensors():
    scalar, empty = torch.tensor(2.5), torch.zeros(0, 3)
    acks = [ack(rank, held("s", scalar), held("e", empty)) for rank in range(2)]
    assert ResidentFold().fold(acks).digests == {"s": tensor_digest(scalar), "e": tensor_digest(empty)}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_way_of_cutting_gives_the_same_digest(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.int64]))
    whole = (torch.randn(shape) * 50).to(dtype)
    boxes = [tuple(slice(0, size) for size in shape)]
    for _ in range(data.draw(st.integers(0, 5))):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        cut = data.draw(st.integers(box[dim].start, box[dim].stop))
        halves = slice(box[dim].start, cut), slice(cut, box[dim].stop)
        boxes += [(*box[:dim], half, *box[dim + 1 :]) for half in halves if half.stop > half.start]
    ranks = data.draw(st.integers(1, 3))
    acks = [ack(r, *(held("w", whole, *box) for box in boxes[r::ranks])) for r in range(ranks)]
    assert ResidentFold().fold(acks).digests == {"w": tensor_digest(whole)}


def test_the_same_tables_with_other_sums_give_other_digests(weight):
    fold, tables, sent = ResidentFold(), Blobs(), [SentBlobs(), SentBlobs()]
    for step in range(3):
        now, norm = weight + step, weight[0] * step
        acks = [ack(r, held("w", now, slice(4 * r, 4 * r + 4)), held("n", norm)) for r in range(2)]
        bodies = [encode(one, has) for one, has in zip(acks, sent, strict=True)]
        for one, has in zip(acks, sent, strict=True):
            has.add(names_of(one))
        assert all((b"box_offset" in body) == (step == 0) for body in bodies)
        result = fold.fold([decode_rank_ack(body, tables) for body in bodies])
        assert result.digests == {"w": tensor_digest(now), "n": tensor_digest(norm)}
        assert result.broken == ()
    with pytest.raises(UnknownBlob, match="table of parts"):
        decode_rank_ack(encode(acks[0], sent[0]), Blobs())
    wrong = ack(1, held("w", now, slice(4, 8)), held("n", norm + 1))
    assert fold.fold([acks[0], wrong]).broken == ("n",)


def test_ranks_that_may_be_at_fault_are_named_where_not_all_may_be(weight):
    def ranks(*parts: tuple[tuple[str, torch.Tensor, slice], ...]) -> list[RankAck]:
        return [ack(rank, *(held(*part) for part in own)) for rank, own in enumerate(parts)]

    top, bottom, flipped = slice(0, 4), slice(4, 8), weight.clone()
    flipped[0, 0] += 1
    assert suspects(ranks((("w", weight, top),), (("w", weight, bottom),))) == {}
    # Of two that keep the same part and differ, either may be wrong; of three, the one that stands alone is.
    pairs = [(("w", weight, top),), (("w", flipped, top),), (("w", weight, bottom),), (("w", weight, bottom),)]
    assert suspects(ranks(*pairs)) == {"w": (0, 1)}
    assert suspects(ranks(*pairs, (("w", weight, top),))) == {"w": (1,)}
    # Stages keep tensors that others do not.
    assert suspects(ranks((("a", weight, top),), (("b", weight, top),), (("b", weight, bottom),))) == {
        "a": (0,),
        "b": (1, 2),
    }


def test_failures_say_who_and_say_it_once():
    assert failures([RankAck(rank=0), RankAck(rank=1)]) == ((), "")
    both = [RankAck(rank=rank, ok=False, error="no memory") for rank in range(2)]
    assert failures(both) == ((0, 1), "no memory")
    assert failures([RankAck(rank=0), RankAck(rank=1, ok=False, error="x")]) == ((1,), "rank 1: x")
    two = [RankAck(rank=rank, ok=False, error=f"e{rank}") for rank in range(2)]
    assert failures(two) == ((0, 1), "rank 0: e0; rank 1: e1")


def test_a_group_is_to_blame_only_if_no_rank_is():
    fine, own = RankAck(rank=0), RankAck(rank=1, ok=False, error="mine")
    group = RankAck(rank=2, ok=False, cause="group", error="closed by peer")
    assert cause_of([fine]) == "engine"
    assert cause_of([fine, group]) == "group"
    assert cause_of([own, group]) == "engine"
