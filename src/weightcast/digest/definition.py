"""Digests of tensors that add up: both ends compute them to prove that they hold the same weights.

The digest of a tensor is a sum over its bytes, so the sums of disjoint boxes of a tensor add up to the sum of the
whole. A tensor-parallel rank digests the slice that it keeps, a sender digests what it holds, and the comparison adds
partial sums. The cut into buckets plays no part. CPU and CUDA give the same numbers.

Definition. The row-major bytes of a tensor are read as signed little-endian 16-bit words (8-bit words for dtypes of
one byte), `max(1, itemsize // 2)` words per element. The words of the *full* tensor form a matrix: `shape[0]` rows
and `prod(shape[1:])` elements per row for two dimensions or more, one row otherwise. Then

    S = sum over r, c of word[r, c] * A(r) * B(c)   mod 2**64
    A(r) = splitmix64(r + SEED_A) | 1     B(c) = splitmix64(c + SEED_B) | 1

and the digest is a one-to-one 64-bit mix of S, keyed by dtype and shape.

One flipped bit, or any change inside one word, always changes the digest: an odd coefficient times a
difference smaller than 2**16 is never 0 mod 2**64. Two different elements that change places, or any other damage
that was not made on purpose, go unseen with a chance of about 2**-47 at most. Zeros of another dtype or shape have
another digest. It is not cryptographic: an attacker can build two tensors with one digest.
"""

import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import torch

from weightcast.digest import on_cpu
from weightcast.digest.coefficients import MASK, SPAN, A, B, signed, splitmix64, splitmix64_
from weightcast.digest.copies import host_bytes
from weightcast.digest.pieces import Grid, TensorPiece, check_piece, grid_of, merge_levels

# Words converted to int64 at a time on the CPU: 2 MiB, the only memory beside the coefficients.
_BLOCK_WORDS = 1 << 18
_HEX = re.compile(r"[0-9a-f]+")


def partial_sums(pieces: Sequence[TensorPiece]) -> torch.Tensor:
    """The sums S of some pieces: int64 `[len(pieces)]` on the pieces' device, to be read mod 2**64.

    On CUDA the work is queued on the current stream and the host does not wait. A CUDA piece whose rows are not runs
    of adjacent bytes (a transposed view, say) is first copied; on the CPU nothing is copied but blocks of 2 MiB.
    CPU tensors are summed by compiled code (`weightcast.digest.on_cpu`) where that is installed.

    Raises:
        ValueError: pieces on different devices or on one that is neither CPU nor CUDA, a box that lies outside its
            tensor or has another shape than the piece, a tensor that is not strided or is a DTensor.
    """
    if not pieces:
        return torch.zeros(0, dtype=torch.int64)
    device = pieces[0].tensor.device
    for index, piece in enumerate(pieces):
        check_piece(piece, index)
        if piece.tensor.device != device:
            raise ValueError(f"piece {index} is on {piece.tensor.device}, piece 0 on {device}: digest them separately")
    if device.type == "cuda":
        from weightcast.digest import kernel

        return kernel.partial_sums(pieces)
    if device.type != "cpu":
        raise ValueError(f"digests are computed on cpu and cuda, not on {device}")
    if on_cpu.worth_it(sum(piece.tensor.nbytes for piece in pieces)) and all(map(on_cpu.takes, pieces)):
        return on_cpu.sums_of(pieces).launch()
    return _sums_by_torch(pieces)


def _sums_by_torch(pieces: Sequence[TensorPiece]) -> torch.Tensor:
    """As `partial_sums`, for checked pieces on the CPU, with the means of torch."""
    sums = torch.zeros(len(pieces), dtype=torch.int64)
    words = max(piece.tensor.numel() * max(1, piece.tensor.itemsize // 2) for piece in pieces)
    scratch = torch.empty(min(_BLOCK_WORDS, words), dtype=torch.int64)
    for index, piece in enumerate(pieces):
        _add_sum(grid_of(piece), scratch, sums[index])
    return sums


def as_unsigned(value: int) -> int:
    """An int64 of `partial_sums` as the number in [0, 2**64) that `finish` takes; ValueError beyond 64 bits."""
    if not -(1 << 63) <= value <= MASK:
        raise ValueError(f"{value} is not a 64-bit integer")
    return value & MASK


def add_partial(a: int, b: int) -> int:
    """The sum mod 2**64 of two partial sums; raises ValueError if one is not in [0, 2**64)."""
    return (_checked_sum(a) + _checked_sum(b)) & MASK


def finish(total: int, *, dtype: torch.dtype, shape: Sequence[int]) -> str:
    """The digest of a tensor, 16 hex characters, from the sum over all of it; ValueError if it is not in [0, 2**64)."""
    return f"{splitmix64(_checked_sum(total) ^ _key_of(dtype, tuple(shape))):016x}"


def key_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """The key of digests of one dtype and shape, as a signed number for `finish_all`."""
    return signed(_key_of(dtype, tuple(shape)))


def finish_all(totals: torch.Tensor, keys: torch.Tensor) -> str:
    """As `finish`, for many tensors at once: 16 hex characters for each, without a gap.

    Both are int64 `[tensors]` on the CPU: sums, read mod 2**64, and `key_of` each tensor.
    """
    x = splitmix64_(totals.bitwise_xor(keys), torch.empty_like(totals))
    return host_bytes(x.view(torch.uint8).view(-1, 8).flip(1)).hex()


def tensor_digest(tensor: torch.Tensor) -> str:
    """The digest of a whole tensor: `partial_sums`, also its errors, and `finish`. Waits for the device."""
    sums = partial_sums([TensorPiece(tensor=tensor, full_shape=tuple(tensor.shape))])
    return finish(as_unsigned(int(sums.item())), dtype=tensor.dtype, shape=tensor.shape)


def model_digest(digests: Mapping[str, str]) -> str:
    """One digest, 16 hex characters, of many named ones in any order; ValueError for one that is not hex."""
    if not all(map(_HEX.fullmatch, digests.values())):
        name, digest = next(item for item in digests.items() if not _HEX.fullmatch(item[1]))
        raise ValueError(f"the digest of {name} is {digest!r}, not lower-case hex")
    names = sorted(digests)
    hashed = model_seed(names)
    hashed.update("".join(map(digests.__getitem__, names)).encode())
    return hashed.hexdigest()


def model_seed(names: Sequence[str]) -> "hashlib.blake2b":
    """The hash of `model_digest` before the digests, given the sorted names."""
    return hashlib.blake2b(json.dumps(list(names)).encode(), digest_size=8)


def unequal(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Names whose digest is another than expected, or missing."""
    if expected == found:  # the usual case, and engines wait while tens of thousands are compared
        return []
    return [name for name, digest in expected.items() if found.get(name) != digest]


def _add_sum(grid: Grid, scratch: torch.Tensor, out: torch.Tensor) -> None:
    """Add the sum S of a CPU grid to `out`, a 0-d int64. `scratch` is 1-d int64 and limits the blocks."""
    rows, trailing = grid.words.shape[0], grid.words.shape[1:]
    if not grid.words.numel():
        return
    widest = min(len(scratch), max(SPAN, len(scratch) // rows))
    for block in _blocks(trailing, widest):
        num_columns = math.prod(part.stop - part.start for part in block)
        num_rows = len(scratch) // num_columns
        b = _column_coefficients(grid, block)
        column_sums = torch.zeros_like(b)
        for start in range(0, rows, num_rows):
            words = grid.words[(slice(start, start + num_rows), *block)]
            values = scratch[: words.numel()].view(words.shape).copy_(words).view(len(words), num_columns)
            a = A.span(grid.row + start, grid.row + start + len(words))
            # The integer product of a matrix and a vector is exact mod 2**64.
            if num_columns == 1:
                out += torch.mv(values.view(1, -1), a)[0] * b[0]
            elif rows == 1:
                out += torch.mv(values.view(1, -1), b)[0] * a[0]
            else:
                column_sums.addmv_(values.t(), a)
        out += torch.dot(column_sums, b)


def _column_coefficients(grid: Grid, block: tuple[slice, ...]) -> torch.Tensor:
    """B of the columns of a block of the trailing dimensions, int64 `[columns]`."""
    sizes = [part.stop - part.start for part in block]
    strides = grid.column_strides
    first = sum((at + part.start) * stride for at, part, stride in zip(grid.column, block, strides, strict=True))
    levels = merge_levels(sizes, strides)
    if not levels or levels[0][1] == 1:
        return B.span(first, first + math.prod(sizes))
    columns = torch.full((1,), first, dtype=torch.int64)
    for size, stride in levels:
        columns = columns.unsqueeze(-1) + torch.arange(0, size * stride, stride)
    return B.at(columns.view(-1))


def _blocks(shape: Sequence[int], limit: int) -> Iterator[tuple[slice, ...]]:
    """Boxes of at most `limit` elements that together are all of `shape`, each as one slice per dimension."""
    axis = next(i for i in range(len(shape)) if math.prod(shape[i + 1 :]) <= limit)
    inner = tuple(slice(0, size) for size in shape[axis + 1 :])
    step = limit // math.prod(shape[axis + 1 :])
    for outer in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], step):
            middle = slice(start, min(start + step, shape[axis]))
            yield (*(slice(i, i + 1) for i in outer), middle, *inner)


def _checked_sum(value: int) -> int:
    if not 0 <= value <= MASK:
        raise ValueError(f"a partial sum lies in [0, 2**64), {value} does not; as_unsigned() converts an int64")
    return value


@functools.lru_cache(maxsize=4096)  # a model has few shapes and many tensors
def _key_of(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(_header(dtype, shape), digest_size=8).digest(), "little")


def _header(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """Dtype and shape as bytes, the same for every torch version."""
    return json.dumps([str(dtype).removeprefix("torch."), [int(size) for size in shape]]).encode()
