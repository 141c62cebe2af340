"""Keeps torch's NCCL watchdog from ending the process, or holding it up.

By default the watchdog ends the whole process when an NCCL operation of any group fails or passes the group's timeout.
A dead trainer would take the engines with it, and a dead engine the trainer.  Our groups have deadlines of their own
and name the rank that failed.

Before that, the watchdog asks for a dump of torch's flight recorder and waits a minute for it, with a lock that an
abort of the group wants.  The request is one flag of the whole process: the monitor of the default group ends the
process after the dump.  NCCL reports a peer that is gone over sockets and InfiniBand, so this is what a lost host does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager

# ProcessGroupNCCL reads them once, when it is created (its header documents them; seen with torch 2.11).
_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the watchdog ignores failed operations
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}

_guard = threading.Lock()
_inside = 0
_before: dict[str, str | None] = {}


@contextmanager
def groups_that_end_nothing() -> Generator[None]:
    """Makes NCCL groups that are created inside the block never end the process; other groups keep their settings.

    The settings are environment variables of the whole process, so the block must be short.  Several threads may be
    inside at once.
    """
    global _inside
    with _guard:
        if _inside == 0:
            _before.update((name, os.environ.get(name)) for name in _SETTINGS)
            os.environ.update(_SETTINGS)
        _inside += 1
    try:
        yield
    finally:
        with _guard:
            _inside -= 1
            if _inside == 0:
                for name, value in _before.items():
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value
