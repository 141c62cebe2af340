"""Random tensors of every dtype and shape, and their digest by its definition."""

import math

import torch
from hypothesis import strategies as st

from weightcast.digest.coefficients import SEED_A, SEED_B, splitmix64
from weightcast.digest.pieces import TensorPiece

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
)


def random_tensor(shape, dtype, seed=0):
    """Random bytes as a tensor, so that every bit pattern comes up, NaNs too."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (num_bytes,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).view(shape)


def sum_by_definition(tensor):
    """S from the formula, with Python's integers."""
    size = 1 if tensor.itemsize == 1 else 2
    data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
    words = [int.from_bytes(data[i : i + size], "little", signed=True) for i in range(0, len(data), size)]
    cols = max(1, len(words) // tensor.shape[0] if tensor.ndim >= 2 and tensor.shape[0] else len(words))
    total = 0
    for i, word in enumerate(words):
        row, col = divmod(i, cols)
        total += word * (splitmix64((row + SEED_A) % 2**64) | 1) * (splitmix64((col + SEED_B) % 2**64) | 1)
    return total % 2**64


def whole(tensor):
    return TensorPiece(tensor=tensor, full_shape=tuple(tensor.shape))


@st.composite
def tensors(draw, min_elements=0, dtypes=DTYPES, max_side=6):
    shape = tuple(draw(st.lists(st.integers(0 if not min_elements else 1, max_side), max_size=4)))
    if math.prod(shape) < min_elements:
        shape = (min_elements, *shape)
    return random_tensor(shape, draw(st.sampled_from(dtypes)), draw(st.integers(0, 2**31)))
