"""What processes hold, over time: descriptors, threads, memory, shared buffers.

It reads ``/proc``; what is too much is said here once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

# Below these a difference is noise: an allocator's arena, a connection that is about to close.
SPARE_FDS = 8
SPARE_BYTES_PER_UPDATE = 16 << 10
_WARM_UP = 0.2  # of the samples: imports, pools and caches fill
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
        """The samples after it had warmed up."""
        return self.samples[int(len(self.samples) * _WARM_UP) :]

    def growth(self, name: str) -> int:
        """By how much the median of the last quarter is above that of the first, for ``fds`` or ``threads``."""
        values: list[int] = [getattr(sample, name) for sample in self.settled]
        quarter = max(1, len(values) // 4)
        return _median(values[-quarter:]) - _median(values[:quarter]) if values else 0

    @property
    def slope_bytes(self) -> float:
        """Resident bytes gained with each update, by least squares."""
        points = [(sample.update, sample.rss_bytes) for sample in self.settled]
        if len(points) < 3:
            return 0.0
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0

    @property
    def leaks(self) -> bool:
        """Does it hold more and more?"""
        return self.growth("fds") > SPARE_FDS or self.slope_bytes > SPARE_BYTES_PER_UPDATE


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
