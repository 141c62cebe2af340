"""Weights that are NaN or infinite are found in a bucket, and named."""

from __future__ import annotations

import math

import pytest
import torch

from weightcast.errors import NotFinite
from weightcast.update.finite import FiniteCheck, check_parts_finite
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import Packing, TensorSpec, dtype_name, plan_buckets


def bucket_of(tensors, *, packing=None):
    specs = [TensorSpec(name=name, dtype=dtype_name(t.dtype), shape=tuple(t.shape)) for name, t in tensors.items()]
    (layout,) = plan_buckets(specs, bucket_bytes=1 << 20, packing=packing or Packing(alignment_bytes=64))
    data = torch.full((layout.size_bytes,), 255, dtype=torch.uint8)  # between tensors lie NaNs, of any dtype
    bucket = Bucket(layout, data)
    for slot, view in bucket.views():
        view.copy_(tensors[slot.spec.name].view(slot.shape))
    return bucket


def tensors():
    make = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(7, 33, generator=make),
        "b": torch.randn(5, generator=make),
        "half": torch.randn(3, 11, generator=make).to(torch.bfloat16),
        "count": torch.tensor([2**31 - 1, -1]),
        "f16": torch.randn(4, 3, generator=make).to(torch.float16),
        "scalar": torch.tensor(1.5),
        "none": torch.empty(0, 4),
        "small": torch.full((9,), 448.0).to(torch.float8_e4m3fn),
        "double": torch.randn(3, dtype=torch.float64),
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("names", [["a"], ["half"], ["f16", "double"], ["scalar"], ["b", "half"]])
def test_every_tensor_with_such_a_value_is_named(names, value):
    found = tensors()
    for name in names:
        found[name].view(-1)[-1] = value
    with pytest.raises(NotFinite) as caught:
        FiniteCheck().check(bucket_of(found))
    assert sorted(caught.value.names) == sorted(names)
    assert all(f"{name} (1)" in str(caught.value) for name in names)


@pytest.mark.parametrize("packing", [Packing(alignment_bytes=1), Packing(alignment_bytes=64)])
def test_finite_weights_pass_whatever_lies_between_them(packing):
    FiniteCheck().check(bucket_of(tensors(), packing=packing))
    FiniteCheck().check(bucket_of({"only": torch.tensor([1, 2])}))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_every_part_with_such_a_value_is_named_whatever_its_size_and_strides(value):
    found = tensors() | {"large": torch.randn(300, 300)}
    parts = [(name, tensor.t() if tensor.dim() == 2 else tensor) for name, tensor in found.items()]
    check_parts_finite(parts)
    for name in ("a", "b", "half", "f16", "scalar", "double", "large"):
        first = found[name].view(-1)[0].clone()
        found[name].view(-1)[0] = value
        with pytest.raises(NotFinite) as caught:
            check_parts_finite(parts)
        assert caught.value.names == (name,)
        found[name].view(-1)[0] = first
    check_parts_finite(parts)


def test_a_sum_that_is_too_large_is_no_reason():
    big = {name: torch.full((100,), torch.finfo(dtype).max, dtype=dtype) for name, dtype in DTYPES.items()}
    FiniteCheck().check(bucket_of(big))
    check_parts_finite(list(big.items()))
    big["bf16"][3] = math.inf
    with pytest.raises(NotFinite, match=r"bf16 \(1\)"):
        check_parts_finite(list(big.items()))
    with pytest.raises(NotFinite, match=r"bf16 \(1\)"):
        FiniteCheck().check(bucket_of(big))


DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@pytest.mark.parametrize(
    ("dtype", "wrong", "largest"),
    [
        (torch.float8_e4m3fn, (0x7F, 0xFF), 0x7E),
        (torch.float8_e5m2, (0x7C, 0xFC, 0x7D, 0x7E, 0x7F, 0xFF), 0x7B),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [1, 7, 8, 500, (1 << 18) + 13])
@pytest.mark.parametrize("before", [0, 3])
def test_floats_of_8_bits_are_looked_at_wherever_they_lie(dtype, wrong, largest, size, before):
    data = torch.full((before + size,), largest, dtype=torch.uint8)
    data[:before] = 0xFF
    values = data[before:].view(dtype)
    packing = Packing(alignment_bytes=1)
    for sign in (0, 0x80):
        data[before:] = largest | sign
        check_parts_finite([("x", values)])
        FiniteCheck().check(bucket_of({"y": torch.ones(before, dtype=torch.int8), "x": values}, packing=packing))
    for byte in wrong:
        for place in {0, size // 2, size - 1}:
            data[before + place] = byte
            for check in (
                lambda: check_parts_finite([("x", values), ("z", torch.ones(3))]),
                lambda: FiniteCheck().check(
                    bucket_of({"y": torch.ones(before, dtype=torch.int8), "x": values}, packing=packing)
                ),
            ):
                with pytest.raises(NotFinite, match=r"x \(1\)"):
                    check()
            data[before + place] = largest
