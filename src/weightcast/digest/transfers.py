"""Copies that come again in the same places, with the digest sums of what is copied.

All copies of a bucket are one launch, worked out once.  Digests are summed while the bytes pass, so proof costs no
pass of its own.  That goes for CUDA, and for CPUs where numba is installed; elsewhere a copy and a digest are two
passes: see ``transfers_on``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from weightcast.digest import on_cpu
from weightcast.digest.definition import partial_sums
from weightcast.digest.jobs import is_rows_of_runs
from weightcast.digest.pieces import Piece, Transfer, check_piece, words_of
from weightcast.digest.templates import Placed

if TYPE_CHECKING:
    from weightcast.digest.kernel import Launches

_MAX_PLACES = 1 << 12


def prepare_kernels(device: torch.device) -> None:
    """Compiles what sums digests on a device, or loads what was compiled, so that the first update need not wait.

    Takes seconds the first time on a machine, and a fraction of a second later.
    """
    if device.type == "cuda":
        from weightcast.digest.kernel import compile_all

        compile_all(device)
    elif device.type == "cpu":
        on_cpu.available()


def transfers_on(device: torch.device) -> bool:
    """True where copying and summing at once is worth it."""
    return device.type == "cuda" or (device.type == "cpu" and on_cpu.available())


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
        self._known: dict[Hashable, tuple[object, Launches | on_cpu.Launches]] = {}

    def run(
        self,
        place: Hashable,
        what: object,
        device: torch.device,
        count: int,
        transfers: Callable[[], Sequence[Transfer] | Placed],
        *,
        summed: bool = True,
    ) -> torch.Tensor:
        """Copies and sums.  Enqueued on the current stream of a GPU, done on a CPU.

        Args:
            place: A key for the memory of sources and targets; one key stands for one memory at a time.
            what: A value that changes whenever that memory needs other transfers.
            device: Device of all memory; ``transfers_on`` is true for it.
            transfers: Makes the transfers, for each of which ``can_transfer`` is true; or a template of such ones,
                with the addresses of its memories.
            summed: False if nobody needs the sums, which a CPU then does not take.

        Returns:
            int64 ``[count]`` on the device, to be read mod 2**64; of no meaning unless ``summed``.
        """
        again = self.again(place, what, summed=summed)
        if again is not None:
            return again
        made = _launches(transfers(), count, device)
        if len(self._known) >= _MAX_PLACES:
            self._known.clear()
        self._known[place] = what, made
        sums = made.launch(summed=summed)
        assert sums is not None, "it was made for the current stream"
        return sums

    def again(self, place: Hashable, what: object, *, summed: bool = True) -> torch.Tensor | None:
        """As ``run``, if these transfers have been run before on this stream; else None."""
        known = self._known.get(place)
        return known[1].launch(summed=summed) if known is not None and known[0] == what else None


class RepeatedSums:
    """``partial_sums`` of pieces that come again in the same places.  Later calls need no pieces.

    It keeps no memory alive.  One thread at a time.
    """

    def __init__(self) -> None:
        self._transfers = RepeatedTransfers()

    def sums(
        self,
        place: Hashable,
        what: object,
        device: torch.device,
        pieces: Callable[[], Sequence[Piece]],
        placed: Callable[[], tuple[Placed, int] | None] = lambda: None,
    ) -> torch.Tensor:
        """As ``partial_sums``.

        Args:
            place: A key for the memory of the pieces; one key stands for one memory at a time.
            what: A value that changes whenever that memory is to be read as other pieces.
            placed: Makes the same from a template, with the number of sums, if there is one that fits.
        """
        again = self._transfers.again(place, what)
        if again is not None:
            return again
        known = placed()
        if known is not None:
            return self._transfers.run(place, what, device, known[1], lambda: known[0])
        made = pieces()
        for number, piece in enumerate(made):
            check_piece(piece, number)
        transfers = [Transfer(piece=piece, total=number) for number, piece in enumerate(made)]
        if not made or not worth_launch(made, device) or not all(map(can_transfer, transfers)):
            return partial_sums(made)
        return self._transfers.run(place, what, device, len(made), lambda: transfers)


def worth_launch(pieces: Sequence[Piece], device: torch.device) -> bool:
    """True where a launch on a device sums pieces faster than ``partial_sums``."""
    return device.type == "cuda" or (device.type == "cpu" and on_cpu.worth_it(pieces))


def _launches(transfers: Sequence[Transfer] | Placed, count: int, device: torch.device) -> Launches | on_cpu.Launches:
    if device.type == "cpu":
        return on_cpu.Launches(transfers, count)
    from weightcast.digest.kernel import Launches

    return Launches(transfers, count, device)
