# pyright: basic, reportMissingImports=false, reportIndexIssue=false
"""The sums of `weightcast.digest.definition` on CUDA, and copies with sums: one Triton launch for any number of pieces.

The host works out jobs and tiles (`weightcast.digest.jobs`), two small device tensors. `GpuLaunches` keeps them, so
that digesting memory that stays where it is costs a launch and no copy.

A program keeps one sum per column while it walks down its rows. A word costs a sign extension and two
multiply-adds; A(r) is computed once per row, B(c) once per column when the rows are done. No coefficients are read
from memory. Words of 8 and of 16 bits need one launch each. A job that has a target stores each word there as well, so
a copy is summed on the way at next to no cost. What lies on another GPU is copied by copy engines where that is
possible (`weightcast.digest.far_copies`), and summed when it has arrived.

Importing this needs Triton, which is why `weightcast.digest.definition` does so only for tensors on CUDA. The kernel
sees words, not dtypes, names or digests: only masters in float32 are read as such, and are words of bfloat16 then.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl

from weightcast.digest.coefficients import GOLDEN, MIX_1, MIX_2, SEED_A, SEED_B
from weightcast.digest.exchange import MemoryExchange
from weightcast.digest.far_copies import FarCopies, FarCopy, far_copy
from weightcast.digest.jobs import (
    ALIGNED,
    COLS,
    NARROW,
    TransferJob,
    TransferPlan,
    plans_of,
    plans_of_transfers,
    rows_of_runs,
)
from weightcast.digest.pieces import TensorPiece, Transfer, grid_of
from weightcast.digest.templates import Placed

_GOLDEN = tl.constexpr(GOLDEN)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)
_SEED_A = tl.constexpr(SEED_A)
_SEED_B = tl.constexpr(SEED_B)

_NUM_WARPS = 2
# Leaves room for 8 programs on a multiprocessor: 64 KiB of loads in flight.
_MAX_REGISTERS = 128
_FIELDS = tl.constexpr(len(TransferJob._fields))
_NARROW, _ALIGNED = tl.constexpr(NARROW), tl.constexpr(ALIGNED)


def partial_sums(pieces: Sequence[TensorPiece]) -> torch.Tensor:
    """As `weightcast.digest.definition.partial_sums`, for checked pieces that all lie on one CUDA device."""
    device = pieces[0].tensor.device
    with torch.cuda.device(device):
        grids = [rows_of_runs(grid_of(piece)) for piece in pieces]
        plans = tuple(plan.to(device) for plan in plans_of(grids))
        return _sums(plans, len(pieces), device)


def _sums(plans: Sequence[TransferPlan], count: int, device: torch.device) -> torch.Tensor:
    with torch.cuda.device(device):
        out = torch.zeros(count, dtype=torch.int64, device=device)
        for plan in plans:
            launch(plan, out)
        return out


class GpuLaunches:
    """Copies with sums that can be launched again and again, as long as all memory stays where it is."""

    small = False  # as that of ``CpuLaunches``: nothing looks at what is summed

    def __init__(self, transfers: Sequence[Transfer] | Placed, count: int, device: torch.device) -> None:
        """Works out the launches that give `count` sums, of transfers for which `can_transfer` is true.

        They are on one CUDA device; or a template of such ones, none of them far, with its addresses.
        """
        self._device = device
        self._count = count
        self._stream = torch.cuda.current_stream(device).cuda_stream
        near, copies, arrived = list[Transfer](), list[FarCopy](), list[Transfer]()
        for transfer in () if isinstance(transfers, Placed) else transfers:
            piece, target = transfer.piece, transfer.target
            moves = transfer.far and not transfer.casts  # copy engines do not cast
            copy = far_copy(piece.tensor, target) if moves and target is not None else None
            if copy is None or target is None:
                near.append(transfer)
                continue
            copies.append(copy)
            if transfer.total is not None:
                arrived.append(Transfer(piece=replace(piece, tensor=target), total=transfer.total))
        self._copies = FarCopies(copies, device)
        with torch.cuda.device(device):
            plans = transfers.plans() if isinstance(transfers, Placed) else plans_of_transfers(near)
            self._plans = tuple(plan.to(device) for plan in plans)
            self._plans_of_arrived = tuple(plan.to(device) for plan in plans_of_transfers(arrived))

    def launch(self, *, summed: bool = True) -> torch.Tensor | None:
        """The sums, int64 `[count]`, `summed` or not; None on another stream, which the plans may not have reached."""
        if torch.cuda.current_stream(self._device).cuda_stream != self._stream:
            return None
        if not self._copies:
            return _sums(self._plans, self._count, self._device)
        self._copies.begin()
        sums = _sums(self._plans, self._count, self._device)
        self._copies.end()
        return sums + _sums(self._plans_of_arrived, self._count, self._device)


def compile_all(device: torch.device) -> None:
    """Compile every variant of the kernel for a CUDA device, or load it from Triton's cache on disk."""
    for dtype in (torch.int8, torch.int16):
        words = torch.zeros(64, dtype=dtype, device=device)
        piece = TensorPiece(tensor=words, full_shape=tuple(words.shape))
        for target in (None, torch.empty_like(words)):
            GpuLaunches([Transfer(piece=piece, target=target, total=0)], 1, device).launch()
    masters = TensorPiece(tensor=torch.zeros(64, device=device), full_shape=(64,))
    for target in (None, torch.empty(64, dtype=torch.bfloat16, device=device)):
        GpuLaunches([Transfer(piece=masters, target=target, total=0, casts=True)], 1, device).launch()
    one, other = torch.zeros(2, 16, dtype=torch.uint8, device=device)
    MemoryExchange([(one, other)]).run()


def launch(plan: TransferPlan, out: torch.Tensor) -> None:
    """Add the plan's sums to `out`, int64, on the current stream of the current device."""
    _sum_tiles[(len(plan.tiles),)](
        plan.jobs,
        plan.tiles,
        out,
        WORD=tl.int8 if plan.word_bytes == 1 else tl.int16,
        COLS=COLS,
        CASTS=plan.casts,
        COPIES=plan.copies,
        FUSED=isinstance(_sum_tiles, triton.JITFunction),  # not in Triton's interpreter, which runs no assembly
        num_warps=_NUM_WARPS,
        num_stages=1,
        maxnreg=_MAX_REGISTERS,
    )


@triton.jit
def _coefficient(index, SEED: tl.constexpr):
    x = index.to(tl.uint64) + SEED + _GOLDEN
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return ((x ^ (x >> 31)) | 1).to(tl.int64)


@triton.jit
def _column(index, first, cols, run, run_stride):
    """The full tensor's column of column `index` of the job."""
    column = index
    if run < cols:
        column = index // run * run_stride + index % run
    return first + column


@triton.jit
def _add_row(low, high, word, row, FUSED: tl.constexpr):
    """Add word * A(row): a word times a 64-bit number, as one 32 x 32 -> 64 bit product and one of 32 bits."""
    a = _coefficient(row, _SEED_A)
    a_low = a.to(tl.int32)
    a_high = ((a - a_low.to(tl.int64)) >> 32).to(tl.int32)
    if FUSED:
        # Written out, the compiler makes a 64 x 64 bit product of it.
        low = tl.inline_asm_elementwise(
            "mad.wide.s32 $0, $1, $2, $3;", "=l,r,r,l", [word, a_low, low], dtype=tl.int64, is_pure=True, pack=1
        )
    else:
        low += word.to(tl.int64) * a_low.to(tl.int64)
    return low, high + word * a_high


@triton.jit
def _load_word(places, mask):
    """Words; a float32 is cast to bfloat16, whose bits are one word."""
    word = tl.load(places, mask=mask, other=0)
    if word.dtype == tl.float32:
        word = word.to(tl.bfloat16).to(tl.int16, bitcast=True)
    return word


@triton.jit
def _load_row(words, stride, row, rows, cols, COLS: tl.constexpr, VECTOR: tl.constexpr):
    offsets = tl.arange(0, COLS)
    places = words + row * stride + offsets
    mask = (offsets < cols) & (row < rows)
    if VECTOR > 1:
        places = tl.max_contiguous(tl.multiple_of(places, 16), VECTOR)
        mask = tl.max_constancy(mask, VECTOR)
    return _load_word(places, mask)


@triton.jit
def _store_row(words, stride, row, rows, cols, value, COLS: tl.constexpr, VECTOR: tl.constexpr):
    offsets = tl.arange(0, COLS)
    places = words + row * stride + offsets
    mask = (offsets < cols) & (row < rows)
    if VECTOR > 1:
        places = tl.max_contiguous(tl.multiple_of(places, 16), VECTOR)
        mask = tl.max_constancy(mask, VECTOR)
    tl.store(places, value, mask=mask)


@triton.jit
def _sum_down(
    words,
    rows,
    cols,
    stride,
    first_row,
    goal,
    goal_rows,
    goal_stride,
    COLS: tl.constexpr,
    VECTOR: tl.constexpr,
    COPIES: tl.constexpr,
    FUSED: tl.constexpr,
):
    """Sum over rows of word * A(row) for each of COLS columns, int64 [COLS]; the first `goal_rows` are copied.

    VECTOR is a promise: every row starts at a multiple of 16 bytes, and `cols` is a multiple of VECTOR words.
    """
    low = tl.zeros([COLS], tl.int64)
    high = tl.zeros([COLS], tl.int32)
    for row in range(0, rows, 8):
        # All loads before the first store: the compiler does not know that they are of other memory.
        w0 = _load_row(words, stride, row, rows, cols, COLS, VECTOR)
        w1 = _load_row(words, stride, row + 1, rows, cols, COLS, VECTOR)
        w2 = _load_row(words, stride, row + 2, rows, cols, COLS, VECTOR)
        w3 = _load_row(words, stride, row + 3, rows, cols, COLS, VECTOR)
        w4 = _load_row(words, stride, row + 4, rows, cols, COLS, VECTOR)
        w5 = _load_row(words, stride, row + 5, rows, cols, COLS, VECTOR)
        w6 = _load_row(words, stride, row + 6, rows, cols, COLS, VECTOR)
        w7 = _load_row(words, stride, row + 7, rows, cols, COLS, VECTOR)
        if COPIES:
            _store_row(goal, goal_stride, row, goal_rows, cols, w0, COLS, VECTOR)
            _store_row(goal, goal_stride, row + 1, goal_rows, cols, w1, COLS, VECTOR)
            _store_row(goal, goal_stride, row + 2, goal_rows, cols, w2, COLS, VECTOR)
            _store_row(goal, goal_stride, row + 3, goal_rows, cols, w3, COLS, VECTOR)
            _store_row(goal, goal_stride, row + 4, goal_rows, cols, w4, COLS, VECTOR)
            _store_row(goal, goal_stride, row + 5, goal_rows, cols, w5, COLS, VECTOR)
            _store_row(goal, goal_stride, row + 6, goal_rows, cols, w6, COLS, VECTOR)
            _store_row(goal, goal_stride, row + 7, goal_rows, cols, w7, COLS, VECTOR)
        low, high = _add_row(low, high, w0.to(tl.int32), first_row + row, FUSED)
        low, high = _add_row(low, high, w1.to(tl.int32), first_row + row + 1, FUSED)
        low, high = _add_row(low, high, w2.to(tl.int32), first_row + row + 2, FUSED)
        low, high = _add_row(low, high, w3.to(tl.int32), first_row + row + 3, FUSED)
        low, high = _add_row(low, high, w4.to(tl.int32), first_row + row + 4, FUSED)
        low, high = _add_row(low, high, w5.to(tl.int32), first_row + row + 5, FUSED)
        low, high = _add_row(low, high, w6.to(tl.int32), first_row + row + 6, FUSED)
        low, high = _add_row(low, high, w7.to(tl.int32), first_row + row + 7, FUSED)
    return low + (high.to(tl.int64) << 32)


@triton.jit
def _sum_narrow(
    words,
    rows,
    cols,
    row_stride,
    first_row,
    first_col,
    run,
    run_stride,
    goal,
    goal_rows,
    goal_stride,
    WORDS: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Sum of word * A(row) * B(column) over a few columns: one word per lane, both coefficients computed for each."""
    offsets = tl.arange(0, WORDS)
    sums = tl.zeros([WORDS], tl.int64)
    num_cols = cols.to(tl.int32)
    num_words = rows.to(tl.int32) * num_cols
    for at in range(0, num_words, WORDS):
        row = (at + offsets) // num_cols
        col = (at + offsets) % num_cols
        inside = at + offsets < num_words
        word = _load_word(words + row * row_stride + col, inside)
        if COPIES:
            tl.store(goal + row * goal_stride + col, word, mask=inside & (row < goal_rows))
        a = _coefficient(first_row + row, _SEED_A)
        b = _coefficient(_column(col.to(tl.int64), first_col, cols, run, run_stride), _SEED_B)
        sums += word.to(tl.int64) * a * b
    return tl.sum(sums)


@triton.jit
def _sum_tiles(
    jobs,
    tiles,
    out,
    WORD: tl.constexpr,
    COLS: tl.constexpr,
    CASTS: tl.constexpr,
    COPIES: tl.constexpr,
    FUSED: tl.constexpr,
):
    READ: tl.constexpr = tl.float32 if CASTS else WORD
    program = tl.program_id(0)
    tile = tl.load(tiles + 2 * program + 1).to(tl.int64)
    job = jobs + tl.load(tiles + 2 * program) * _FIELDS
    address = tl.load(job)  # the fields of TransferJob, in order
    rows = tl.load(job + 1)
    cols = tl.load(job + 2)
    row_stride = tl.load(job + 3)
    first_row = tl.load(job + 4)
    first_col = tl.load(job + 5)
    run = tl.load(job + 6)
    run_stride = tl.load(job + 7)
    index = tl.load(job + 8)
    kind = tl.load(job + 9)
    tile_rows = tl.load(job + 10)
    target = tl.load(job + 11)
    goal_stride = tl.load(job + 12)

    col_tiles = (cols + COLS - 1) // COLS
    row = tile // col_tiles * tile_rows
    col = tile % col_tiles * COLS
    rows = tl.minimum(rows - row, tile_rows)
    start = address.to(tl.pointer_type(READ)) + row * row_stride + col
    goal = target.to(tl.pointer_type(WORD)) + row * goal_stride + col
    goal_rows = tl.where(target != 0, rows, 0)
    first_row += row

    if kind == _NARROW:
        total = _sum_narrow(
            start,
            rows,
            cols,
            row_stride,
            first_row,
            first_col,
            run,
            run_stride,
            goal,
            goal_rows,
            goal_stride,
            COLS // 2,
            COPIES,
        )
    else:
        left = cols - col
        if kind == _ALIGNED:
            vector: tl.constexpr = 128 // WORD.primitive_bitwidth
            sums = _sum_down(
                start, rows, left, row_stride, first_row, goal, goal_rows, goal_stride, COLS, vector, COPIES, FUSED
            )
        else:
            sums = _sum_down(
                start, rows, left, row_stride, first_row, goal, goal_rows, goal_stride, COLS, 1, COPIES, FUSED
            )
        column = _column(col + tl.arange(0, COLS), first_col, cols, run, run_stride)
        total = tl.sum(sums * _coefficient(column, _SEED_B))
    if index >= 0:
        tl.atomic_add(out + index, total, sem="relaxed")
