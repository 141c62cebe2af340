"""What processes hold, over time: descriptors, threads, memory, shared buffers.

It reads ``/proc``; what is too much is said here once.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

# Below these a difference is noise: an allocator's arena, a connection that is about to close.
SPARE_COUNT = 8
SPARE_BYTES = 8 << 20
# A process that sees an update of each kind, pause mode and membership for the first time goes on warming up meanwhile.
_FEWEST_SAMPLES = 40
_BLOCKS = 8
# Of the slope's standard error. One step, wherever it is among the blocks, is at most 4.4 of them, so it is no slope.
_DOUBTS = 5.0
_BUFFER = "memfd:weightcast-"
_NAMED = "/dev/shm/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one process held after so many updates."""

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
        """Look at it now; nothing if it is gone."""
        with suppress(OSError, StopIteration, IndexError):
            fds = len(os.listdir(f"/proc/{self.pid}/fd"))
            threads = len(os.listdir(f"/proc/{self.pid}/task"))
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
            self.samples.append(
                Sample(update=update, fds=fds, threads=threads, rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"))
            )

    @property
    def settled(self) -> Sequence[Sample]:
        """The second half: before it imports, pools and caches fill."""
        return self.samples[len(self.samples) // 2 :]

    def growth(self, name: Literal["fds", "threads"]) -> int:
        """By how much the median of the last quarter is above what the first half reached.

        Groups that end and are made again take the count down and up: that alone is no growth.
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
        """Resident bytes that the second half gained; 0 if it did not gain them steadily."""
        slope, doubt = self._line()
        return slope * (self.settled[-1].update - self.settled[0].update) if slope > doubt else 0.0

    @property
    def leaks(self) -> str:
        """What it holds more and more of, in words; empty if nothing or if it did not live long enough to tell."""
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
        """Bytes an update by least squares, and the doubt in them.

        Through medians of blocks: neighbouring samples differ by less than distant ones, which would make a line
        through all of them look far surer than it is.
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
    """Shared buffers of ours that a process has open or mapped."""
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
    """Names under /dev/shm that a process has open or mapped; other programs of this machine have theirs there too."""
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
    """Which of these names are under /dev/shm now."""
    return {name for name in names if os.path.exists(_NAMED + name)}


def _median(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2]
