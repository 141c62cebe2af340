# pyright: basic, reportMissingImports=false
"""The sums of `weightcast.digest.definition` on a CPU, and copies with sums: one call for any number of pieces.

numba compiles this file's functions for the processor that they run on. Like `weightcast.digest.kernel`, they see jobs
and tiles (`weightcast.digest.jobs`), not dtypes, names or digests. They hold no lock of Python's, so that several
threads can share the tiles of one call.

A tile walks down its rows, four at a time, from left to right, which is the order in which memory is read fastest: a
word costs a sign extension and one multiply-add with B(c), which stays in the cache; A(r) is multiplied once per row. A
row that has a target is copied just before it is summed, so that the second reading comes from the cache.

Importing this needs numba, and compiles nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

# numba logs every byte code that it compiles where the root logger is at DEBUG.
_log = logging.getLogger("numba")
if _log.level == logging.NOTSET:
    _log.setLevel(logging.INFO)

from llvmlite import ir  # noqa: E402
from numba import carray, int64, njit, types  # noqa: E402
from numba.extending import intrinsic  # noqa: E402

from weightcast.digest.coefficients import GOLDEN, MIX_1, MIX_2, SEED_A, SEED_B  # noqa: E402
from weightcast.digest.jobs import CPU_COLS  # noqa: E402

_GOLDEN, _MIX_1, _MIX_2 = np.uint64(GOLDEN), np.uint64(MIX_1), np.uint64(MIX_2)
_SEED_A, _SEED_B = np.uint64(SEED_A), np.uint64(SEED_B)
_27, _30, _31, _ONE = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(1)
_COLS = CPU_COLS


@intrinsic
def _pointer(typingctx, address, like):  # noqa: ANN001, ANN202
    """The address as a pointer to words of the dtype of the array `like`."""
    word = like.dtype

    def emit(context, builder, signature, arguments):  # noqa: ANN001, ANN202
        return builder.inttoptr(arguments[0], ir.IntType(word.bitwidth).as_pointer())

    return types.CPointer(word)(types.int64, like), emit


@njit(inline="always")
def _coefficient(index, seed):  # noqa: ANN001, ANN202
    x = np.uint64(index) + seed + _GOLDEN
    x = (x ^ (x >> _30)) * _MIX_1
    x = (x ^ (x >> _27)) * _MIX_2
    return np.int64((x ^ (x >> _31)) | _ONE)


@njit(inline="always")
def _set_columns(b, num, first, col, cols, run, run_stride):  # noqa: ANN001, ANN202
    """B of the columns `col` to `col + num - 1` of a job."""
    if run >= cols:
        for c in range(num):
            b[c] = _coefficient(first + col + c, _SEED_B)
        return
    done = 0
    while done < num:
        at = col + done
        inside = at % run
        size = min(run - inside, num - done)
        start = first + at // run * run_stride + inside
        part = b[done : done + size]
        for c in range(size):
            part[c] = _coefficient(start + c, _SEED_B)
        done += size


@njit(inline="always")
def _copy(address, goal, num, like):  # noqa: ANN001, ANN202
    source = carray(_pointer(address, like), num)
    target = carray(_pointer(goal, like), num)
    for c in range(num):
        target[c] = source[c]


@njit(inline="always")
def _sum_one(address, num, b, like):  # noqa: ANN001, ANN202
    w = carray(_pointer(address, like), num)
    s = int64(0)
    for c in range(num):
        s += int64(w[c]) * b[c]
    return s


@njit(inline="always")
def _sum_four(address, stride, num, b, row, like):  # noqa: ANN001, ANN202
    """Sum of word * B(column) * A(row) over four rows, `stride` bytes apart."""
    w0 = carray(_pointer(address, like), num)
    w1 = carray(_pointer(address + stride, like), num)
    w2 = carray(_pointer(address + 2 * stride, like), num)
    w3 = carray(_pointer(address + 3 * stride, like), num)
    s0 = s1 = s2 = s3 = int64(0)
    for c in range(num):
        coefficient = b[c]
        s0 += int64(w0[c]) * coefficient
        s1 += int64(w1[c]) * coefficient
        s2 += int64(w2[c]) * coefficient
        s3 += int64(w3[c]) * coefficient
    return (
        s0 * _coefficient(row, _SEED_A)
        + s1 * _coefficient(row + 1, _SEED_A)
        + s2 * _coefficient(row + 2, _SEED_A)
        + s3 * _coefficient(row + 3, _SEED_A)
    )


def _run_tiles(jobs, tiles, like, out, summed):  # noqa: ANN001, ANN202
    """Carries out some tiles.

    Args:
        jobs: `Plan.jobs`, int64 `[jobs, fields of Job]`.
        tiles: rows of `Plan.tiles`, int32 `[tiles, 2]`, cut by `CPU_TILING`.
        like: an array whose dtype is that of a word, int8 or int16.
        out: takes the sums, int64 `[count]`.
        summed: false for copies alone.
    """
    size = like.itemsize
    b = np.empty(_COLS, np.int64)
    # The columns that `b` has; most jobs of a model have the same.
    b_num, b_first, b_col, b_run, b_run_stride = int64(0), int64(0), int64(0), int64(0), int64(0)
    for number in range(tiles.shape[0]):
        job = jobs[tiles[number, 0]]
        tile = int64(tiles[number, 1])
        address, rows, cols, stride = job[0], job[1], job[2], job[3] * size
        first_row, first, run, run_stride, total = job[4], job[5], job[6], job[7], job[8]
        tile_rows, goal, goal_stride = job[10], job[11], job[12] * size
        # Down the rows first, so that tiles that follow each other have the same columns.
        row_tiles = (rows + tile_rows - 1) // tile_rows
        row, col = tile % row_tiles * tile_rows, tile // row_tiles * _COLS
        rows, num = min(rows - row, tile_rows), min(cols - col, _COLS)
        address += row * stride + col * size
        goal_address = goal + row * goal_stride + col * size
        row += first_row
        if total < 0 or not summed:
            if goal != 0:
                if stride == num * size and goal_stride == stride:
                    _copy(address, goal_address, rows * num, like)
                else:
                    for r in range(rows):
                        _copy(address + r * stride, goal_address + r * goal_stride, num, like)
            continue
        if num != b_num or first != b_first or col != b_col or run != b_run or run_stride != b_run_stride:
            _set_columns(b, num, first, col, cols, run, run_stride)
            b_num, b_first, b_col, b_run, b_run_stride = num, first, col, run, run_stride
        s = int64(0)
        fours = rows // 4 * 4
        for r in range(0, fours, 4):
            at = address + r * stride
            if goal != 0:
                for i in range(r, r + 4):
                    _copy(address + i * stride, goal_address + i * goal_stride, num, like)
            s += _sum_four(at, stride, num, b, row + r, like)
        for r in range(fours, rows):
            at = address + r * stride
            if goal != 0:
                _copy(at, goal_address + r * goal_stride, num, like)
            s += _sum_one(at, num, b, like) * _coefficient(row + r, _SEED_A)
        out[total] += s


def run_tiles(*, cached: bool) -> Callable[..., Any]:
    """The function that carries out tiles, which compiles itself when it is first called with a size of words.

    Args:
        cached: True for machine code that is kept in a folder of numba's: beside this file, or under the user's cache.

    Raises:
        RuntimeError: there is no folder in which it could be kept.
    """
    return njit(_run_tiles, nogil=True, error_model="numpy", cache=cached)
