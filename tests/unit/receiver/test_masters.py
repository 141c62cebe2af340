"""An engine rank reads trainer ranks' own memory: float32 masters become the bfloat16 that torch makes of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from weightcast.digest import on_cpu
from weightcast.digest.definition import tensor_digest
from weightcast.errors import Refused
from weightcast.receiver.loader import Loader
from weightcast.receiver.rank_answers import ResidentFold
from weightcast.wire.answers import RankAck
from weightcast.wire.bucket_sources import MappedPart
from weightcast.wire.layout import MAX_BYTES, NAMES, BucketLayout, Packing, TensorSpec, plan_buckets

DTYPES = [torch.bfloat16, torch.float32, torch.float16]


class Kept(nn.Module):
    """One engine rank that keeps an equal slice of each tensor along its first dimension, in the tensor's dtype."""

    def __init__(self, specs: list[TensorSpec], rank: int, size: int, computed: set[str]) -> None:
        super().__init__()
        self.rank, self.size, self.computed = rank, size, computed
        for spec in specs:
            self.register_buffer(spec.name, self.cut(torch.zeros(spec.shape, dtype=spec.torch_dtype)).clone())

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.tensor_split(self.size)[self.rank] if tensor.dim() else tensor

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            getattr(self, name).copy_(self.cut(tensor * 1 if name in self.computed else tensor))


@st.composite
def cases(draw) -> dict:
    sizes = st.integers(0, 9)
    return {
        "tensors": [
            {
                "shape": tuple(draw(st.lists(sizes, max_size=3))),
                "sent": draw(st.sampled_from(DTYPES)),
                "master": draw(st.booleans()),
                "computed": draw(st.booleans()),
                "gap": draw(st.integers(0, 3)),  # elements between two rows
                "cuts": draw(st.integers(1, 3)),  # trainer ranks that hold its rows
            }
            for _ in range(draw(st.integers(1, 4)))
        ],
        "first": draw(st.integers(0, 9)),  # in elements of 4 bytes
        "tp": draw(st.integers(1, 3)),
        "staging": draw(st.sampled_from(["device", "none"])),
        "numba": draw(st.booleans()),
    }


class Memory:
    """One trainer rank's memory, in which tensors lie one behind the other, with gaps between their rows."""

    def __init__(self, first: int) -> None:
        self.data = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8)
        self.end = 4 * first

    def keep(self, values: torch.Tensor, gap: int) -> tuple[int, tuple[int, ...]]:
        """Returns the first byte and the strides."""
        size, start = values.itemsize, -(-self.end // values.itemsize) * values.itemsize
        if values.dim() > 1:
            row = math.prod(values.shape[1:]) + gap
            stride = (row, *values.contiguous().stride()[1:])
        else:
            row, stride = 1, values.contiguous().stride()
        whole = self.data[start : len(self.data) // size * size].view(values.dtype)
        whole.as_strided(values.shape, stride, whole.storage_offset()).copy_(values)
        self.end = start + (values.shape[0] if values.dim() else 1) * row * size
        return start, stride


def keep(
    layout: BucketLayout, values: dict[str, torch.Tensor], case: dict
) -> tuple[list[torch.Tensor], tuple[MappedPart, ...]]:
    """The memory of three trainer ranks, with all values in it, and where each part lies."""
    memories = [Memory(case["first"]) for _ in range(3)]
    parts: list[MappedPart] = []
    for number, slot in enumerate(layout.slots):
        whole, one = values[slot.spec.name], case["tensors"][int(slot.spec.name[1:])]
        row = 0
        for rank, part in enumerate(whole.tensor_split(one["cuts"]) if whole.dim() else [whole]):
            if not part.numel() and whole.numel():
                continue  # a rank that holds no row says nothing
            first_byte, stride = memories[rank].keep(part, one["gap"])
            parts.append(
                MappedPart(
                    slot=number,
                    offset=(row, *(0 for _ in part.shape[1:])) if whole.dim() else (),
                    shape=tuple(part.shape),
                    memory=rank,
                    first_byte=first_byte,
                    stride=stride,
                    dtype=NAMES[part.dtype],
                )
            )
            if not whole.numel():
                break
            row += part.shape[0] if part.dim() else 0
    return [memory.data for memory in memories], tuple(parts)


def values_of(specs: list[TensorSpec], case: dict, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Values as the trainer keeps them."""
    found = {spec.name: torch.randn(spec.shape, generator=generator) for spec in specs}
    for spec, one in zip(specs, case["tensors"], strict=True):
        if not (one["master"] and one["sent"] is torch.bfloat16):
            found[spec.name] = found[spec.name].to(spec.torch_dtype)
    return found


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(case=cases())
def test_ranks_keep_and_prove_what_torch_makes_of_the_masters(case):
    with pytest.MonkeyPatch.context() as patch:
        if not case["numba"]:
            patch.setattr(on_cpu, "_found", (None,))
        specs = [
            TensorSpec(name=f"t{number}", dtype=NAMES[one["sent"]], shape=one["shape"])
            for number, one in enumerate(case["tensors"])
        ]
        computed = {f"t{number}" for number, one in enumerate(case["tensors"]) if one["computed"]}
        [layout] = plan_buckets(specs, bucket_bytes=MAX_BYTES, packing=Packing())
        models = [Kept(specs, rank, case["tp"], computed) for rank in range(case["tp"])]
        loaders = [Loader(model, load_weights=model.load_weights, expected=specs) for model in models]
        generator = torch.Generator().manual_seed(1)
        for loader in loaders:
            loader.stage("none" if computed else case["staging"])
        for _ in range(2):  # the second time from plans that are known
            values = values_of(specs, case, generator)
            memories, parts = keep(layout, values, case)
            wanted = {spec.name: values[spec.name].to(spec.torch_dtype) for spec in specs}
            for loader in loaders:
                loader.begin()
                loader.load_from(memories, loader.copier.plan_mapped(layout, parts, memories))
            written = [RankAck(rank=rank, ok=True, **loader.written().fields) for rank, loader in enumerate(loaders)]
            for model, loader in zip(models, loaders, strict=True):
                assert loader.missing(specs) == []
                loader.live.commit()
                for name, tensor in wanted.items():
                    assert torch.equal(getattr(model, name), model.cut(tensor))
            found = ResidentFold().fold(written)
            assert not found.broken
            assert found.digests == {name: tensor_digest(tensor) for name, tensor in wanted.items()}


@pytest.mark.parametrize("numba", [True, False], ids=["compiled", "torch"])
def test_a_tensor_that_is_kept_wide_gets_the_values_that_travel(numba, monkeypatch):
    """An engine that keeps float32 of what travels in bfloat16 has the rounded values, as from a bucket."""
    if not numba:
        monkeypatch.setattr(on_cpu, "_found", (None,))
    sent = TensorSpec(name="t0", dtype="bfloat16", shape=(3, 5))
    model = Kept([TensorSpec(name="t0", dtype="float32", shape=(3, 5))], 0, 1, set())
    loader = Loader(model, load_weights=model.load_weights, expected=[sent])
    loader.stage("none")
    loader.begin()
    [layout] = plan_buckets([sent], bucket_bytes=MAX_BYTES, packing=Packing())
    values = torch.randn(3, 5)
    part = MappedPart(slot=0, offset=(0, 0), shape=(3, 5), memory=0, first_byte=0, stride=(5, 1), dtype="float32")
    memories = [values.view(-1).view(torch.uint8)]
    loader.load_from(memories, loader.copier.plan_mapped(layout, (part,), memories))
    loader.live.commit()
    assert torch.equal(model.t0, values.to(torch.bfloat16).float())


@pytest.mark.parametrize("dtype", ["float64", "float16", "int16", "none of torch's"])
def test_memory_in_a_dtype_that_is_not_cast_is_refused_by_name(dtype):
    spec = TensorSpec(name="t0", dtype="bfloat16", shape=(4,))
    model = Kept([spec], 0, 1, set())
    loader = Loader(model, load_weights=model.load_weights, expected=[spec])
    [layout] = plan_buckets([spec], bucket_bytes=MAX_BYTES, packing=Packing())
    part = MappedPart(slot=0, offset=(0,), shape=(4,), memory=0, first_byte=0, stride=(1,), dtype=dtype)
    with pytest.raises(Refused, match=f"t0 travels in bfloat16, and the trainer's memory has it in {dtype}"):
        loader.copier.plan_mapped(layout, (part,), [torch.zeros(64, dtype=torch.uint8)])


@pytest.mark.parametrize(("first_byte", "size_bytes"), [(2, 64), (4, 16), (0, 8)])
def test_masters_that_do_not_lie_in_their_memory_are_refused(first_byte, size_bytes):
    """Also where as many values of bfloat16 would."""
    spec = TensorSpec(name="t0", dtype="bfloat16", shape=(4,))
    model = Kept([spec], 0, 1, set())
    loader = Loader(model, load_weights=model.load_weights, expected=[spec])
    [layout] = plan_buckets([spec], bucket_bytes=MAX_BYTES, packing=Packing())
    part = MappedPart(slot=0, offset=(0,), shape=(4,), memory=0, first_byte=first_byte, stride=(1,), dtype="float32")
    with pytest.raises(Refused, match="does not lie in the memory"):
        loader.copier.plan_mapped(layout, (part,), [torch.zeros(size_bytes, dtype=torch.uint8)])
