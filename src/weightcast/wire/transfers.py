"""Copies that come again in the same places, with the digest sums of what is copied.

On CUDA all copies of a bucket are one launch, worked out once; digests are summed while the bytes pass, so proof costs
no pass of its own.  Elsewhere a copy and a digest are two passes, and nothing is gained by asking for both at once: see
``transfers_on``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weightcast.wire import digest_jobs
from weightcast.wire.digest import Piece, partial_sums

if TYPE_CHECKING:
    from weightcast.wire.digest_kernel import Launches

_DEVICES = {"cuda"}
_MAX_PLACES = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A piece that is copied, or summed, or both.

    Attributes:
        piece: What is read.
        target: Where to: shape and dtype of the piece, its memory not overlapping; None for a sum alone.
        total: Which sum it adds to; None for a copy alone.
    """

    piece: Piece
    target: torch.Tensor | None = None
    total: int | None = None


def transfers_on(device: torch.device) -> bool:
    """True where copying and summing at once is worth it."""
    return device.type in _DEVICES


def can_transfer(transfer: Transfer) -> bool:
    """True if ``RepeatedTransfers`` takes it: one device, one dtype, and rows that are runs of adjacent bytes."""
    source, target = transfer.piece.tensor, transfer.target
    if target is not None and (target.device != source.device or target.dtype != source.dtype):
        return False
    return digest_jobs.can_transfer(transfer)


class RepeatedTransfers:
    """Transfers that come again and again in the same places.  It keeps no memory alive.  One thread at a time."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[object, Launches]] = {}

    def run(
        self,
        place: Hashable,
        what: object,
        device: torch.device,
        count: int,
        transfers: Callable[[], Sequence[Transfer]],
    ) -> torch.Tensor:
        """Copy and sum.  Queued on the current stream of a GPU, done on a CPU.

        Args:
            place: Where sources and targets lie: two places are never the same memory at one time, read differently.
            what: How that memory is read; equal as long as the transfers are the same ones.
            device: Of all memory.
            count: Of sums.
            transfers: Makes them; for each ``can_transfer`` is true.

        Returns:
            int64 ``[count]`` on the device, to be read mod 2**64.
        """
        if device.type != "cuda":
            return _plainly(transfers(), count)
        known = self._known.get(place)
        if known is not None and known[0] == what:
            again = known[1].launch()
            if again is not None:
                return again
        from weightcast.wire.digest_kernel import Launches

        made = Launches(transfers(), count, device)
        if len(self._known) >= _MAX_PLACES:
            self._known.clear()
        self._known[place] = what, made
        sums = made.launch()
        assert sums is not None, "it was made for the current stream"
        return sums


def _plainly(transfers: Sequence[Transfer], count: int) -> torch.Tensor:
    """One after the other."""
    totals = torch.zeros(count, dtype=torch.int64)
    for transfer in transfers:
        if transfer.target is not None:
            transfer.target.copy_(transfer.piece.tensor)
        if transfer.total is not None:
            totals[transfer.total] += partial_sums([transfer.piece])[0]
    return totals
