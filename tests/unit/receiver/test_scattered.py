"""An engine rank reads its own share, once, out of the buffers of several trainer ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from weightcast.digest.definition import tensor_digest
from weightcast.errors import Refused
from weightcast.receiver.loader import Loader
from weightcast.receiver.rank_answers import ResidentFold
from weightcast.wire.answers import RankAck
from weightcast.wire.bucket import Bucket
from weightcast.wire.bucket_sources import BucketPart
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets


class Kept(nn.Module):
    """One engine rank that keeps an equal slice of each tensor along one dimension, or all of it."""

    def __init__(self, specs: list[TensorSpec], dims: list[int | None], rank: int, size: int, computes: bool) -> None:
        super().__init__()
        self.dims = {spec.name: dim for spec, dim in zip(specs, dims, strict=True)}
        self.rank, self.size, self.computes = rank, size, computes
        for spec in specs:
            self.register_buffer(spec.name, torch.zeros(self.cut(spec.name, torch.zeros(spec.shape)).shape))

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dim = self.dims[name]
        return tensor if dim is None else tensor.tensor_split(self.size, dim)[self.rank]

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if self.computes and name == "t0":
                tensor = tensor * 1
            getattr(self, name).copy_(self.cut(name, tensor))


@st.composite
def cases(draw) -> dict:
    tensors = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
        dim = st.none() if not shape else st.one_of(st.none(), st.integers(0, len(shape) - 1))
        tensors.append((shape, draw(dim), draw(dim), draw(st.integers(0, 5))))
    return {
        "tensors": tensors,
        "trainers": draw(st.integers(1, 4)),
        "tp": draw(st.integers(1, 3)),
        "computes": draw(st.booleans()),
        "bucket_bytes": draw(st.sampled_from([160, 1 << 16])),
        "staging": draw(st.sampled_from(["device", "none"])),
    }


def filled(layout, values: dict[str, torch.Tensor], case: dict) -> tuple[list[Bucket], tuple]:
    """The buffers of all trainer ranks, full of noise but for their own parts, and these parts."""
    world = case["trainers"]
    buckets = [Bucket(layout, torch.randint(0, 256, (layout.size_bytes,), dtype=torch.uint8)) for _ in range(world)]
    parts: list[list[BucketPart]] = [[] for _ in range(world)]
    for number, slot in enumerate(layout.slots):
        shape, _, cut, shift = case["tensors"][int(slot.spec.name[1:])]
        indices = [torch.arange(n) for n in shape]
        pieces = (
            [indices] if cut is None else [[*indices[:cut], p, *indices[cut + 1 :]] for p in indices[cut].chunk(world)]
        )
        for rank, piece in enumerate(pieces):
            if shape:  # the rows of this slot
                rows = piece[0][(piece[0] >= slot.first_row) & (piece[0] < slot.first_row + slot.num_rows)]
                piece = [rows, *piece[1:]]
            if any(not len(p) for p in piece):
                continue
            owner = (rank + shift) % world
            offset, extent = tuple(int(p[0]) for p in piece), tuple(len(p) for p in piece)
            parts[owner].append(BucketPart(slot=number, offset=offset, shape=extent))
            source = tuple(slice(a, a + n) for a, n in zip(offset, extent, strict=True))
            target = source
            if shape:
                target = (slice(offset[0] - slot.first_row, offset[0] - slot.first_row + extent[0]), *source[1:])
            buckets[owner].view(slot)[target] = values[slot.spec.name][source]
    return buckets, tuple(map(tuple, parts))


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(case=cases())
def test_each_rank_reads_its_share_and_all_ranks_prove_the_whole(case):
    specs = [TensorSpec(name=f"t{n}", dtype="float32", shape=one[0]) for n, one in enumerate(case["tensors"])]
    dims = [one[1] for one in case["tensors"]]
    layouts = plan_buckets(specs, bucket_bytes=case["bucket_bytes"], packing=Packing(alignment_bytes=16))
    generator = torch.Generator().manual_seed(1)
    models = [Kept(specs, dims, rank, case["tp"], case["computes"]) for rank in range(case["tp"])]
    loaders = [Loader(model, load_weights=model.load_weights, expected=specs) for model in models]
    for loader in loaders:
        loader.stage("none" if case["computes"] else case["staging"])
    for _ in range(2):  # the second time from plans that are known
        values = {spec.name: torch.randn(spec.shape, generator=generator) for spec in specs}
        for loader in loaders:
            loader.begin()
        for layout in layouts:
            buckets, parts = filled(layout, values, case)
            for loader in loaders:
                load_parts(loader, buckets, parts)
        written = [RankAck(rank=rank, ok=True, **loader.written().fields) for rank, loader in enumerate(loaders)]
        for model, loader in zip(models, loaders, strict=True):
            assert loader.missing(specs) == []
            loader.live.commit()
            assert all(torch.equal(getattr(model, name), model.cut(name, tensor)) for name, tensor in values.items())
        found = ResidentFold().fold(written)
        assert not found.broken
        assert found.digests == {name: tensor_digest(tensor) for name, tensor in values.items()}


def load_parts(loader: Loader, buckets: list[Bucket], parts: tuple) -> None:
    plan = loader.copier.plan(buckets[0].layout, parts)
    loader.load_from([bucket.data for bucket in buckets], plan)


def a_loader() -> tuple[Loader, list[TensorSpec], list]:
    specs = [TensorSpec(name="t0", dtype="float32", shape=(4, 2))]
    model = Kept(specs, [0], 0, 2, computes=False)
    loader = Loader(model, load_weights=model.load_weights, expected=specs)
    loader.stage("device")
    loader.begin()
    return loader, specs, plan_buckets(specs, bucket_bytes=1 << 10, packing=Packing())


@pytest.mark.parametrize(
    "parts",
    [
        ((BucketPart(0, (0, 0), (2, 2)),), ()),
        ((BucketPart(0, (0, 0), (3, 2)),), (BucketPart(0, (2, 0), (2, 2)),)),
        ((BucketPart(0, (0, 0), (5, 2)),), ()),
        ((BucketPart(0, (0,), (4,)),), ()),
        ((BucketPart(0, (0, 0), (4, 2)), BucketPart(1, (0, 0), (1, 1))), ()),
    ],
    ids=["missing", "twice", "beyond the end", "other dimensions", "another slot"],
)
def test_parts_that_are_not_the_whole_bucket_once_are_refused_before_anything_is_written(parts):
    loader, specs, [layout] = a_loader()
    buckets = [Bucket(layout, torch.ones(layout.size_bytes, dtype=torch.uint8)) for _ in range(2)]
    with pytest.raises(Refused):
        load_parts(loader, buckets, parts)
    assert not loader.staging.target("t0").any()
    assert loader.missing(specs) == ["t0"]


def test_parts_that_move_to_another_buffer_are_read_there():
    loader, _, [layout] = a_loader()
    first, second = (Bucket(layout, torch.zeros(layout.size_bytes, dtype=torch.uint8)) for _ in range(2))
    whole = (BucketPart(0, (0, 0), (4, 2)),)
    for own, parts, value in ((first, (whole, ()), 1.0), (second, ((), whole), 2.0)):
        loader.begin()
        own.view(layout.slots[0]).fill_(value)
        load_parts(loader, [first, second], parts)
        assert loader.staging.target("t0").eq(value).all()


def test_buffers_that_swap_their_addresses_are_read_as_they_lie_now():
    specs = [TensorSpec(name="t0", dtype="float32", shape=(4, 2))]
    model = Kept(specs, [None], 0, 1, computes=False)
    loader = Loader(model, load_weights=model.load_weights, expected=specs)
    loader.stage("none")
    [layout] = plan_buckets(specs, bucket_bytes=1 << 10, packing=Packing())
    one, other = (Bucket(layout, torch.zeros(layout.size_bytes, dtype=torch.uint8)) for _ in range(2))
    parts = (BucketPart(0, (0, 0), (2, 2)),), (BucketPart(0, (2, 0), (2, 2)),)
    for value, buckets in enumerate([(one, other), (other, one), (one, other)], start=1):
        loader.begin()
        for bucket in buckets:
            bucket.data.fill_(255)
        buckets[0].view(layout.slots[0])[:2] = value
        buckets[1].view(layout.slots[0])[2:] = -value
        load_parts(loader, buckets, parts)
        loader.live.commit()
        assert model.t0[:2].eq(value).all()
        assert model.t0[2:].eq(-value).all()
