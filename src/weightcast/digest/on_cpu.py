"""Runs the plans of `weightcast.digest.jobs` on a CPU, where numba is installed (`weightcast[cpu]`).

Without numba, and for memory that is not rows of runs, `weightcast.digest.definition` sums with torch, several times
slower and with the same result.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from weightcast.digest.coefficients import A, B
from weightcast.digest.jobs import (
    CPU_COLS,
    CPU_TILING,
    CPU_WORDS,
    TransferJob,
    TransferPlan,
    is_rows_of_runs,
    plans_of_transfers,
)
from weightcast.digest.pieces import TensorPiece, Transfer, words_of
from weightcast.digest.templates import Placed

_log = logging.getLogger(__name__)

# Below this a second thread would take longer to wake up than it saves.
_BYTES_OF_A_THREAD = 2 << 20

# Below this, torch is done before numba has been imported.
_BYTES_OF_A_START = 64 << 20

_RunTiles = Callable[..., None]


def available() -> bool:
    """True if the compiled sums can be used. The first call imports numba and compiles, or loads what it kept."""
    return _kernel() is not None


def prepare(size_bytes: int) -> None:
    """Loads the compiled sums if models of this size use them, so that processes forked later have them."""
    if size_bytes >= _BYTES_OF_A_START:
        available()


class CpuLaunches:
    """Copies with sums that can run again, as long as all memory stays where it is.  It keeps no memory alive.

    `small` is true if the last launch looked at what it summed, and if no word of it, of 16 bits, has all bits of
    0x7C00.  Then 16-bit floats in it are finite.
    """

    def __init__(self, transfers: Sequence[Transfer] | Placed, count: int, *, looks: bool = False) -> None:
        """Works out the jobs of transfers on the CPU, for each of which `can_transfer` is true."""
        self.small = False
        self._count, self._looks = count, looks
        placed = isinstance(transfers, Placed)
        plans = transfers.plans() if placed else plans_of_transfers(transfers, CPU_TILING)
        self._parts = [_CpuTables(plan) for plan in plans]

    def launch(self, *, summed: bool = True) -> torch.Tensor:
        """Copies, and sums if `summed`; done when it returns the sums, int64 `[count]`, to be read mod 2**64."""
        run = _kernel()
        assert run is not None, "available() comes first"
        looks = self._looks and summed
        out = torch.zeros(self._count + looks, dtype=torch.int64)
        for part in self._parts:
            part.run(run, out, summed, looks)
        self.small = looks and not out[-1]
        return out[: self._count]


def takes(piece: TensorPiece) -> bool:
    """True for a checked piece on the CPU that `sums_of` can sum: rows of adjacent bytes, as they lie."""
    tensor = piece.tensor
    if tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.is_contiguous() or is_rows_of_runs(words_of(tensor))


def worth_it(size_bytes: int) -> bool:
    """True if `sums_of` can be used for this many bytes and is the faster way, its start included."""
    return available() if size_bytes >= _BYTES_OF_A_START else _found is not None and _found[0] is not None


def sums_of(pieces: Sequence[TensorPiece]) -> CpuLaunches:
    """The sums of some pieces, one for each, for which `takes` is true."""
    return CpuLaunches([Transfer(piece=piece, total=number) for number, piece in enumerate(pieces)], len(pieces))


class _CpuTables:
    """The tables of one plan, as numba takes them."""

    def __init__(self, plan: TransferPlan) -> None:
        self._jobs = plan.jobs.numpy()
        self._tiles = plan.tiles.numpy()
        self._like = torch.empty(0, dtype=torch.int8 if plan.word_bytes == 1 else torch.int16).numpy()
        self._casts = plan.casts
        rows, cols, tile_rows = (
            plan.jobs[:, TransferJob._fields.index(name)] for name in ("rows", "cols", "tile_rows")
        )
        sizes = (rows.clamp(max=tile_rows) * cols.clamp(max=CPU_COLS) * plan.word_bytes)[plan.tiles[:, 0].long()]
        self._ends = sizes.cumsum(0)

    def run(self, run: _RunTiles, out: torch.Tensor, summed: bool, looks: bool = False) -> None:
        size = int(self._ends[-1])
        threads = min(torch.get_num_threads(), size // _BYTES_OF_A_THREAD, len(self._tiles))
        if threads < 2:
            run(self._jobs, self._tiles, CPU_TILING.cols, self._like, out.numpy(), summed, looks, *self._cast())
            return
        # Spans of about the same number of bytes.
        marks = torch.arange(1, threads) * (size // threads)
        cuts = [0, *torch.searchsorted(self._ends, marks).tolist(), len(self._tiles)]
        outs = torch.zeros(threads, len(out), dtype=torch.int64)
        spans = [
            (self._jobs, self._tiles[start:end], CPU_TILING.cols, self._like, one.numpy(), summed, looks, *self._cast())
            for start, end, one in zip(cuts[:-1], cuts[1:], outs, strict=True)
        ]
        others = [_threads().submit(run, *span) for span in spans[1:]]
        try:
            run(*spans[0])
        finally:
            for other in others:
                other.result()
        out += outs.sum(0)

    def _cast(self) -> tuple[object, int]:
        """Memory for the words of a tile that is cast, none if nothing is; and torch's bfloat16 of a NaN."""
        words = torch.empty(CPU_WORDS if self._casts else 0, dtype=torch.int16)
        # Which NaN torch makes depends on its instructions, and it casts too where no launch is worth it.
        nan = torch.full((64,), math.nan).to(torch.bfloat16).view(torch.int16)[0]
        return words.numpy(), int(nan)


_lock = threading.Lock()
_found: tuple[_RunTiles | None] | None = None
_pool: ThreadPoolExecutor | None = None


def _kernel() -> _RunTiles | None:
    global _found
    if _found is None:
        with _lock:
            if _found is None:
                _found = (_compiled(),)
    return _found[0]


def _compiled() -> _RunTiles | None:
    try:
        from weightcast.digest.cpu_kernel import run_tiles
    except ImportError as error:
        _log.info("digests on the CPU are summed by torch, which is slower: %s; install weightcast[cpu]", error)
        return None
    for cached in (True, False):
        try:
            run = run_tiles(cached=cached)
            _check(run)
        except Exception as error:  # noqa: BLE001  a cut file makes numba raise whatever its decoders raise
            if not cached:
                _log.warning(
                    "digests on the CPU are summed by torch, which is slower: %s: %s", type(error).__name__, error
                )
                return None
            _log.info("numba compiles at every start, because it cannot keep machine code: %r", error)
        else:
            return run
    return None


def _check(run: _RunTiles) -> None:
    """Compiles for words of 16 bits, which nearly all weights have, and compares a sum with the definition.

    It raises RuntimeError if the sum is another.  Those of 8 bits are compiled when they are first needed.
    """
    rows, cols = 9, 96  # rows of whole lines of the cache, as nearly all weights have
    words = torch.arange(rows * cols, dtype=torch.int16).mul_(12345).view(rows, cols)
    goal, out = torch.zeros_like(words), torch.zeros(1, dtype=torch.int64)
    piece = TensorPiece(tensor=words, full_shape=(rows, cols))
    for plan in plans_of_transfers([Transfer(piece=piece, target=goal, total=0)], CPU_TILING):
        _CpuTables(plan).run(run, out, True)
    a, b = A.span(0, rows), B.span(0, cols)
    if int(out) != int((words.to(torch.int64) * a[:, None] * b).sum()) or not torch.equal(words, goal):
        raise RuntimeError("its machine code sums another digest than the definition's")


def _threads() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="weightcast-sums")
        return _pool


def _after_fork() -> None:
    """A forked process has none of its parent's threads, and may have a lock that one of them held."""
    global _lock, _pool
    _lock, _pool = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork)
