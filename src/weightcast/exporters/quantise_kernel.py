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

from weightcast.exporters.quantise_jobs import Job, Jobs, Tiling

_FIELDS = tl.constexpr(len(Job._fields))
_MOST = tl.constexpr(448.0)  # of float8_e4m3fn
_MOST_JOBS = 65_535  # of a launch: CUDA's limit for a grid's second dimension
_NUM_WARPS = 8


def prepare(jobs: Jobs) -> None:
    """Compiles the launches that these kinds of jobs need, or loads them from Triton's cache on disk."""
    for tiling, dtype, _ in jobs.each():
        x, scale = torch.zeros(1, dtype=dtype, device=jobs.device), torch.ones(1, device=jobs.device)
        out = torch.empty(1, dtype=torch.uint8, device=jobs.device)
        job = Job(x.data_ptr(), 1, 0, 0, 1, 1, scale.data_ptr(), 1, out.data_ptr(), 1, 0)
        _launch(_encode_tiles, [job], tiling, dtype, jobs.device, MULTIPLIES=jobs.multiplies)
        for joined in (False, True):
            _launch(_measure_tiles, [job], tiling, dtype, jobs.device, JOINED=joined)


def measure(jobs: Jobs) -> None:
    """Writes the largest magnitude in each block of the parts to their grids, which are 0 before."""
    for tiling, dtype, parts in jobs.each():
        joined = any(part.joined for part in parts) or tiling.blocks_have_several_tiles
        _launch(_measure_tiles, parts, tiling, dtype, jobs.device, JOINED=joined)


def encode(jobs: Jobs) -> None:
    """Writes the parts, divided by their scales, as float8_e4m3fn."""
    for tiling, dtype, parts in jobs.each():
        _launch(_encode_tiles, parts, tiling, dtype, jobs.device, MULTIPLIES=jobs.multiplies)


def _launch(kernel, jobs: Sequence[Job], tiling: Tiling, dtype: torch.dtype, device: torch.device, **switches) -> None:
    with torch.cuda.device(device):
        for first in range(0, len(jobs), _MOST_JOBS):
            some = jobs[first : first + _MOST_JOBS]
            table = torch.tensor(some, dtype=torch.int64).to(device)
            kernel[(max(tiling.tiles(job) for job in some), len(some))](
                table,
                tiling.rows,
                tiling.columns,
                WORD={torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype],
                ROWS=tiling.tile_rows,
                COLUMNS=tiling.tile_columns,
                BLOCK_ROWS=tiling.rows_in_tile,
                BLOCK_COLUMNS=tiling.columns_in_tile,
                num_warps=_NUM_WARPS,
                **switches,
            )


@triton.jit
def _tile(jobs, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The job's fields, the first row and column of this program's tile, and whether the job has such a tile."""
    job = jobs + tl.program_id(1).to(tl.int64) * _FIELDS
    first_row, first_column = tl.load(job + 2), tl.load(job + 3)
    end_row, end_column = first_row + tl.load(job + 4), first_column + tl.load(job + 5)
    top, left = first_row // ROWS, first_column // COLUMNS
    wide = (end_column + COLUMNS - 1) // COLUMNS - left
    row = (top + tl.program_id(0) // wide) * ROWS
    column = (left + tl.program_id(0) % wide) * COLUMNS
    return job, first_row, first_column, end_row, end_column, row, column, row < end_row


@triton.jit
def _values(
    job,
    first_row,
    first_column,
    end_row,
    end_column,
    row,
    column,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = row + tl.arange(0, ROWS)[:, None]
    columns = column + tl.arange(0, COLUMNS)[None, :]
    inside = (rows >= first_row) & (rows < end_row) & (columns >= first_column) & (columns < end_column)
    places = (rows - first_row) * tl.load(job + 1) + columns - first_column
    x = tl.load(tl.load(job).to(tl.pointer_type(WORD)) + places, mask=inside, other=0.0)
    return x.to(tl.float32), rows - first_row, columns - first_column, inside


@triton.jit
def _scales(
    job,
    row,
    column,
    block_rows,
    block_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Addresses of the scales of a tile, and which of them the job's part touches."""
    rows = row + tl.arange(0, HIGH)[:, None] * ROWS
    columns = column + tl.arange(0, WIDE)[None, :] * COLUMNS
    first_row, first_column = tl.load(job + 2), tl.load(job + 3)
    end_row, end_column = first_row + tl.load(job + 4), first_column + tl.load(job + 5)
    touched = (rows + ROWS > first_row) & (rows < end_row) & (columns + COLUMNS > first_column)
    places = rows // block_rows * tl.load(job + 7) + columns // block_columns
    return tl.load(job + 6).to(tl.pointer_type(tl.float32)) + places, touched & (columns < end_column)


@triton.jit
def _measure_tiles(
    jobs,
    block_rows,
    block_columns,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    JOINED: tl.constexpr,
):
    job, first_row, first_column, end_row, end_column, row, column, exists = _tile(jobs, ROWS, COLUMNS)
    if exists:
        x, _, _, _ = _values(job, first_row, first_column, end_row, end_column, row, column, WORD, ROWS, COLUMNS)
        high: tl.constexpr = ROWS // BLOCK_ROWS
        wide: tl.constexpr = COLUMNS // BLOCK_COLUMNS
        bits = tl.abs(x).to(tl.int32, bitcast=True)
        most = tl.max(tl.max(tl.reshape(bits, (high, BLOCK_ROWS, wide, BLOCK_COLUMNS)), axis=3), axis=1)
        at, touched = _scales(job, row, column, block_rows, block_columns, BLOCK_ROWS, BLOCK_COLUMNS, high, wide)
        at = at.to(tl.pointer_type(tl.int32))
        if JOINED:
            tl.atomic_max(at, most, mask=touched)
        else:
            tl.store(at, most, mask=touched)


@triton.jit
def _encode_tiles(
    jobs,
    block_rows,
    block_columns,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    MULTIPLIES: tl.constexpr,
):
    job, first_row, first_column, end_row, end_column, row, column, exists = _tile(jobs, ROWS, COLUMNS)
    if exists:
        x, rows, columns, inside = _values(
            job, first_row, first_column, end_row, end_column, row, column, WORD, ROWS, COLUMNS
        )
        high: tl.constexpr = ROWS // BLOCK_ROWS
        wide: tl.constexpr = COLUMNS // BLOCK_COLUMNS
        at, touched = _scales(job, row, column, block_rows, block_columns, BLOCK_ROWS, BLOCK_COLUMNS, high, wide)
        scales = tl.load(at, mask=touched, other=1.0)
        if MULTIPLIES:
            scales = tl.div_rn(tl.full((high, wide), 1.0, tl.float32), scales)
        spread = tl.broadcast_to(scales[:, None, :, None], (high, BLOCK_ROWS, wide, BLOCK_COLUMNS))
        spread = tl.reshape(spread, (ROWS, COLUMNS))
        q = x * spread if MULTIPLIES else tl.div_rn(x, spread)
        q = tl.minimum(q, _MOST, propagate_nan=tl.PropagateNan.ALL)
        q = tl.maximum(q, -_MOST, propagate_nan=tl.PropagateNan.ALL)
        out = tl.load(job + 8).to(tl.pointer_type(tl.float8e4nv)) + rows * tl.load(job + 9) + columns
        tl.store(out, q.to(tl.float8e4nv), mask=inside)
