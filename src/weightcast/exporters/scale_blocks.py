"""How a matrix is divided into blocks that have a scale each, and the largest magnitudes in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightcast.exporters.fp8_formats import Fp8Format
from weightcast.exporters.lora import rows_of
from weightcast.wire.box import Box

__all__ = ["Blocks", "spreads", "whole_box"]


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a weight is divided into blocks: the *grid* has an element for each block of each of its matrices.

    Attributes:
        shape: Shape of the weight.
        rows: Rows of a block.
        columns: Columns of a block.
        scales: Shape in which the scales travel.  It has no rows and columns if a matrix has one scale.
    """

    shape: tuple[int, ...]
    rows: int
    columns: int
    scales: tuple[int, ...]

    @staticmethod
    def of(shape: tuple[int, ...], form: Fp8Format) -> Blocks:
        """The blocks of a weight of this shape."""
        return Blocks(shape, *form.block_of(shape), form.scale_shape(shape))

    @property
    def grid_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-2], -(-self.shape[-2] // self.rows), -(-self.shape[-1] // self.columns))

    def touched(self, box: Box) -> Box:
        """The box of the grid whose blocks a box of elements touches."""
        steps = (*(1 for _ in self.shape[:-2]), self.rows, self.columns)
        starts = tuple(start // step for start, step in zip(box.offset, steps, strict=True))
        ends = [-(-(start + extent) // step) for start, extent, step in zip(box.offset, box.shape, steps, strict=True)]
        return Box(offset=starts, shape=tuple(end - start for start, end in zip(starts, ends, strict=True)))

    def scales_of(self, box: Box) -> Box:
        """The box, of the travelling scales, that belongs to a box of elements."""
        return self.touched(box) if len(self.scales) == len(self.shape) else whole_box(self.scales)

    def cut_by(self, box: Box) -> bool:
        """True if a box of elements has a part of a block."""
        return any(
            start % step or (end % step and end != extent)
            for start, end, step, extent in (
                (box.offset[dim], box.offset[dim] + box.shape[dim], step, self.shape[dim])
                for dim, step in ((-2, self.rows), (-1, self.columns))
            )
        )

    def pieces(self, box: Box, elements: int) -> list[Box]:
        """Cuts a box into boxes of whole rows of one matrix, each of at most so many elements.

        Rows are cut within a block only if the block is as wide as the matrix.
        """
        multiple = self.rows if self.columns < self.shape[-1] else 1
        if len(box.shape) == 2:
            return list(rows_of(box, elements, multiple=multiple))
        return [
            Box(offset=(index, *piece.offset), shape=(1, *piece.shape))
            for index in range(box.offset[0], box.offset[0] + box.shape[0])
            for piece in rows_of(Box(offset=box.offset[1:], shape=box.shape[1:]), elements, multiple=multiple)
        ]

    def maxima(self, x: torch.Tensor, piece: Box) -> torch.Tensor:
        """Largest magnitude in each block that a piece touches: float32, of the shape of ``touched(piece)``."""
        touched = self.touched(piece).shape
        # Magnitudes and their maximum are exact in any dtype.
        if spreads(touched, piece.shape):
            for dim in (-1, -2):
                if touched[dim] < x.shape[dim]:
                    x = _amax(x, dim)
            return x.abs().float()
        blocks = self.in_blocks(x, piece)
        most = self._padded_maxima(x, piece) if blocks is None else blocks.abs().amax(dim=(-3, -1))
        return most.float().view(touched)

    def in_blocks(self, tensor: torch.Tensor, box: Box) -> torch.Tensor | None:
        """A view ``(..., rows of blocks, rows, columns of blocks, columns)``; None if the box cuts through a block."""
        steps = (self.rows, self.columns)
        if any(
            start % step or extent % step
            for start, extent, step in zip(box.offset[-2:], box.shape[-2:], steps, strict=True)
        ):
            return None
        return tensor.unflatten(-1, (-1, self.columns)).unflatten(-3, (-1, self.rows))

    def _padded_maxima(self, x: torch.Tensor, piece: Box) -> torch.Tensor:
        (top, left), (rows, columns) = (piece.offset[-2] % self.rows, piece.offset[-1] % self.columns), piece.shape[-2:]
        high, wide = -(-(top + rows) // self.rows), -(-(left + columns) // self.columns)
        padded = torch.zeros(high * self.rows, wide * self.columns, dtype=x.dtype, device=x.device)
        padded[top : top + rows, left : left + columns] = x.reshape(rows, columns)
        return padded.abs_().view(high, self.rows, wide, self.columns).amax(dim=(1, 3))


def whole_box(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor."""
    return Box(offset=(0,) * len(shape), shape=shape)


def spreads(touched: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """True if a part of a grid can be broadcast to the elements of the piece that touches it."""
    return all(blocks in (1, extent) for blocks, extent in zip(touched[-2:], shape[-2:], strict=True))


def _amax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Largest magnitude along a dimension, which is kept; NaN if there is one.  Makes no copy of ``x``."""
    least, most = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    return torch.maximum(least.neg(), most)
