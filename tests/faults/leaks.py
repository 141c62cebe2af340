"""Looks for leaks of long-lived processes: descriptors, threads, ports, shared memory and memory, from ``/proc``."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.helpers.harness import listening, num_fds, num_threads

SPARE_COUNT = 8  # smaller differences are connections that are about to close
SPARE_BYTES = 8 << 20  # an allocator's arena
_FEWEST = 40  # a process warms up until it has seen each transport and fault
_BLOCKS = 8
# Multiple of the slope's standard error.  A single step, at any block, is at most 4.4, so it does not count as a slope.
_DOUBTS = 5.0
_SHARED = ("/dev/shm/", "memfd:weightcast-")


class Sample(NamedTuple):
    """Numbers of the things that one process has, and its resident bytes."""

    descriptors: int
    threads: int
    ports: int
    shared: int
    bytes: int


def sample_of(pid: int) -> Sample:
    """Takes a sample now; OSError if the process has ended."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    shared = {line.split(None, 5)[4] for line in maps if any(mark in line for mark in _SHARED)}
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    size_bytes = pages * os.sysconf("SC_PAGE_SIZE")
    return Sample(num_fds(pid), num_threads(pid), len(listening(pid)), len(shared), size_bytes)


class Watch:
    """Samples of processes that live on from case to case, by name and process id."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int], list[Sample]] = {}

    def take(self, name: str, pid: int) -> None:
        """Takes a sample, unless the process has ended."""
        with suppress(OSError):
            self._samples.setdefault((name, pid), []).append(sample_of(pid))

    def found(self) -> list[str]:
        """Names what grew; it says nothing of a process that did not live long enough."""
        return [
            f"{name} (pid {pid}) gained {words} in {len(samples)} cases"
            for (name, pid), samples in self._samples.items()
            if (words := grown(samples))
        ]


def grown(samples: Sequence[Sample]) -> str:
    """Names what grows; empty if nothing does.

    A count grows if the median of the last quarter is above nine tenths of the first half.  Groups that end and are
    made again move it down and up, which is no growth.
    """
    if len(samples) < _FEWEST:
        return ""
    found: list[str] = []
    for name in Sample._fields[:-1]:
        values: list[int] = [getattr(sample, name) for sample in samples]
        before = sorted(values[: len(values) // 2])
        more = _median(values[-(len(values) // 4) :]) - before[len(before) * 9 // 10]
        if more > SPARE_COUNT:
            found.append(f"{more} {name}")
    slope, doubt = _line([sample.bytes for sample in samples[len(samples) // 2 :]])
    if slope > doubt and slope * (len(samples) - len(samples) // 2) > SPARE_BYTES:
        found.append(f"{slope:.0f} bytes a case, give or take {doubt:.0f},")
    return ", ".join(found)


def _line(values: Sequence[int]) -> tuple[float, float]:
    """The slope by least squares and its standard error, through medians of blocks: neighbours are correlated."""
    edges = [len(values) * number // _BLOCKS for number in range(_BLOCKS + 1)]
    ys = [_median(values[start:end]) for start, end in itertools.pairwise(edges)]
    xs = [(start + end) / 2 for start, end in itertools.pairwise(edges)]
    mean_x, mean_y = sum(xs) / _BLOCKS, sum(ys) / _BLOCKS
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    off = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    return slope, _DOUBTS * (off / (_BLOCKS - 2) / spread) ** 0.5


def _median(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2]
