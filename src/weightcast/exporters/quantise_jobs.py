"""Parts of matrices that are quantised together on a GPU: two launches for a bucket, however many parts it has.

In torch's operations each part takes about ten launches and a float32 copy of itself.  Parts in other memory and in
formats that are not ``float8_e4m3fn`` with float32 scales alone are computed with those: see ``Jobs.takes``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from weightcast.exporters.fp8_formats import FP8, Fp8Format
from weightcast.exporters.scale_blocks import Blocks
from weightcast.wire.box import Box

_WORDS = (torch.bfloat16, torch.float16, torch.float32)
_TILE = 128
_FLAT_TILE = 32, 512  # where a row has one scale
ALIGNMENT = 16
_SMALLEST = 16  # rows or columns of a block that is smaller than a tile
# Older GPUs cannot convert to float8_e4m3fn.
_CAPABILITY = 8, 9


class Job(NamedTuple):
    """A part of one matrix, as the kernel reads it.  Addresses and offsets are in bytes, strides in elements.

    Attributes:
        x: Address of the part's first value.
        stride: From row to row of the part.
        first_row: Row of the matrix at which the part begins.
        first_column: Its column there.
        rows: Rows of the part.
        columns: Columns of the part.
        scales: Place of the scale of the matrix's first block, float32, after the first scale of the bucket.
        scales_stride: From row to row of the scales.
        out: Place to which the part goes in 8-bit floats, after the bucket's first byte; 0 if it is only measured.
        out_stride: From row to row there.
        joined: 1 if other parts may have values of the same blocks.
    """

    x: int
    stride: int
    first_row: int
    first_column: int
    rows: int
    columns: int
    scales: int
    scales_stride: int
    out: int
    out_stride: int
    joined: int

    def is_aligned(self, itemsize: int) -> bool:
        """True if values of this size can be read and written 16 bytes at a time."""
        sizes = self.x | self.stride * itemsize | self.out | self.out_stride | self.first_column | self.columns
        return sizes % ALIGNMENT == 0


class Tiling(NamedTuple):
    """How programs divide a matrix.

    Attributes:
        rows: Rows of a block.
        columns: Columns of a block.
        tile_rows: Rows of a tile.
        tile_columns: Columns of a tile.
        rows_in_tile: Rows of a block's part in one tile.
        columns_in_tile: Columns of a block's part in one tile.
    """

    rows: int
    columns: int
    tile_rows: int
    tile_columns: int
    rows_in_tile: int
    columns_in_tile: int

    @staticmethod
    def of(blocks: Blocks) -> Tiling | None:
        """The tiles for these blocks; None if there are none that fit."""
        high, wide = (_TILE, _TILE)
        if blocks.rows == 1 and blocks.columns == blocks.shape[-1]:
            high, wide = _FLAT_TILE
        rows = _in_tile(blocks.rows, blocks.shape[-2], high)
        columns = _in_tile(blocks.columns, blocks.shape[-1], wide)
        if not rows or not columns:
            return None
        return Tiling(blocks.rows, blocks.columns, high, wide, rows, columns)

    @property
    def blocks_have_several_tiles(self) -> bool:
        return self.rows > self.rows_in_tile or self.columns > self.columns_in_tile

    def tiles(self, job: Job) -> int:
        """Number of tiles that a part touches."""
        high = -(-(job.first_row + job.rows) // self.tile_rows) - job.first_row // self.tile_rows
        wide = -(-(job.first_column + job.columns) // self.tile_columns) - job.first_column // self.tile_columns
        return high * wide


def _in_tile(block: int, extent: int, tile: int) -> int:
    """Rows or columns of one block in a tile; 0 if blocks and tiles do not divide each other."""
    if block >= extent or block % tile == 0:
        return tile
    fits = block == 1 or (block >= _SMALLEST and tile % block == 0)
    return block if fits else 0


def launches_on(device: torch.device) -> bool:
    """True where parts are quantised in launches of our own."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CAPABILITY


class Jobs:
    """Parts to be measured, or to be encoded, on one GPU.  False if there are none.

    Attributes:
        device: Where they lie; none is taken on a CPU.
        multiplies: As of the format.
    """

    def __init__(self, form: Fp8Format, device: torch.device, scales: int = 0, out: int = 0) -> None:
        """Takes the addresses of the bucket's first scale and first byte."""
        self._scales = scales
        self._out = out
        self.device = device
        self.multiplies = form.multiplies
        plain = form.packs == 1 and form.weight_dtype == FP8 and not form.overall_suffix
        self._here = plain and launches_on(device)
        self._jobs: dict[tuple[Tiling, torch.dtype], list[Job]] = {}
        self._tilings: dict[Blocks, Tiling | None] = {}

    def takes(
        self,
        memory: torch.Tensor | None,
        dtype: torch.dtype,
        first: tuple[int, ...],
        box: Box,
        blocks: Blocks,
        grid: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> bool:
        """Adds a box of a part, if it can be computed here.

        Args:
            memory: The part in memory; None if its values are computed.
            dtype: Dtype of the values that are quantised.
            first: Place of ``memory`` in the weight.
            box: What is to be computed, in elements of the weight; it is inside the part.
            blocks: The weight's blocks.
            grid: The weight's whole grid among the bucket's scales, float32, contiguous.
            out: Where the box goes in the bucket; None to measure it.
        """
        tiling = self._tiling(memory, dtype, blocks)
        if tiling is None or memory is None or (out is not None and out.stride(-1) != 1):
            return False
        jobs = self._jobs.setdefault((tiling, dtype), [])
        (rows, columns), matrix = box.shape[-2:], grid.shape[-2] * grid.shape[-1]
        row, column = box.offset[-2:]
        x = memory.data_ptr() + ((row - first[-2]) * memory.stride(-2) + column - first[-1]) * memory.element_size()
        joined = int(blocks.cut_by(box))
        stacked = len(box.shape) > 2
        for number in range(box.shape[0] if stacked else 1):
            index = box.offset[0] + number if stacked else 0
            jobs.append(
                Job(
                    x=x + ((index - first[0]) * memory.stride(0) * memory.element_size() if stacked else 0),
                    stride=memory.stride(-2),
                    first_row=row,
                    first_column=column,
                    rows=rows,
                    columns=columns,
                    scales=grid.data_ptr() - self._scales + index * matrix * grid.element_size(),
                    scales_stride=grid.shape[-1],
                    out=0 if out is None else out.data_ptr() - self._out + (number * out.stride(0) if stacked else 0),
                    out_stride=0 if out is None else out.stride(-2),
                    joined=joined,
                )
            )
        return True

    def _tiling(self, memory: torch.Tensor | None, dtype: torch.dtype, blocks: Blocks) -> Tiling | None:
        """The tiles for a part; None if it cannot be computed here."""
        if not self._here or memory is None or memory.dtype != dtype or memory.device != self.device:
            return None
        if dtype not in _WORDS or memory.stride(-1) != 1:
            return None
        if blocks not in self._tilings:
            self._tilings[blocks] = Tiling.of(blocks)
        return self._tilings[blocks]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def each(self) -> Iterator[tuple[Tiling, torch.dtype, list[Job]]]:
        """The jobs that one launch does: the tiling, the dtype of the values, and the parts."""
        for (tiling, dtype), jobs in self._jobs.items():
            yield tiling, dtype, jobs
