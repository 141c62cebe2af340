"""Launches that copy and sum: all copies of a bucket are one, for memories that stay where they are.

Digests are summed while the bytes pass, so proof costs no pass of its own.  That goes for CUDA, and for CPUs where
numba is installed; elsewhere a copy and a digest are two passes: see ``transfers_on``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from weightcast.digest import on_cpu
from weightcast.digest.jobs import is_rows_of_runs
from weightcast.digest.pieces import Transfer, words_of
from weightcast.digest.templates import Placed

if TYPE_CHECKING:
    from weightcast.digest.kernel import GpuLaunches


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
    """True if a launch takes it: one device, one dtype, and rows that are runs of adjacent bytes.

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


def worth_launch(size_bytes: int, device: torch.device) -> bool:
    """True where a launch on a device sums this many bytes faster than ``partial_sums``."""
    return device.type == "cuda" or (device.type == "cpu" and on_cpu.worth_it(size_bytes))


def launches_of(
    transfers: Sequence[Transfer] | Placed, count: int, device: torch.device, *, looks: bool = False
) -> GpuLaunches | on_cpu.CpuLaunches:
    """Makes the tables of launches that copy and sum; nothing is read, and no memory is kept alive.

    Args:
        transfers: Those for which ``can_transfer`` is true, or a template of such ones with its addresses.
        count: Number of the sums.
        device: The device of all memory, for which ``transfers_on`` is true.
        looks: On a CPU, whether values that are summed are looked at, for ``small``.
    """
    if device.type == "cpu":
        return on_cpu.CpuLaunches(transfers, count, looks=looks)
    from weightcast.digest.kernel import GpuLaunches

    return GpuLaunches(transfers, count, device)
