# pyright: basic, reportMissingImports=false, reportIndexIssue=false
"""The arithmetic of ``weightcast.exporters.quantise_jobs`` on CUDA.  Importing this needs Triton.

A program takes one tile of a matrix.  Tiles begin at multiples of their size from the matrix's first element on, so
that a block is either a whole number of tiles, or a tile a whole number of blocks.  Magnitudes are compared as the bits
of their float32, which orders numbers as they are and puts NaN above all.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from weightcast.exporters.quantise_jobs import ALIGNMENT, Job, Jobs, Tiling

_FIELDS = tl.constexpr(len(Job._fields))
_MOST = tl.constexpr(448.0)  # of float8_e4m3fn
_MOST_JOBS = 65_535  # of a launch: CUDA's limit for a grid's second dimension
_NUM_WARPS = 4


class Launches:
    """The launches of some jobs, which can be repeated as long as the parts stay where they are."""

    def __init__(self, jobs: Jobs) -> None:
        self._device = jobs.device
        self._multiplies = jobs.multiplies
        self._each = [
            _Launch(parts[first : first + _MOST_JOBS], tiling, dtype, jobs.device)
            for tiling, dtype, parts in jobs.each()
            for first in range(0, len(parts), _MOST_JOBS)
        ]

    def measure(self, scales: int) -> None:
        """Writes the largest magnitude in each block of the parts to their grids, which are 0 before.

        ``scales`` is the address of the bucket's first scale.
        """
        with torch.cuda.device(self._device):
            for launch in self._each:
                launch.run(_measure_tiles, scales, scales, JOINED=launch.joined)

    def encode(self, scales: int, out: int) -> None:
        """Writes the parts, divided by their scales, as float8_e4m3fn; ``out`` is the address of the bucket."""
        with torch.cuda.device(self._device):
            for launch in self._each:
                launch.run(_encode_tiles, scales, out, MULTIPLIES=self._multiplies)


class _Launch:
    """Jobs of one kind, on a device."""

    def __init__(self, jobs: Sequence[Job], tiling: Tiling, dtype: torch.dtype, device: torch.device) -> None:
        self.joined = any(job.joined for job in jobs) or tiling.blocks_have_several_tiles
        self._aligned = all(job.is_aligned(dtype.itemsize) for job in jobs)
        self._table = torch.tensor(jobs, dtype=torch.int64).to(device)
        self._grid = max(tiling.tiles(job) for job in jobs), len(jobs)
        self._tiling = tiling
        self._dtype = dtype

    def run(self, kernel, scales: int, out: int, **switches: bool) -> None:
        tiling, dtype = self._tiling, self._dtype
        kernel[self._grid](
            self._table,
            scales,
            out,
            tiling.rows,
            tiling.columns,
            WORD={torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype],
            BYTES=dtype.itemsize,
            ALIGNED=self._aligned and out % ALIGNMENT == 0,
            ROWS=tiling.tile_rows,
            COLUMNS=tiling.tile_columns,
            BLOCK_ROWS=tiling.rows_in_tile,
            BLOCK_COLUMNS=tiling.columns_in_tile,
            num_warps=_NUM_WARPS,
            **switches,
        )


def prepare(jobs: Jobs) -> None:
    """Compiles the launches that these kinds of jobs need, or loads them from Triton's cache on disk."""
    for tiling, dtype, _ in jobs.each():
        x, scale = torch.zeros(16, dtype=dtype, device=jobs.device), torch.ones(1, device=jobs.device)
        out = torch.empty(16, dtype=torch.uint8, device=jobs.device)
        for columns in (16, 1):  # aligned and not
            job = Job(x.data_ptr(), 16, 0, 0, 1, columns, 0, 1, 0, 16, 0)
            launch = _Launch([job], tiling, dtype, jobs.device)
            with torch.cuda.device(jobs.device):
                launch.run(_encode_tiles, scale.data_ptr(), out.data_ptr(), MULTIPLIES=jobs.multiplies)
                for joined in (False, True):
                    launch.run(_measure_tiles, scale.data_ptr(), out.data_ptr(), JOINED=joined)


@triton.jit
def _tile(jobs, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The job, its first and end row and column, and the first row and column of this program's tile."""
    job = jobs + tl.program_id(1).to(tl.int64) * _FIELDS
    first_row, first_column = tl.load(job + 2).to(tl.int32), tl.load(job + 3).to(tl.int32)
    end_row, end_column = first_row + tl.load(job + 4).to(tl.int32), first_column + tl.load(job + 5).to(tl.int32)
    wide = (end_column + COLUMNS - 1) // COLUMNS - first_column // COLUMNS
    row = (first_row // ROWS + tl.program_id(0) // wide) * ROWS
    column = (first_column // COLUMNS + tl.program_id(0) % wide) * COLUMNS
    return job, first_row, first_column, end_row, end_column, row, column


@triton.jit
def _inside(first_row, first_column, end_row, end_column, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Which elements of a tile the job's part has."""
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    high, wide = (rows >= first_row) & (rows < end_row), (columns >= first_column) & (columns < end_column)
    return high[:, None] & wide[None, :]


@triton.jit
def _places(
    start, stride, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WORD: tl.constexpr, BYTES: tl.constexpr
):
    """Addresses of a tile's elements, of which the first lies some rows and columns from ``start``."""
    start += (row.to(tl.int64) * stride + column) * BYTES
    return start.to(tl.pointer_type(WORD)) + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _values(
    job, first_row, first_column, row, column, inside, WORD: tl.constexpr, BYTES: tl.constexpr, ALIGNED: tl.constexpr
):
    ROWS: tl.constexpr = inside.shape[0]
    COLUMNS: tl.constexpr = inside.shape[1]
    at = _places(tl.load(job), tl.load(job + 1), row - first_row, column - first_column, ROWS, COLUMNS, WORD, BYTES)
    if ALIGNED:
        at = tl.max_contiguous(tl.multiple_of(at, (1, 16)), (1, 16))
        inside = tl.max_constancy(inside, (1, 16))
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _scales(
    job,
    scales_at,
    first_row,
    first_column,
    end_row,
    end_column,
    row,
    column,
    block_rows,
    block_columns,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Addresses of the scales of a tile, and which of them the job's part touches."""
    rows = row + tl.arange(0, HIGH)[:, None] * BLOCK_ROWS
    columns = column + tl.arange(0, WIDE)[None, :] * BLOCK_COLUMNS
    high, wide = (rows + BLOCK_ROWS > first_row) & (rows < end_row), columns + BLOCK_COLUMNS > first_column
    places = (rows // block_rows).to(tl.int64) * tl.load(job + 7) + columns // block_columns
    return (scales_at + tl.load(job + 6)).to(tl.pointer_type(tl.float32)) + places, high & wide & (columns < end_column)


@triton.jit
def _measure_tiles(
    jobs,
    scales_at,
    out_at,
    block_rows,
    block_columns,
    WORD: tl.constexpr,
    BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    JOINED: tl.constexpr,
):
    job, first_row, first_column, end_row, end_column, row, column = _tile(jobs, ROWS, COLUMNS)
    if row >= end_row:
        return
    inside = _inside(first_row, first_column, end_row, end_column, row, column, ROWS, COLUMNS)
    x = _values(job, first_row, first_column, row, column, inside, WORD, BYTES, ALIGNED)
    high: tl.constexpr = ROWS // BLOCK_ROWS
    wide: tl.constexpr = COLUMNS // BLOCK_COLUMNS
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # what ``abs`` makes of NaN's sign is not defined
    most = tl.max(bits, axis=1)[:, None] if wide == 1 else tl.max(tl.reshape(bits, (ROWS, wide, BLOCK_COLUMNS)), axis=2)
    if BLOCK_ROWS == ROWS:
        most = tl.max(most, axis=0)[None, :]
    elif BLOCK_ROWS > 1:
        most = tl.max(tl.reshape(most, (high, BLOCK_ROWS, wide)), axis=1)
    at, touched = _scales(
        job,
        scales_at,
        first_row,
        first_column,
        end_row,
        end_column,
        row,
        column,
        block_rows,
        block_columns,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
        high,
        wide,
    )
    at = at.to(tl.pointer_type(tl.int32))
    if JOINED:
        tl.atomic_max(at, most, mask=touched)
    else:
        tl.store(at, most, mask=touched)


@triton.jit
def _encode_tiles(
    jobs,
    scales_at,
    out_at,
    block_rows,
    block_columns,
    WORD: tl.constexpr,
    BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    MULTIPLIES: tl.constexpr,
):
    job, first_row, first_column, end_row, end_column, row, column = _tile(jobs, ROWS, COLUMNS)
    if row >= end_row:
        return
    inside = _inside(first_row, first_column, end_row, end_column, row, column, ROWS, COLUMNS)
    x = _values(job, first_row, first_column, row, column, inside, WORD, BYTES, ALIGNED)
    high: tl.constexpr = ROWS // BLOCK_ROWS
    wide: tl.constexpr = COLUMNS // BLOCK_COLUMNS
    at, touched = _scales(
        job,
        scales_at,
        first_row,
        first_column,
        end_row,
        end_column,
        row,
        column,
        block_rows,
        block_columns,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
        high,
        wide,
    )
    scales = tl.load(at, mask=touched, other=1.0)
    if MULTIPLIES:
        scales = tl.div_rn(tl.full((high, wide), 1.0, tl.float32), scales)
    # A dimension in which the tile has one scale, or each row its own, is broadcast below.
    if wide > 1:
        scales = tl.reshape(tl.broadcast_to(scales[:, :, None], (high, wide, BLOCK_COLUMNS)), (high, COLUMNS))
    if high > 1 and BLOCK_ROWS > 1:
        columns: tl.constexpr = scales.shape[1]
        scales = tl.reshape(tl.broadcast_to(scales[:, None, :], (high, BLOCK_ROWS, columns)), (ROWS, columns))
    scales = tl.broadcast_to(scales, (ROWS, COLUMNS))
    q = x * scales if MULTIPLIES else tl.div_rn(x, scales)
    q = tl.minimum(q, _MOST, propagate_nan=tl.PropagateNan.ALL)
    q = tl.maximum(q, -_MOST, propagate_nan=tl.PropagateNan.ALL)
    out = _places(
        out_at + tl.load(job + 8),
        tl.load(job + 9),
        row - first_row,
        column - first_column,
        ROWS,
        COLUMNS,
        tl.float8e4nv,
        1,
    )
    if ALIGNED:
        out = tl.max_contiguous(tl.multiple_of(out, (1, 16)), (1, 16))
        inside = tl.max_constancy(inside, (1, 16))
    tl.store(out, q.to(tl.float8e4nv), mask=inside)
