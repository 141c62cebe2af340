"""Resources of processes over time, read from ``/proc``: descriptors, threads, memory, shared buffers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

# Smaller differences are noise: an allocator's arena, a connection that is about to close.
SPARE_COUNT = 8
SPARE_BYTES = 8 << 20
# A process warms up until it has seen each transport, pause mode and membership once.
_FEWEST_SAMPLES = 40
_BLOCKS = 8
# Multiple of the slope's standard error. A single step, at any block, is at most 4.4, so it does not count as a slope.
_DOUBTS = 5.0
_BUFFER = "memfd:weightcast-"
_NAMED = "/dev/shm/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Resources of one process after a number of updates."""

    update: int
    fds: int
    threads: int
    rss_bytes: int


@dataclass(slots=True)
class Series:
    """Samples of one process, from its start to its end."""

    name: str
    pid: int
    samples: list[Sample] = field(default_factory=list[Sample])

    def take(self, update: int) -> None:
        """Takes a sample now, unless the process has ended."""
        with suppress(OSError, StopIteration, IndexError):
            fds = len(os.listdir(f"/proc/{self.pid}/fd"))
            threads = len(os.listdir(f"/proc/{self.pid}/task"))
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
            self.samples.append(
                Sample(update=update, fds=fds, threads=threads, rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"))
            )

    @property
    def settled(self) -> Sequence[Sample]:
        """Returns the second half of the samples; in the first half imports, pools and caches still fill."""
        return self.samples[len(self.samples) // 2 :]

    def growth(self, name: Literal["fds", "threads"]) -> int:
        """Returns how far the median of the last quarter is above the maximum of the first half.

        Process groups that end and are made again move the count down and up, which is not growth.
        """
        values: list[int] = [getattr(sample, name) for sample in self.samples]
        if len(values) < 4:
            return 0
        before = sorted(values[: len(values) // 2])
        return _median(values[-(len(values) // 4) :]) - before[len(before) * 9 // 10]

    @property
    def slope_bytes(self) -> float:
        """Resident bytes gained with each update of the second half."""
        return self._line()[0]

    @property
    def gained_bytes(self) -> float:
        """Resident bytes gained in the second half; 0 if the gain was not steady."""
        slope, doubt = self._line()
        return slope * (self.settled[-1].update - self.settled[0].update) if slope > doubt else 0.0

    @property
    def leaks(self) -> str:
        """Description of the resources that grow; empty if none does or the process was too short-lived to tell."""
        if len(self.samples) < _FEWEST_SAMPLES:
            return ""
        found = [f"{self.growth('fds'):+d} descriptors"] if self.growth("fds") > SPARE_COUNT else []
        if self.growth("threads") > SPARE_COUNT:
            found.append(f"{self.growth('threads'):+d} threads")
        if self.gained_bytes > SPARE_BYTES:
            slope, doubt = self._line()
            found.append(f"{slope:+.0f} bytes an update, give or take {doubt:.0f}")
        return ", ".join(found)

    def _line(self) -> tuple[float, float]:
        """Returns the bytes gained with each update, by least squares, and their standard error.

        The line goes through medians of blocks.  Neighbouring samples are correlated, so a line through all of them
        would have a standard error that is far too small.
        """
        samples = self.settled
        if len(samples) < _BLOCKS:
            return 0.0, 0.0
        edges = [len(samples) * number // _BLOCKS for number in range(_BLOCKS + 1)]
        blocks = [samples[start:end] for start, end in itertools.pairwise(edges)]
        xs = [_median([sample.update for sample in block]) for block in blocks]
        ys = [_median([sample.rss_bytes for sample in block]) for block in blocks]
        mean_x, mean_y = sum(xs) / _BLOCKS, sum(ys) / _BLOCKS
        spread = sum((x - mean_x) ** 2 for x in xs)
        if not spread:
            return 0.0, 0.0
        slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
        off = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
        return slope, _DOUBTS * (off / (_BLOCKS - 2) / spread) ** 0.5


def buffers_of(pid: int) -> int:
    """Counts the shared buffers of weightcast that a process has open or mapped."""
    found: set[str] = set()
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if _BUFFER in line:
                found.add(line.split(None, 5)[4])
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if _BUFFER in os.readlink(f"/proc/{pid}/fd/{number}"):
                    found.add(str(os.stat(f"/proc/{pid}/fd/{number}").st_ino))
    return len(found)


def segments_of(pid: int) -> set[str]:
    """Returns the names under /dev/shm that a process has open or mapped; other programs use that folder too."""
    found: set[str] = set()
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            where = line.partition(_NAMED)[2]
            if where:
                found.add(where.removesuffix(" (deleted)"))
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                where = os.readlink(f"/proc/{pid}/fd/{number}").partition(_NAMED)[2]
                if where:
                    found.add(where.removesuffix(" (deleted)"))
    return found


def still_there(names: set[str]) -> set[str]:
    """Returns those of the names that are under /dev/shm now."""
    return {name for name in names if os.path.exists(_NAMED + name)}


def _median(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2]
