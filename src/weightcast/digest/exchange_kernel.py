# pyright: basic, reportMissingImports=false, reportIndexIssue=false
"""The launch of `weightcast.digest.exchange` on CUDA.  Importing this needs Triton."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from weightcast.digest.jobs import numbered_tiles

_TILE_BYTES = 1 << 14
_STEP_BYTES = 1 << 12  # with larger steps an H100 exchanges at less than half of the rate
_ODD_STEP_BYTES = 1 << 10  # of memory that does not start at a multiple of 16 bytes
_NUM_WARPS = 4


class Launch:
    """One launch that exchanges all pairs, given two addresses and the size in bytes of each."""

    def __init__(self, pairs: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        table = torch.tensor(pairs, dtype=torch.int64)
        counts = (table[:, 2] + _TILE_BYTES - 1) // _TILE_BYTES
        self._device = device
        with torch.cuda.device(device):
            self._pairs, self._tiles = table.to(device), numbered_tiles(counts).to(device)
            torch.cuda.current_stream().synchronize()  # `run` may be called on another stream

    def run(self) -> None:
        """Enqueues the launch on the current stream."""
        with torch.cuda.device(self._device):
            exchange_tiles(self._pairs, self._tiles)


def exchange_tiles(pairs: torch.Tensor, tiles: torch.Tensor) -> None:
    """Launches the kernel. `pairs`: int64 `[pairs, 3]`. `tiles`: int32 `[tiles, 2]`, a pair and a tile of it."""
    if len(tiles):
        _exchange_tiles[(len(tiles),)](
            pairs, tiles, TILE=_TILE_BYTES, STEP=_STEP_BYTES, ODD_STEP=_ODD_STEP_BYTES, num_warps=_NUM_WARPS
        )


@triton.jit
def _exchange(one, other, count, WORD: tl.constexpr, COUNT: tl.constexpr, VECTOR: tl.constexpr):
    offsets = tl.arange(0, COUNT)
    ones = one.to(tl.pointer_type(WORD)) + offsets
    others = other.to(tl.pointer_type(WORD)) + offsets
    mask = offsets < count
    if VECTOR > 1:
        ones = tl.max_contiguous(tl.multiple_of(ones, 16), VECTOR)
        others = tl.max_contiguous(tl.multiple_of(others, 16), VECTOR)
        mask = tl.max_constancy(mask, VECTOR)
    a = tl.load(ones, mask=mask)
    b = tl.load(others, mask=mask)
    tl.store(ones, b, mask=mask)
    tl.store(others, a, mask=mask)


@triton.jit
def _exchange_tiles(pairs, tiles, TILE: tl.constexpr, STEP: tl.constexpr, ODD_STEP: tl.constexpr):
    program = tl.program_id(0)
    pair = pairs + tl.load(tiles + 2 * program).to(tl.int64) * 3
    start = tl.load(tiles + 2 * program + 1).to(tl.int64) * TILE
    one = tl.load(pair) + start
    other = tl.load(pair + 1) + start
    left = tl.minimum(tl.load(pair + 2) - start, TILE)
    if (one | other | left) % 16 == 0:
        for at in range(0, left, STEP):
            _exchange(one + at, other + at, (left - at) // 8, tl.int64, STEP // 8, 2)
    else:
        for at in range(0, left, ODD_STEP):
            _exchange(one + at, other + at, left - at, tl.int8, ODD_STEP, 1)
