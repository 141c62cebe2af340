"""Keeps torch's NCCL watchdog from ending the process, or holding it up.

By default the watchdog ends the whole process when an NCCL operation of any group fails or passes the group's timeout.
A dead trainer would take the engines with it, and a dead engine the trainer.  Our groups have deadlines of their own
and name the rank that failed.

A watchdog that may end nothing still does harm (torch 2.11, ``ProcessGroupNCCL.cpp``).  When NCCL reports that a peer
is gone, as it does over sockets and InfiniBand, the watchdog sleeps for a minute with a lock that an abort of the group
wants.  And it sets one flag for the whole process, at which the monitor of the default group dumps torch's flight
recorder and, eight minutes later, ends the process.  So the groups in which engines take part have no watchdog.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager

# ProcessGroupNCCL reads them once, when it is created.
_ENDS_NOTHING = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
# Then torch starts no watchdog, and a group's ``wait`` blocks the host until the operation is over.
_UNWATCHED = {"TORCH_NCCL_BLOCKING_WAIT": "1"}

_guard = threading.Lock()
_inside: Counter[str] = Counter()
_before: dict[str, str | None] = {}


@contextmanager
def groups_that_end_nothing(*, watched: bool) -> Generator[None]:
    """Makes NCCL groups that are created inside the block never end the process; others keep their settings.

    The settings are environment variables of the whole process, so the block must be short.  Several threads may be
    inside at once.  Nobody may wait for an operation that is not complete of a group that is not ``watched``: no abort
    ends that wait.
    """
    settings = _ENDS_NOTHING | ({} if watched else _UNWATCHED)
    _enter(settings)
    try:
        yield
    finally:
        _leave(settings)


def _enter(settings: Mapping[str, str]) -> None:
    with _guard:
        for name, value in settings.items():
            if not _inside[name]:
                _before[name] = os.environ.get(name)
                os.environ[name] = value
            _inside[name] += 1


def _leave(settings: Mapping[str, str]) -> None:
    with _guard:
        for name in settings:
            _inside[name] -= 1
            if _inside[name]:
                continue
            before = _before.pop(name)
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before
