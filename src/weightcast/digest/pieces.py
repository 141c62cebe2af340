"""Tensors and boxes of tensors as matrices of words, which is how digests and kernels read them.

No memory is copied here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weightcast.wire.box import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """A strided tensor, also a view, that is all of a tensor of `full_shape`, or one box of it."""

    tensor: torch.Tensor
    full_shape: tuple[int, ...]
    box: Box | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A piece that is copied, or summed, or both.

    Args:
        target: destination with the piece's shape and dtype, in other memory; None for a sum alone.
        total: number of the sum that the piece is added to; None for a copy alone.
        far: True if the piece lies on another GPU, and is mapped for the one that copies.
        casts: True if the piece is float32 and counts as bfloat16: the target is bfloat16, and the sum that of the cast
            values.
    """

    piece: TensorPiece
    target: torch.Tensor | None = None
    total: int | None = None
    far: bool = False
    casts: bool = False

    @property
    def word_bytes(self) -> int:
        """Size of the words that are summed."""
        return 1 if self.piece.tensor.itemsize == 1 else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A piece as a matrix of words.

    Args:
        words: int16 or int8 `[rows, *trailing]`, a view of the piece's memory; the last dimension is the words of one
            element. Of a piece that is cast, each element is one word, int32.
        row: first row in the full tensor.
        column: first index in the full tensor's trailing dimensions.
        full_trailing: trailing dimensions of the full tensor.
    """

    words: torch.Tensor
    row: int
    column: tuple[int, ...]
    full_trailing: tuple[int, ...]

    @property
    def column_strides(self) -> tuple[int, ...]:
        """Distance, in columns of the full matrix, between neighbours along each trailing dimension."""
        return tuple(math.prod(self.full_trailing[i + 1 :]) for i in range(len(self.full_trailing)))


def check_piece(piece: TensorPiece, index: int) -> None:
    """Refuses, with a ValueError, a piece that has no digest.

    Its tensor is not strided or is a DTensor, or its box lies outside the full tensor or has another shape.
    """
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


def grid_of(piece: TensorPiece, *, casts: bool = False) -> Grid:
    """A checked piece as a matrix of words; `casts` as in `Transfer`."""
    full = piece.full_shape
    offset = piece.box.offset if piece.box else (0,) * len(full)
    if len(full) < 2:
        full, offset = (1, *(full or (1,))), (0, *(offset or (0,)))
    words = words_of(resolved(piece.tensor), torch.int32 if casts else None)
    return Grid(words=words, row=offset[0], column=(*offset[1:], 0), full_trailing=(*full[1:], words.shape[-1]))


def words_of(tensor: torch.Tensor, word: torch.dtype | None = None) -> torch.Tensor:
    """A tensor's memory as words: a view, `[rows, *trailing, words of an element]`.

    Words are int16, or int8 of elements of one byte, unless `word` says otherwise. A tensor with fewer than two
    dimensions is one row.
    """
    if tensor.dim() < 2:
        tensor = tensor.reshape(1, 1) if tensor.dim() == 0 else tensor.unsqueeze(0)
    # The extra dimension lets a view of any strides be read as smaller words.
    return tensor.unsqueeze(-1).view(word or (torch.int8 if tensor.itemsize == 1 else torch.int16))


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


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without autograd, and with its own memory where torch keeps a conjugate or a negative lazily."""
    return tensor.detach().resolve_conj().resolve_neg()
