"""Copies that come again in the same places, with the digest sums of what is copied.

All copies of a bucket are one launch, worked out once for each place.  Digests are summed while the bytes pass, so
proof costs no pass of its own.  That goes for CUDA, and for CPUs where numba is installed; elsewhere a copy and a
digest are two passes: see ``transfers_on``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from weightcast.digest import on_cpu
from weightcast.digest.jobs import is_rows_of_runs
from weightcast.digest.pieces import Transfer, words_of
from weightcast.digest.templates import Placed

if TYPE_CHECKING:
    from weightcast.digest.kernel import GpuLaunches

_MAX_PLACES = 16


def prepare_kernels(device: torch.device, *, size_bytes: int | None = None) -> None:
    """Compiles what sums digests on a device, or loads what was compiled, so that the first update need not wait.

    Takes seconds the first time on a machine, and a fraction of a second later.  With ``size_bytes``, only where so
    many bytes are summed faster for it.
    """
    if device.type == "cuda":
        from weightcast.digest.kernel import compile_all

        compile_all(device)
    elif device.type == "cpu":
        if size_bytes is None:
            on_cpu.available()
        else:
            on_cpu.prepare(size_bytes)


def transfers_on(device: torch.device) -> bool:
    """True where copying and summing at once is worth it."""
    return device.type == "cuda" or (device.type == "cpu" and on_cpu.available())


def can_transfer(transfer: Transfer) -> bool:
    """True if ``PlacedLaunches`` takes it: one device, one dtype, and rows that are runs of adjacent bytes.

    With ``casts``, the dtypes are float32 and bfloat16.
    """
    source, target = transfer.piece.tensor, transfer.target
    read, written = (torch.float32, torch.bfloat16) if transfer.casts else (source.dtype, source.dtype)
    if source.dtype != read or (target is not None and (target.device, target.dtype) != (source.device, written)):
        return False
    for side in (source,) if target is None else (source, target):
        if side.is_conj() or side.is_neg() or not (side.is_contiguous() or is_rows_of_runs(words_of(side))):
            return False
    return True


class PlacedLaunches:
    """The launches of some transfers, for the places in which their memories have lain of late.

    It belongs to what the transfers were worked out for, such as one bucket of a plan, and ends with it.  A place says
    where all of the memory lies, so what is kept for it is never out of date.  It keeps no memory alive.  One thread at
    a time.
    """

    def __init__(self, device: torch.device, count: int, *, looks: bool = False) -> None:
        """Takes the device of all memory, for which ``transfers_on`` is true, and the number of sums.

        ``looks`` makes launches on a CPU look at what they sum, for ``small``.
        """
        self.small = False  # as that of the last launch on a CPU
        self._looks = looks
        self._device = device
        self._count = count
        self._known: dict[Hashable, GpuLaunches | on_cpu.CpuLaunches] = {}

    def run(
        self, place: Hashable, transfers: Callable[[], Sequence[Transfer] | Placed], *, summed: bool = True
    ) -> torch.Tensor:
        """Copies and sums.  Enqueued on the current stream of a GPU, done on a CPU.

        The key ``place`` stands for the addresses of all sources and targets.  ``transfers`` makes transfers for which
        ``can_transfer`` is true, or a template of such ones with its addresses.  The sums are int64 ``[count]`` on the
        device, to be read mod 2**64; of no meaning unless ``summed``, for which a CPU then does nothing.
        """
        known = self._known.get(place)
        sums = known.launch(summed=summed) if known is not None else None
        if sums is None:  # or it was made for another stream
            known = self._make(place, transfers)
            sums = known.launch(summed=summed)
            assert sums is not None, "it was made for the current stream"
        self.small = isinstance(known, on_cpu.CpuLaunches) and known.small
        return sums

    def prepare(self, place: Hashable, transfers: Callable[[], Sequence[Transfer] | Placed]) -> None:
        """Makes the tables that ``run`` needs for a place."""
        if place not in self._known:
            self._make(place, transfers)

    def _make(
        self, place: Hashable, transfers: Callable[[], Sequence[Transfer] | Placed]
    ) -> GpuLaunches | on_cpu.CpuLaunches:
        made = _launches(transfers(), self._count, self._device, looks=self._looks)
        if len(self._known) >= _MAX_PLACES:
            self._known.clear()
        self._known[place] = made
        return made


def worth_launch(size_bytes: int, device: torch.device) -> bool:
    """True where a launch on a device sums this many bytes faster than ``partial_sums``."""
    return device.type == "cuda" or (device.type == "cpu" and on_cpu.worth_it(size_bytes))


def _launches(
    transfers: Sequence[Transfer] | Placed, count: int, device: torch.device, *, looks: bool
) -> GpuLaunches | on_cpu.CpuLaunches:
    if device.type == "cpu":
        return on_cpu.CpuLaunches(transfers, count, looks=looks)
    from weightcast.digest.kernel import GpuLaunches

    return GpuLaunches(transfers, count, device)
