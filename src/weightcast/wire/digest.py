"""Digests of tensors that add up: what both ends compute to prove that they hold the same weights.

The digest of a tensor is a sum over its bytes, so the sums of disjoint boxes of a tensor add up to the sum of the
whole. A tensor-parallel rank digests the slice it keeps, a sender digests what it holds, and whoever compares adds
partial sums; where buckets begin and end plays no part. CPU and CUDA give the same numbers.

Definition. The row-major bytes of a tensor are read as signed little-endian 16-bit words (8-bit words for dtypes of
one byte), `max(1, itemsize // 2)` words per element. The words of the *full* tensor form a matrix: `shape[0]` rows
and `prod(shape[1:])` elements per row for two dimensions or more, one row otherwise. Then

    S = sum over r, c of word[r, c] * A(r) * B(c)   mod 2**64
    A(r) = splitmix64(r + SEED_A) | 1     B(c) = splitmix64(c + SEED_B) | 1

and the digest is a one-to-one 64-bit mix of S, keyed by dtype and shape.

What it promises. One flipped bit, or any change inside one word, always changes the digest: an odd coefficient times
a difference smaller than 2**16 is never 0 mod 2**64. Two different elements that change places, or any other damage
that was not made on purpose, go unseen with a chance of about 2**-47 at most. Zeros of another dtype or shape have
another digest. It is not cryptographic: who wants to can build two tensors with one digest. `sha256_digest` is for
that case, several times slower on the CPU and far slower on a GPU, and it does not add up.

It refuses to know names of models, buckets, processes or engines.
"""

import ctypes
import functools
import hashlib
import itertools
import json
import math
import re
import struct
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weightcast.wire.copies import flat_bytes

if TYPE_CHECKING:
    from weightcast.wire.digest_kernel import Key

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
SEED_A = 0x243F6A8885A308D3
SEED_B = 0x13198A2E03707344

# Words converted to int64 at a time on the CPU: 2 MiB, the only memory beside the coefficients.
_BLOCK_WORDS = 1 << 18
# Coefficients computed at a time, and columns at a time in wide matrices: 256 KiB, so that they stay in cache.
_SPAN = 1 << 15
_SHA_CHUNK_BYTES = 16 << 20
_HEX = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangular part of a tensor, in elements of the full tensor. A box of a 0-d tensor has two empty tuples."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A tensor that is all of a full tensor, or one box of it.

    Args:
        tensor: any strided tensor, a view too; its shape is the box's, or the full one.
        full_shape: shape of the tensor that the coefficients belong to.
        box: where in the full tensor; None means the whole.
    """

    tensor: torch.Tensor
    full_shape: tuple[int, ...]
    box: Box | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A piece as a matrix of words, for this module and its kernels.

    `words`: int16 or int8 `[rows, *trailing]`, a view of the piece's memory; the last dimension is the words of one
    element. `row` and `column` place it in the full tensor, whose trailing dimensions are `full_trailing`.
    """

    words: torch.Tensor
    row: int
    column: tuple[int, ...]
    full_trailing: tuple[int, ...]

    @property
    def column_strides(self) -> tuple[int, ...]:
        """How far apart, in columns of the full matrix, neighbours along each trailing dimension are."""
        return tuple(math.prod(self.full_trailing[i + 1 :]) for i in range(len(self.full_trailing)))


def partial_sums(pieces: Sequence[Piece]) -> torch.Tensor:
    """The sums S of some pieces: int64 `[len(pieces)]` on the pieces' device, to be read mod 2**64.

    On CUDA the work is queued on the current stream and the host does not wait. A CUDA piece whose rows are not runs
    of adjacent bytes (a transposed view, say) is first copied; on the CPU nothing is copied but blocks of 2 MiB.

    Raises:
        ValueError: pieces on different devices or on one that is neither CPU nor CUDA, a box that lies outside its
            tensor or has another shape than the piece, a tensor that is not strided or is a DTensor.
    """
    if not pieces:
        return torch.zeros(0, dtype=torch.int64)
    device = pieces[0].tensor.device
    for index, piece in enumerate(pieces):
        _check(piece, index)
        if piece.tensor.device != device:
            raise ValueError(f"piece {index} is on {piece.tensor.device}, piece 0 on {device}: digest them separately")
    if device.type == "cuda":
        from weightcast.wire import digest_kernel

        return digest_kernel.partial_sums(pieces)
    if device.type != "cpu":
        raise ValueError(f"digests are computed on cpu and cuda, not on {device}")
    sums = torch.zeros(len(pieces), dtype=torch.int64)
    scratch = torch.empty(min(_BLOCK_WORDS, max(map(_num_words, pieces))), dtype=torch.int64)
    for index, piece in enumerate(pieces):
        _add_sum(grid_of(piece), scratch, sums[index])
    return sums


class RepeatedSums:
    """`partial_sums` of pieces that come again and again in the same places.

    On CUDA what is launched is worked out once for each place; later calls ask for no pieces. It keeps no memory alive.
    One thread at a time.
    """

    _MAX_PLACES = 1 << 12

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[object, Key]] = {}

    def sums(
        self, place: Hashable, what: object, device: torch.device, pieces: Callable[[], Sequence[Piece]]
    ) -> torch.Tensor:
        """As `partial_sums`.

        Args:
            place: where the pieces lie: two places are never the same memory read differently at one time.
            what: how that memory is read; equal as long as the pieces are the same ones.
            device: of the pieces.
            pieces: makes them.
        """
        if device.type != "cuda":
            return partial_sums(pieces())
        from weightcast.wire import digest_kernel

        known = self._known.get(place)
        if known is not None and known[0] == what:
            again = digest_kernel.sums_again(known[1])
            if again is not None:
                return again
        made = pieces()
        out = partial_sums(made)
        if made:
            if len(self._known) >= self._MAX_PLACES:
                self._known.clear()
            self._known[place] = what, digest_kernel.key_of(made)
        return out


def as_unsigned(value: int) -> int:
    """An int64 that `partial_sums` gave, as the number mod 2**64 that `add_partial` and `finish` take.

    Raises:
        ValueError: `value` fits neither a signed nor an unsigned 64-bit integer.
    """
    if not -(1 << 63) <= value <= _MASK:
        raise ValueError(f"{value} is not a 64-bit integer")
    return value & _MASK


def as_signed(value: int) -> int:
    """The inverse of `as_unsigned`.

    Raises:
        ValueError: `value` is not in [0, 2**64).
    """
    return _signed(_checked_sum(value))


def add_partial(a: int, b: int) -> int:
    """The sum mod 2**64 of two partial sums.

    Raises:
        ValueError: a summand is not in [0, 2**64).
    """
    return (_checked_sum(a) + _checked_sum(b)) & _MASK


def finish(total: int, *, dtype: torch.dtype, shape: Sequence[int]) -> str:
    """The digest of a tensor as 16 hex characters, from the sum over all of it.

    Raises:
        ValueError: `total` is not in [0, 2**64).
    """
    return f"{splitmix64(_checked_sum(total) ^ _key_of(dtype, tuple(shape))):016x}"


def key_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """What the digests of tensors of one dtype and shape have in common, as a signed number for `finish_all`."""
    return _signed(_key_of(dtype, tuple(shape)))


def finish_all(totals: torch.Tensor, keys: torch.Tensor) -> list[str]:
    """As `finish`, for many tensors at once.

    Args:
        totals: their sums, int64 `[tensors]` on the CPU, read mod 2**64.
        keys: their `key_of`, likewise.
    """
    x, high = totals.bitwise_xor(keys), torch.empty_like(totals)
    x.add_(_signed(_GOLDEN))
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        x.bitwise_xor_(_shift_right(x, shift, high)).mul_(_signed(factor))
    x.bitwise_xor_(_shift_right(x, 31, high))
    digits = struct.pack(f">{len(x)}q", *x.tolist()).hex()
    return [digits[start : start + 16] for start in range(0, len(digits), 16)]


def tensor_digest(tensor: torch.Tensor) -> str:
    """The digest of a whole tensor: `partial_sums` and `finish`. Waits for the device.

    Raises:
        ValueError: as `partial_sums`.
    """
    sums = partial_sums([Piece(tensor=tensor, full_shape=tuple(tensor.shape))])
    return finish(as_unsigned(int(sums.item())), dtype=tensor.dtype, shape=tensor.shape)


def sha256_digest(tensor: torch.Tensor) -> str:
    """SHA-256 over dtype, shape and row-major bytes: 64 hex characters. Waits for the device.

    A tensor that is not contiguous is copied whole; from a GPU it comes over in chunks of 16 MiB.

    Raises:
        ValueError: the tensor is not strided, is a DTensor, or has no storage (meta).
    """
    _check(Piece(tensor=tensor, full_shape=tuple(tensor.shape)), 0)
    if tensor.is_meta:
        raise ValueError(f"a meta tensor {tuple(tensor.shape)} has no bytes")
    sha = hashlib.sha256(_header(tensor.dtype, tensor.shape))
    data = flat_bytes(_resolved(tensor).contiguous())
    for chunk in data.split(_SHA_CHUNK_BYTES) if data.numel() else ():
        on_host = chunk.cpu()
        sha.update((ctypes.c_ubyte * on_host.numel()).from_address(on_host.data_ptr()))
    return sha.hexdigest()


def model_digest(digests: Mapping[str, str]) -> str:
    """One digest, 16 hex characters, of the digests of many named tensors; their order plays no part, names do.

    Raises:
        ValueError: a digest is not a hex string.
    """
    if not all(map(_HEX.fullmatch, digests.values())):
        name, digest = next(item for item in digests.items() if not _HEX.fullmatch(item[1]))
        raise ValueError(f"the digest of {name} is {digest!r}, not lower-case hex")
    return hashlib.blake2b(json.dumps(sorted(digests.items())).encode(), digest_size=8).hexdigest()


def unequal(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Names whose digest is another than expected, or missing."""
    if expected == found:  # nearly always, and there may be tens of thousands while engines wait
        return []
    return [name for name, digest in expected.items() if found.get(name) != digest]


def splitmix64(value: int) -> int:
    """The splitmix64 mix of a 64-bit number: one-to-one on [0, 2**64)."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def grid_of(piece: Piece) -> Grid:
    """A checked piece as a matrix of words. No memory is copied."""
    full = piece.full_shape
    offset = piece.box.offset if piece.box else (0,) * len(full)
    if len(full) < 2:
        full, offset = (1, *(full or (1,))), (0, *(offset or (0,)))
    words = words_of(_resolved(piece.tensor))
    return Grid(words=words, row=offset[0], column=(*offset[1:], 0), full_trailing=(*full[1:], words.shape[-1]))


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory as words: int16 or int8 `[rows, *trailing, words of an element]`, one row if it has no two
    dimensions. A view, whatever the strides."""
    if tensor.dim() < 2:
        tensor = tensor.reshape(1, 1) if tensor.dim() == 0 else tensor.unsqueeze(0)
    # The extra dimension lets a view of any strides be read as smaller words.
    return tensor.unsqueeze(-1).view(torch.int8 if tensor.itemsize == 1 else torch.int16)


def merge_levels(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Dimensions as (size, stride), outermost first: size 1 dropped, neighbours that form one run merged."""
    levels: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if levels and levels[-1][1] == size * stride:
            size *= levels.pop()[0]
        levels.append((size, stride))
    return levels


class _Coefficients:
    """A or B on the CPU: computed as asked, the first 2**20 (8 MiB) remembered once used."""

    _MAX_KEPT = 1 << 20

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kept = torch.empty(0, dtype=torch.int64)

    def span(self, start: int, stop: int) -> torch.Tensor:
        """The coefficients of `start` to `stop - 1`: int64 `[stop - start]`, not to be written to."""
        if stop > self._MAX_KEPT:
            return self.at(torch.arange(start, stop))
        kept = self._kept
        if len(kept) < stop:
            # A thread that loses this race computes the same numbers.
            size = min(max(1 << 12, 1 << (stop - 1).bit_length()), self._MAX_KEPT)
            self._kept = kept = self.at(torch.arange(size))
        return kept[start:stop]

    def at(self, indices: torch.Tensor) -> torch.Tensor:
        """The coefficients of `indices`, int64 `[n]`, which are overwritten and returned."""
        shifted = torch.empty(min(len(indices), _SPAN), dtype=torch.int64)
        for x in indices.split(_SPAN):
            high = shifted[: len(x)]
            x.add_(_signed((self._seed + _GOLDEN) & _MASK))
            for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
                x.bitwise_xor_(_shift_right(x, shift, high)).mul_(_signed(factor))
            x.bitwise_xor_(_shift_right(x, 31, high)).bitwise_or_(1)
        return indices


_A = _Coefficients(SEED_A)
_B = _Coefficients(SEED_B)


def _add_sum(grid: Grid, scratch: torch.Tensor, out: torch.Tensor) -> None:
    """Add the sum S of a CPU grid to `out`, a 0-d int64. `scratch` is 1-d int64 and limits the blocks."""
    rows, trailing = grid.words.shape[0], grid.words.shape[1:]
    if not grid.words.numel():
        return
    widest = min(len(scratch), max(_SPAN, len(scratch) // rows))
    for block in _blocks(trailing, widest):
        num_columns = math.prod(part.stop - part.start for part in block)
        num_rows = len(scratch) // num_columns
        b = _column_coefficients(grid, block)
        column_sums = torch.zeros_like(b)
        for start in range(0, rows, num_rows):
            words = grid.words[(slice(start, start + num_rows), *block)]
            values = scratch[: words.numel()].view(words.shape).copy_(words).view(len(words), num_columns)
            a = _A.span(grid.row + start, grid.row + start + len(words))
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
        return _B.span(first, first + math.prod(sizes))
    columns = torch.full((1,), first, dtype=torch.int64)
    for size, stride in levels:
        columns = columns.unsqueeze(-1) + torch.arange(0, size * stride, stride)
    return _B.at(columns.view(-1))


def _blocks(shape: Sequence[int], limit: int) -> Iterator[tuple[slice, ...]]:
    """Boxes of at most `limit` elements that together are all of `shape`, each as one slice per dimension."""
    axis = next(i for i in range(len(shape)) if math.prod(shape[i + 1 :]) <= limit)
    inner = tuple(slice(0, size) for size in shape[axis + 1 :])
    step = limit // math.prod(shape[axis + 1 :])
    for outer in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], step):
            middle = slice(start, min(start + step, shape[axis]))
            yield (*(slice(i, i + 1) for i in outer), middle, *inner)


def _check(piece: Piece, index: int) -> None:
    tensor, full, box = piece.tensor, piece.full_shape, piece.box
    shape = tuple(tensor.shape)
    if hasattr(tensor, "to_local"):
        raise ValueError(f"piece {index} {shape} is a DTensor: digest its local tensor, with the box that it is")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(
            f"piece {index} {shape} is {tensor.dtype}, {tensor.layout}: only plain strided tensors have digests"
        )
    if any(size < 0 for size in full):
        raise ValueError(f"piece {index}: full shape {full} is negative")
    if box is None:
        if shape != tuple(full):
            raise ValueError(f"piece {index} has shape {shape}, not the full shape {full}; say which box of it this is")
        return
    if shape != tuple(box.shape):
        raise ValueError(f"piece {index} has shape {shape}, its box {box.shape}")
    if not len(box.offset) == len(box.shape) == len(full):
        raise ValueError(f"piece {index}: the box {box} and the full shape {full} differ in dimensions")
    if any(at < 0 or at + size > end for at, size, end in zip(box.offset, box.shape, full, strict=True)):
        raise ValueError(f"piece {index}: the box {box} lies outside the full shape {full}")


def _checked_sum(value: int) -> int:
    if not 0 <= value <= _MASK:
        raise ValueError(f"a partial sum lies in [0, 2**64), {value} does not; as_unsigned() converts an int64")
    return value


@functools.lru_cache(maxsize=4096)  # a model has few shapes and many tensors
def _key_of(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(_header(dtype, shape), digest_size=8).digest(), "little")


def _header(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """Dtype and shape as bytes, the same for every torch version."""
    return json.dumps([str(dtype).removeprefix("torch."), [int(size) for size in shape]]).encode()


def _num_words(piece: Piece) -> int:
    return piece.tensor.numel() * max(1, piece.tensor.itemsize // 2)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without autograd and with the memory that its values say (complex conjugates are lazy)."""
    return tensor.detach().resolve_conj().resolve_neg()


def _shift_right(x: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    """`x >> bits` as unsigned numbers: an int64 shift copies the sign, the mask takes the copies away."""
    return torch.bitwise_right_shift(x, bits, out=out).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
