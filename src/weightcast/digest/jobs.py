"""The work of one launch of `weightcast.digest.kernel` or `weightcast.digest.cpu_kernel`, worked out on the host.

Pieces become *jobs*. A job is a matrix of words in memory, the place of its rows and columns in the full tensor and,
for a copy, its destination. A job is cut into tiles, on a GPU one program each. Nothing here needs a GPU or Triton.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from weightcast.digest.pieces import Grid, Transfer, grid_of, merge_levels, words_of

# A tile of two warps: 16 bytes of a bf16 row per thread, eight rows at once. Of the sizes tried on an H200 this one
# copies fastest, and none sums faster.
COLS = 512
ROWS = 64
# Below this many columns a program covers whole rows instead, at more work per word.
NARROW_COLS = 64
NARROW_WORDS = 1 << 14

# On a CPU, the coefficients of a tile's columns are 128 KiB, and a tile is 512 KiB of 16-bit words.
CPU_COLS = 1 << 14
CPU_WORDS = 1 << 18

NARROW, WIDE, ALIGNED = 0, 1, 2

# Bytes of a word, and whether it is cast.
KINDS = (1, False), (2, False), (2, True)


class TransferTiling(NamedTuple):
    """How jobs are cut into tiles: columns of a tile, and its rows, given the columns of its job."""

    cols: int
    rows: Callable[[int], int]


def _rows_on_gpu(cols: int) -> int:
    return ROWS if cols >= NARROW_COLS else max(1, NARROW_WORDS // cols)


def _rows_on_cpu(cols: int) -> int:
    return max(4, CPU_WORDS // min(cols, CPU_COLS))


GPU_TILING = TransferTiling(COLS, _rows_on_gpu)
CPU_TILING = TransferTiling(CPU_COLS, _rows_on_cpu)


class TransferJob(NamedTuple):
    """A row of `TransferPlan.jobs`. Rows, columns and strides are in words; the kernel reads fields by their places.

    `address`: of the first word. `row_stride`: between rows in memory. `first_row`, `first_column`: in the full tensor.
    `run`, `run_stride`: its columns are runs of so many of the full tensor's, so far apart. `total`: the sum that it
    adds to, -1 for none. `kind`: how rows are read. `tile_rows`: rows of a tile. `goal`: address that it is copied to,
    0 for none. `goal_stride`: between rows there.
    """

    address: int
    rows: int
    cols: int
    row_stride: int
    first_row: int
    first_column: int
    run: int
    run_stride: int
    total: int
    kind: int
    tile_rows: int
    goal: int
    goal_stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """The tables that a launch reads: `jobs` int64 `[jobs, fields of TransferJob]`, `tiles` int32 `[tiles, 2]`.

    A row of `tiles` is a job and a tile of it. A word has 1 or 2 bytes. `copies` is false if no job has a target. With
    `casts`, the memory that is read has float32, each of which is one word once it is cast to bfloat16.
    """

    word_bytes: int
    casts: bool
    copies: bool
    jobs: torch.Tensor
    tiles: torch.Tensor

    def to(self, device: torch.device) -> TransferPlan:
        """A copy on `device`, queued on its current stream through pinned memory, so that the host does not wait."""
        jobs, tiles = (part.pin_memory().to(device, non_blocking=True) for part in (self.jobs, self.tiles))
        return replace(self, jobs=jobs, tiles=tiles)

    @property
    def size_bytes(self) -> int:
        """Memory of both tensors."""
        return self.jobs.nbytes + self.tiles.nbytes


def rows_of_runs(grid: Grid) -> Grid:
    """The grid itself if each of its rows is one run of adjacent words, else a contiguous copy of it."""
    return grid if is_rows_of_runs(grid.words) else replace(grid, words=grid.words.contiguous())


def is_rows_of_runs(words: torch.Tensor) -> bool:
    """True if each row is one run of adjacent words."""
    trailing = merge_levels(words.shape[1:], words.stride()[1:])
    return words.numel() == 0 or not trailing or (len(trailing) == 1 and trailing[0][1] == 1)


def plans_of(grids: Sequence[Grid]) -> list[TransferPlan]:
    """The work of a GPU on some grids of `rows_of_runs`, as tables on the CPU: one plan for each word size."""
    plans: list[TransferPlan] = []
    for word_bytes in (1, 2):
        jobs = [
            job
            for index, grid in enumerate(grids)
            if grid.words.itemsize == word_bytes and grid.words.numel()
            for job in _jobs(grid, index, None, word_bytes, GPU_TILING)
        ]
        if jobs:
            plans.append(plan_of(jobs, word_bytes, GPU_TILING))
    return plans


def plans_of_transfers(transfers: Sequence[Transfer], tiling: TransferTiling = GPU_TILING) -> list[TransferPlan]:
    """The work on some transfers for which `can_transfer` is true, likewise."""
    jobs: dict[tuple[int, bool], list[TransferJob]] = {kind: [] for kind in KINDS}
    for transfer in transfers:
        if transfer.piece.tensor.numel():
            jobs[transfer.word_bytes, transfer.casts] += jobs_of(transfer, tiling)
    return [plan_of(some, word_bytes, tiling, casts=casts) for (word_bytes, casts), some in jobs.items() if some]


def plan_of(
    jobs: Sequence[TransferJob], word_bytes: int, tiling: TransferTiling, *, casts: bool = False
) -> TransferPlan:
    """The tables of some jobs with words of one size, all of which cast or none."""
    table = torch.tensor(jobs, dtype=torch.int64)
    rows, cols, tile_rows = (table[:, TransferJob._fields.index(name)] for name in ("rows", "cols", "tile_rows"))
    counts = (rows + tile_rows - 1) // tile_rows * ((cols + tiling.cols - 1) // tiling.cols)
    copies = any(job.goal for job in jobs)
    tiles = numbered_tiles(counts)
    return TransferPlan(word_bytes=word_bytes, casts=casts, copies=copies, jobs=table, tiles=tiles)


def numbered_tiles(counts: torch.Tensor) -> torch.Tensor:
    """The tiles of things that have so many each, int64 `[things]`: the thing and its tile, int32 `[tiles, 2]`."""
    firsts = counts.cumsum(0) - counts
    tiles = torch.arange(int(counts.sum()))
    # Not by `repeat_interleave`: however little there is to do, torch wakes all its threads for that, and with many
    # cores they spin for milliseconds.
    begins = torch.zeros(len(tiles) + 1, dtype=torch.int64).index_add_(0, firsts, torch.ones_like(firsts))
    things = begins[:-1].cumsum(0) - 1
    return torch.stack([things, tiles - firsts[things]], dim=1).to(torch.int32)


def jobs_of(transfer: Transfer, tiling: TransferTiling) -> Iterator[TransferJob]:
    """The jobs of a transfer of at least one element.

    Most pieces are whole rows in one run, and there may be very many: those take a shorter way.
    """
    piece, target, word_bytes = transfer.piece, transfer.target, transfer.word_bytes
    index = -1 if transfer.total is None else transfer.total
    tensor, full, box = piece.tensor, piece.full_shape, piece.box
    plain = tensor.is_contiguous() and (target is None or target.is_contiguous())
    if not plain or (box is not None and box.shape[1:] != full[1:]) or (box is not None and len(full) < 2):
        words = None if target is None else words_of(target)
        yield from _jobs(grid_of(piece, casts=transfer.casts), index, words, word_bytes, tiling)
        return
    rows = tensor.shape[0] if len(full) > 1 else 1
    cols = tensor.numel() // rows * (1 if transfer.casts else tensor.itemsize // word_bytes)
    goal = 0 if target is None else target.data_ptr()
    unaligned = (tensor.data_ptr() | goal | cols * word_bytes) % 16
    first_row = box.offset[0] if box is not None else 0
    goal_stride = cols if goal else 0
    yield TransferJob(
        address=tensor.data_ptr(),
        rows=rows,
        cols=cols,
        row_stride=cols,
        first_row=first_row,
        first_column=0,
        run=cols,
        run_stride=cols,
        total=index,
        kind=_kind(cols, unaligned),
        tile_rows=tiling.rows(cols),
        goal=goal,
        goal_stride=goal_stride,
    )


def _jobs(
    grid: Grid, index: int, target: torch.Tensor | None, word_bytes: int, tiling: TransferTiling
) -> Iterator[TransferJob]:
    """One row of `TransferPlan.jobs` for every part of a grid whose columns are evenly spaced runs of full columns."""
    words = grid.words
    levels = merge_levels(words.shape[1:], grid.column_strides)
    run = levels.pop()[0] if levels and levels[-1][1] == 1 else 1
    num_runs, run_stride = levels.pop() if levels else (1, run)
    rows, cols, row_stride = words.shape[0], num_runs * run, words.stride(0)
    goal, goal_stride = (0, 0) if target is None else (target.data_ptr(), target.stride(0))
    first = sum(at * stride for at, stride in zip(grid.column, grid.column_strides, strict=True))
    for number, outer in enumerate(itertools.product(*(range(size) for size, _ in levels))):
        behind = number * cols
        address = words.data_ptr() + behind * words.itemsize
        goal_address = goal + behind * word_bytes if goal else 0
        strides = (row_stride | goal_stride) * word_bytes * (rows > 1)
        unaligned = (address | goal_address | cols * word_bytes | strides) % 16
        column = first + sum(at * stride for at, (_, stride) in zip(outer, levels, strict=True))
        yield TransferJob(
            address=address,
            rows=rows,
            cols=cols,
            row_stride=row_stride,
            first_row=grid.row,
            first_column=column,
            run=run,
            run_stride=run_stride,
            total=index,
            kind=_kind(cols, unaligned),
            tile_rows=tiling.rows(cols),
            goal=goal_address,
            goal_stride=goal_stride,
        )


def _kind(cols: int, unaligned: int) -> int:
    """`TransferJob.kind`; `unaligned` is not 0 if a row on either side starts beside 16 bytes."""
    if cols < NARROW_COLS:
        return NARROW
    return WIDE if unaligned else ALIGNED


def kinds_of(jobs: torch.Tensor, word_bytes: int) -> torch.Tensor:
    """`TransferJob.kind` of each row of a `TransferPlan.jobs` whose other fields are right: int64 `[jobs]`.

    Rows of float32 that are cast begin at a multiple of 16 bytes where rows of the words would.
    """
    names = "address", "goal", "rows", "cols", "row_stride", "goal_stride"
    address, goal, rows, cols, row_stride, goal_stride = (jobs[:, TransferJob._fields.index(name)] for name in names)
    strides = (row_stride | goal_stride) * word_bytes * (rows > 1)
    unaligned = (address | goal | cols * word_bytes | strides) % 16
    kinds = torch.where(unaligned != 0, WIDE, ALIGNED)
    return torch.where(cols < NARROW_COLS, NARROW, kinds)
