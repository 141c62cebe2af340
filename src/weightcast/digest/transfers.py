"""Copies that come again in the same places, with the digest sums of what is copied.

On CUDA all copies of a bucket are one launch, worked out once.  Digests are summed while the bytes pass, so proof costs
no pass of its own.  Elsewhere a copy and a digest are two passes: see ``transfers_on``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from weightcast.digest.definition import partial_sums
from weightcast.digest.jobs import is_rows_of_runs
from weightcast.digest.pieces import Transfer, words_of

if TYPE_CHECKING:
    from weightcast.digest.kernel import Launches

_DEVICES = {"cuda"}
_MAX_PLACES = 1 << 12


def transfers_on(device: torch.device) -> bool:
    """True where copying and summing at once is worth it."""
    return device.type in _DEVICES


def can_transfer(transfer: Transfer) -> bool:
    """True if ``RepeatedTransfers`` takes it: one device, one dtype, and rows that are runs of adjacent bytes."""
    source, target = transfer.piece.tensor, transfer.target
    if target is not None and (target.device != source.device or target.dtype != source.dtype):
        return False
    sides = [source] if target is None else [source, target]
    if any(side.is_conj() or side.is_neg() for side in sides):
        return False
    return all(side.is_contiguous() or is_rows_of_runs(words_of(side)) for side in sides)


class RepeatedTransfers:
    """Runs transfers that come again in the same places.  It keeps no memory alive.  One thread at a time."""

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
        """Copies and sums.  Enqueued on the current stream of a GPU, done on a CPU.

        Args:
            place: A key for the memory of sources and targets; one key stands for one memory at a time.
            what: A value that changes whenever that memory needs other transfers.
            device: Device of all memory.
            count: Number of sums.
            transfers: Makes the transfers; for each ``can_transfer`` is true.

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
        from weightcast.digest.kernel import Launches

        made = Launches(transfers(), count, device)
        if len(self._known) >= _MAX_PLACES:
            self._known.clear()
        self._known[place] = what, made
        sums = made.launch()
        assert sums is not None, "it was made for the current stream"
        return sums


def _plainly(transfers: Sequence[Transfer], count: int) -> torch.Tensor:
    totals = torch.zeros(count, dtype=torch.int64)
    for transfer in transfers:
        if transfer.target is not None:
            transfer.target.copy_(transfer.piece.tensor)
        if transfer.total is not None:
            totals[transfer.total] += partial_sums([transfer.piece])[0]
    return totals
