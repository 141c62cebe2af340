"""Ends the demo's processes if the demo itself is killed: ``python -m weightcast.lab.demo.reaper``.

The reaper reads ``+PID`` and ``-PID`` lines on stdin.  When the parent ends, in any way, the pipe closes, and the
reaper ends the process groups that are still on the list.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

_GRACE_S = 10.0


def watch(lines: Iterable[str]) -> set[int]:
    """Reads lines until they end, and returns the process groups that were added and not removed."""
    running: set[int] = set()
    for line in lines:
        pid = int(line[1:])
        if line.startswith("+"):
            running.add(pid)
        else:
            running.discard(pid)
    return running


def end(groups: set[int]) -> None:
    """Sends SIGTERM to the leader of every group, and kills the rest of the group after ten seconds."""
    left = {group for group in groups if _signal(group, 0)}
    for group in left:
        with suppress(ProcessLookupError):
            os.kill(group, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = {group for group in left if _signal(group, 0)}
    for group in left:
        _signal(group, signal.SIGKILL)


def _signal(group: int, number: int) -> bool:
    with suppress(ProcessLookupError):
        os.killpg(group, number)
        return True
    return False


if __name__ == "__main__":
    # Ctrl-C on a terminal reaches this process too; it must outlive the parent that handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end(watch(sys.stdin))
