# An intrinsic of numba is called without its first argument.
# pyright: basic, reportMissingImports=false, reportCallIssue=false, reportPrivateImportUsage=false
"""The sums of `weightcast.digest.definition` on a CPU, and copies with sums: one call for any number of pieces.

numba compiles this file's functions for the processor that they run on. Like `weightcast.digest.kernel`, they see jobs
and tiles (`weightcast.digest.jobs`), not dtypes, names or digests. They hold no lock of Python's, so that several
threads can share the tiles of one call.

A word costs a sign extension and one multiply-add. Tiles are read from left to right, eight rows at a time: words are
multiplied with B(c), which stays in the cache, and their sum with A(r). The eight rows lie an eighth of the tile apart,
so memory is read in eight long runs, which the processor fetches ahead. With adjacent rows it does so only for rows of
many KiB: 1,152 words were summed at half the speed. Rows that have a target are copied a few words at a time, right
after these are summed, by stores that pass the cache by. The processor writes one part while it sums the next, and
reads no line of the target. Rows whose target does not begin with a line of the cache are adjacent instead, and copied
before they are summed. Narrow tiles keep one sum per column while they walk down eight rows at a time.

Importing this needs numba, and compiles nothing. numba keeps machine code under the hash of this file alone: what other
files may change must come as an argument.
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
from numba.core import cgutils  # noqa: E402
from numba.extending import intrinsic  # noqa: E402

from weightcast.digest.coefficients import GOLDEN, MIX_1, MIX_2, SEED_A, SEED_B  # noqa: E402

_GOLDEN, _MIX_1, _MIX_2 = np.uint64(GOLDEN), np.uint64(MIX_1), np.uint64(MIX_2)
_SEED_A, _SEED_B = np.uint64(SEED_A), np.uint64(SEED_B)
_27, _30, _31, _ONE = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(1)
_HALF, _ONE_32, _BELOW_TIE = np.uint32(16), np.uint32(1), np.uint32(0x7FFF)
_MAGNITUDE, _INFINITE = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
# Tiles of at most so many columns are narrow. Their rows are taken so many at a time.
_NARROW, _ROWS = 1 << 6, 1 << 8
# Words of each of eight rows that are summed before they are copied: as many lines as a processor holds to be written.
_STREAMED = 1 << 8


@intrinsic
def _pointer(typingctx, address, like):
    """The address as a pointer to words of the dtype of the array `like`."""
    word = like.dtype

    def emit(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(word.bitwidth).as_pointer())

    return types.CPointer(word)(types.int64, like), emit


@njit
def _coefficient(index, seed):
    x = np.uint64(index) + seed + _GOLDEN
    x = (x ^ (x >> _30)) * _MIX_1
    x = (x ^ (x >> _27)) * _MIX_2
    return np.int64((x ^ (x >> _31)) | _ONE)


@njit
def _set_columns(b, num, first, col, cols, run, run_stride):
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


@intrinsic
def _copy_bytes(typingctx, goal, address, size_bytes):
    """C's memcpy."""

    def emit(context, builder, signature, arguments):
        goal, address, size_bytes = arguments
        byte = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(builder, builder.inttoptr(goal, byte), builder.inttoptr(address, byte), size_bytes, 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def _stream_line(typingctx, goal, address):
    """Copies 64 bytes past the cache; `goal` is a multiple of 64."""

    def emit(context, builder, signature, arguments):
        goal, address = (builder.inttoptr(at, ir.VectorType(ir.IntType(64), 8).as_pointer()) for at in arguments)
        store = builder.store(builder.load(address, align=1), goal, align=64)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def _fence(typingctx):
    """Waits for `_stream_line`: whoever sees what is written after this sees those lines too."""

    def emit(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


@njit
def _stream(goal, address, size_bytes):
    lines = size_bytes & ~63
    for at in range(0, lines, 64):
        _stream_line(goal + at, address + at)
    if lines < size_bytes:
        _copy_bytes(goal + lines, address + lines, size_bytes - lines)


@njit
def _copy_rows(address, stride, goal, goal_stride, rows, num, like):
    """Copies rows of `num` words; `stride` and `goal_stride` are in bytes. Without a goal it does nothing."""
    if goal == 0:
        return
    size = num * like.itemsize
    if stride == size and goal_stride == size:
        _copy_bytes(goal, address, rows * size)
        return
    for r in range(rows):
        _copy_bytes(goal + r * goal_stride, address + r * stride, size)


@njit
def _sum_one(address, num, b, like):
    w = carray(_pointer(address, like), num)
    s = int64(0)
    for c in range(num):
        s += int64(w[c]) * b[c]
    return s


@njit
def _sum_across(address, stride, goal, goal_stride, rows, num, row, b, like):
    """Sum of word * B(column) * A(row) of a tile, and its copy."""
    total = int64(0)
    eighth, size = rows // 8, like.itemsize
    streams = goal != 0 and (goal | goal_stride) & 63 == 0
    apart, step = (eighth, 1) if streams or goal == 0 else (1, 8)
    far, goal_far = apart * stride, apart * goal_stride
    width = _STREAMED if streams else num
    for r in range(0, eighth * step, step):
        if not streams:
            _copy_rows(address + r * stride, far, goal + r * goal_stride, goal_far, 8, num, like)
        s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = int64(0)
        for col in range(0, num, width):
            some = min(width, num - col)
            at, part = address + r * stride + col * size, b[col : col + some]
            w0 = carray(_pointer(at, like), some)
            w1 = carray(_pointer(at + far, like), some)
            w2 = carray(_pointer(at + 2 * far, like), some)
            w3 = carray(_pointer(at + 3 * far, like), some)
            w4 = carray(_pointer(at + 4 * far, like), some)
            w5 = carray(_pointer(at + 5 * far, like), some)
            w6 = carray(_pointer(at + 6 * far, like), some)
            w7 = carray(_pointer(at + 7 * far, like), some)
            for c in range(some):
                coefficient = part[c]
                s0 += int64(w0[c]) * coefficient
                s1 += int64(w1[c]) * coefficient
                s2 += int64(w2[c]) * coefficient
                s3 += int64(w3[c]) * coefficient
                s4 += int64(w4[c]) * coefficient
                s5 += int64(w5[c]) * coefficient
                s6 += int64(w6[c]) * coefficient
                s7 += int64(w7[c]) * coefficient
            if streams:
                for number in range(8):
                    _stream(goal + r * goal_stride + number * goal_far + col * size, at + number * far, some * size)
        first = row + r
        total += s0 * _coefficient(first, _SEED_A) + s1 * _coefficient(first + apart, _SEED_A)
        total += s2 * _coefficient(first + 2 * apart, _SEED_A) + s3 * _coefficient(first + 3 * apart, _SEED_A)
        total += s4 * _coefficient(first + 4 * apart, _SEED_A) + s5 * _coefficient(first + 5 * apart, _SEED_A)
        total += s6 * _coefficient(first + 6 * apart, _SEED_A) + s7 * _coefficient(first + 7 * apart, _SEED_A)
    for r in range(8 * eighth, rows):
        at = address + r * stride
        _copy_rows(at, stride, goal + r * goal_stride, goal_stride, 1, num, like)
        total += _sum_one(at, num, b, like) * _coefficient(row + r, _SEED_A)
    return total


@njit
def _sum_down(address, stride, goal, goal_stride, rows, num, row, a, sums, b, like):
    """The same of a narrow tile. `a` and `sums` are scratch memory."""
    for c in range(num):
        sums[c] = 0
    for first in range(0, rows, len(a)):
        some = min(len(a), rows - first)
        _copy_rows(address + first * stride, stride, goal + first * goal_stride, goal_stride, some, num, like)
        for r in range(some):
            a[r] = _coefficient(row + first + r, _SEED_A)
        eights = some // 8 * 8
        for r in range(0, eights, 8):
            at = address + (first + r) * stride
            w0 = carray(_pointer(at, like), num)
            w1 = carray(_pointer(at + stride, like), num)
            w2 = carray(_pointer(at + 2 * stride, like), num)
            w3 = carray(_pointer(at + 3 * stride, like), num)
            w4 = carray(_pointer(at + 4 * stride, like), num)
            w5 = carray(_pointer(at + 5 * stride, like), num)
            w6 = carray(_pointer(at + 6 * stride, like), num)
            w7 = carray(_pointer(at + 7 * stride, like), num)
            a0, a1, a2, a3, a4, a5, a6, a7 = a[r], a[r + 1], a[r + 2], a[r + 3], a[r + 4], a[r + 5], a[r + 6], a[r + 7]
            for c in range(num):
                s = int64(w0[c]) * a0 + int64(w1[c]) * a1 + int64(w2[c]) * a2 + int64(w3[c]) * a3
                s += int64(w4[c]) * a4 + int64(w5[c]) * a5 + int64(w6[c]) * a6 + int64(w7[c]) * a7
                sums[c] += s
        for r in range(eights, some):
            w0 = carray(_pointer(address + (first + r) * stride, like), num)
            for c in range(num):
                sums[c] += int64(w0[c]) * a[r]
    total = int64(0)
    for c in range(num):
        total += sums[c] * b[c]
    return total


@njit
def _cast_rows(address, stride, rows, num, words, nan, wide):
    """Writes float32 as bfloat16 to `words`, without gaps: rounded to nearest, ties to even. `wide` is of uint32.

    All steps are of 32 bits: numba's are of 64 unless told so, which takes twice the time.
    """
    for r in range(rows):
        values = carray(_pointer(address + r * stride, wide), num)
        row = words[r * num : (r + 1) * num]
        for c in range(num):
            x = values[c]
            odd = np.uint32((x >> _HALF) & _ONE_32)
            high = np.uint16(np.uint32(np.uint32(x + _BELOW_TIE) + odd) >> _HALF)
            row[c] = np.int16(nan) if np.uint32(x & _MAGNITUDE) > _INFINITE else np.int16(high)


@njit
def _large(address, stride, rows, num, wide, like):
    """1 if a word of a tile has all bits of 0x7C00, else 0. `wide` is an array of int64, which is four words."""
    found, fours = int64(0), num // 4
    for r in range(rows):
        at = address + r * stride
        four = carray(_pointer(at, wide), fours)
        for c in range(fours):
            found |= (four[c] & 0x7C007C007C007C00) + 0x0400040004000400
        rest = carray(_pointer(at + 8 * fours, like), num - 4 * fours)
        for c in range(len(rest)):
            found |= (int64(rest[c]) & 0x7C00) + 0x0400
    return int64(found & -0x7FFF7FFF7FFF8000 != 0)


def _run_tiles(jobs, tiles, tile_cols, like, out, summed, looks, words, nan):
    """Carries out some tiles: rows of `TransferPlan.tiles`, of `tile_cols` columns.

    `like` is an array whose dtype is that of a word, int8 or int16; `out` takes the sums, int64 `[count]`.
    With `looks` it has one more place, for the number of tiles that were summed and are `_large`; words of 8 bits are.
    If `words` has room for a tile, int16, jobs read float32, which is cast into it: it is summed and copied from there
    while it is in the cache. `nan` is what becomes of a NaN.
    """
    size = like.itemsize
    casts, wide = len(words) > 0, np.empty(0, np.uint32)
    read_size = 4 if casts else size
    b, a, sums = np.empty(tile_cols, np.int64), np.empty(_ROWS, np.int64), np.empty(_NARROW, np.int64)
    # The columns that `b` has; most jobs of a model have the same.
    b_num, b_first, b_col, b_run, b_run_stride = int64(0), int64(0), int64(0), int64(0), int64(0)
    for number in range(tiles.shape[0]):
        job = jobs[tiles[number, 0]]  # the fields of Job, in order
        tile = int64(tiles[number, 1])
        address, rows, cols, stride = job[0], job[1], job[2], job[3] * read_size
        first_row, first, run, run_stride, index = job[4], job[5], job[6], job[7], job[8]
        tile_rows, goal, goal_stride = job[10], job[11], job[12] * size
        # Down the rows first, so that tiles that follow each other have the same columns.
        row_tiles = (rows + tile_rows - 1) // tile_rows
        row, col = tile % row_tiles * tile_rows, tile // row_tiles * tile_cols
        rows, num = min(rows - row, tile_rows), min(cols - col, tile_cols)
        address += row * stride + col * read_size
        if casts:
            _cast_rows(address, stride, rows, num, words, nan, wide)
            address, stride = int64(words.ctypes.data), num * size
        if goal != 0:
            goal += row * goal_stride + col * size
        else:
            goal_stride = int64(0)
        if index < 0 or not summed:
            _copy_rows(address, stride, goal, goal_stride, rows, num, like)
            continue
        if num != b_num or first != b_first or col != b_col or run != b_run or run_stride != b_run_stride:
            _set_columns(b, num, first, col, cols, run, run_stride)
            b_num, b_first, b_col, b_run, b_run_stride = num, first, col, run, run_stride
        row += first_row
        if num > _NARROW or rows < 8:
            out[index] += _sum_across(address, stride, goal, goal_stride, rows, num, row, b, like)
        else:
            out[index] += _sum_down(address, stride, goal, goal_stride, rows, num, row, a, sums, b, like)
        if looks:  # while it is in the cache
            out[-1] += _large(address, stride, rows, num, b, like) if size == 2 else 1
    _fence()


def run_tiles(*, cached: bool) -> Callable[..., Any]:
    """The function that carries out tiles, which compiles itself when it is first called with a size of words.

    With `cached`, machine code is kept beside this file or under the user's cache; RuntimeError if that is impossible.
    """
    return njit(_run_tiles, nogil=True, error_model="numpy", cache=cached)
