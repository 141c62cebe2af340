"""The launches of ``exporters/quantise_kernel.py`` in torch's operations, so that a CPU runs all around them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from unittest.mock import patch

import torch

from weightcast.exporters import quantise, quantise_jobs
from weightcast.exporters.quantise_jobs import Job, Jobs, Tiling

made: list[Launches] = []


def at(address: int, dtype: torch.dtype, rows: int, columns: int, stride: int) -> torch.Tensor:
    """The matrix that lies at an address."""
    count = (rows - 1) * stride + columns
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count).as_strided((rows, columns), (stride, 1))


class Launches:
    """As the kernel's."""

    def __init__(self, jobs: Jobs) -> None:
        self._each = list(jobs.each())
        self._multiplies = jobs.multiplies
        made.append(self)

    def measure(self, scales: int) -> None:
        for tiling, dtype, jobs in self._each:
            for job in jobs:
                x = at(job.x, dtype, job.rows, job.columns, job.stride).float().abs()
                rows, columns, grid = self._grid(job, tiling, scales)
                found = torch.zeros_like(grid)
                index = (rows[:, None] * grid.shape[1] + columns[None, :]).reshape(-1)
                found.view(-1).scatter_reduce_(0, index, x.reshape(-1), "amax")
                grid.copy_(torch.maximum(grid, found) if job.joined else found)

    def encode(self, scales: int, out: int) -> None:
        for tiling, dtype, jobs in self._each:
            for job in jobs:
                x = at(job.x, dtype, job.rows, job.columns, job.stride).float()
                rows, columns, grid = self._grid(job, tiling, scales)
                spread = grid[rows][:, columns]
                q = x * (1.0 / spread) if self._multiplies else x / spread
                target = at(out + job.out, torch.float8_e4m3fn, job.rows, job.columns, job.out_stride)
                target.copy_(q.clamp(-448, 448))

    @staticmethod
    def _grid(job: Job, tiling: Tiling, scales: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For each row and column of the part its block, counted from the part's first one; and these scales."""
        rows = torch.arange(job.first_row, job.first_row + job.rows) // tiling.rows
        columns = torch.arange(job.first_column, job.first_column + job.columns) // tiling.columns
        first = (int(rows[0]) * job.scales_stride + int(columns[0])) * 4
        high, wide = int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1
        grid = at(scales + job.scales + first, torch.float32, high, wide, job.scales_stride)
        return rows - rows[0], columns - columns[0], grid


@contextmanager
def launches_on_cpu() -> Generator[list[Launches]]:
    """Quantises on this CPU as on a GPU; yields the launches that are made meanwhile."""
    kernel = ModuleType("weightcast.exporters.quantise_kernel")
    kernel.Launches = Launches
    kernel.prepare = lambda jobs: None
    made.clear()
    with (
        patch.dict(sys.modules, {kernel.__name__: kernel}),
        patch.object(quantise_jobs, "launches_on", lambda device: True),
        patch.object(quantise, "launches_on", lambda device: True),
    ):
        yield made
