"""Processes that are nobody's children here: what the kernel says of them, and signals to them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from tests.helpers.clock import PATIENCE_S


class Signals:
    """The part of ``subprocess.Popen`` that sends signals, for a class with a ``pid`` and a ``poll``."""

    pid: int

    def poll(self) -> int | None:
        raise AssertionError("of the class that has the process")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended just now
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Endable(Protocol):
    """The part of ``subprocess.Popen`` that ends a process."""

    def send_signal(self, number: int, /) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def end(process: Endable, within_s: float, number: int = signal.SIGTERM) -> int:
    """Asks a process to end, kills it if it takes too long, and returns the exit code."""
    process.send_signal(number)
    try:
        return process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def gone(pid: int) -> bool:
    """It has ended; an orphan's zombie is somebody else's to bury."""
    return _states(Path(f"/proc/{pid}/stat")) in ([], ["Z"])


def is_stopped(pid: int) -> bool:
    """With all its threads, which hear of a SIGSTOP one after the other."""
    states = _states(*Path(f"/proc/{pid}/task").glob("*/stat"))
    return states != [] and set(states) == {"T"}


def wait_until_gone(pids: Iterable[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    left = list(pids)
    while left := [pid for pid in left if not gone(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


def _states(*files: Path) -> list[str]:
    """A letter for each that is there."""
    states: list[str] = []
    for file in files:
        try:
            states.append(file.read_text().rpartition(") ")[2][0])
        except (FileNotFoundError, ProcessLookupError):  # before it is opened, and before it is read
            continue
    return states
