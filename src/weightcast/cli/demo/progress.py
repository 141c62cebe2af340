"""A progress bar on a terminal, plain lines elsewhere.

It knows bytes and a name for what is being done, nothing of the work.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from weightcast.report import format_bytes

_PLAIN_INTERVAL_S = 2.0


class Progress(Protocol):
    """Called as work goes on."""

    def __call__(self, what: str, done_bytes: int, total_bytes: int) -> None:
        """``done_bytes`` of ``total_bytes`` of ``what`` are done; called with equal numbers at the end."""
        ...


def silent(what: str, done_bytes: int, total_bytes: int) -> None:
    """A ``Progress`` that shows nothing."""


@contextmanager
def console_progress() -> Generator[Progress]:
    """A ``Progress`` on stderr: a bar with bytes per second on a terminal, a line every two seconds elsewhere."""
    if not sys.stderr.isatty():
        yield _PlainProgress()
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress
    except ImportError:
        yield _PlainProgress()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with RichProgress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done_bytes: int, total_bytes: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total_bytes)
            bars.update(tasks[what], completed=done_bytes, total=total_bytes)

        yield show


class _PlainProgress:
    def __init__(self) -> None:
        self._started_s: dict[str, float] = {}
        self._shown_s = float("-inf")

    def __call__(self, what: str, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        started_s = self._started_s.setdefault(what, now_s)
        if done_bytes < total_bytes and now_s - self._shown_s < _PLAIN_INTERVAL_S:
            return
        self._shown_s = now_s
        rate = format_bytes(int(done_bytes / (now_s - started_s))) + "/s" if now_s > started_s else ""
        print(f"{what}: {format_bytes(done_bytes)} of {format_bytes(total_bytes)} {rate}".rstrip(), file=sys.stderr)
