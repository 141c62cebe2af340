"""Copies out of a flat buffer keep every bit, whatever the dtype and the strides."""

from __future__ import annotations

import pytest
import torch

from weightcast.digest.copies import Flat, bits, copy_all


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.bool])
def test_every_bit_arrives(dtype):
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (8 * 24 + 3,), dtype=torch.uint8)
    flat = Flat(data)
    size = dtype.itemsize
    count = 24 * 8 // size // 2
    target = torch.zeros(count, 2, dtype=dtype)
    copy_all(
        [bits(target.t()[0]), bits(target.t()[1])],
        [flat.region(dtype, (count,), (1,), start, as_bits=True) for start in (0, count)],
    )
    raw = data[: 2 * count * size]
    assert torch.equal(target.t().contiguous().view(torch.uint8).reshape(-1), raw)


def test_what_differs_in_dtype_is_cast():
    values = torch.arange(6, dtype=torch.float32)
    target = torch.zeros(3, 2, dtype=torch.bfloat16)
    copy_all([target], [Flat(values.view(torch.uint8)).region(torch.float32, (3, 2), (2, 1), 0, as_bits=False)])
    assert target.tolist() == [[0, 1], [2, 3], [4, 5]]
    copy_all([], [])


def test_bits_of_what_has_no_integer_of_its_size():
    values = torch.zeros(2, dtype=torch.complex128)
    assert bits(values) is values
    assert bits(torch.zeros(2, dtype=torch.complex64)).dtype == torch.int64
