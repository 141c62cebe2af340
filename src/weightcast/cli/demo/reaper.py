"""Ends what the demo started if the demo itself is killed: ``python -m weightcast.cli.demo.reaper``.

Reads ``+PID`` and ``-PID`` lines on stdin.  A parent that ends, in whatever way, closes that pipe; what is then
still on the list is a process group without an owner, and is ended.
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
    """Process groups that were announced and never taken back when the lines end."""
    running: set[int] = set()
    for line in lines:
        pid = int(line[1:])
        if line.startswith("+"):
            running.add(pid)
        else:
            running.discard(pid)
    return running


def end(groups: set[int]) -> None:
    """Ask the leader of every group to end, and kill what is left of the group after ten seconds."""
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
