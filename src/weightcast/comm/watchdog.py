"""Keeps torch's NCCL watchdog from ending the process.

By default the watchdog ends the whole process when an NCCL operation of any group fails or passes the group's timeout.
A dead trainer would take the engines with it, and a dead engine the trainer.  Our groups have deadlines of their own
and name the rank that failed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager

# ProcessGroupNCCL reads it once, when it is created; with 0 the watchdog ignores failed operations.
_SETTING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

_guard = threading.Lock()
_inside = 0
_before: str | None = None


@contextmanager
def groups_that_end_nothing() -> Generator[None]:
    """Makes NCCL groups that are created inside the block never end the process; other groups keep their setting.

    The setting is an environment variable of the whole process, so the block must be short.  Several threads may be
    inside at once.
    """
    global _inside, _before
    with _guard:
        if _inside == 0:
            _before = os.environ.get(_SETTING)
            os.environ[_SETTING] = "0"
        _inside += 1
    try:
        yield
    finally:
        with _guard:
            _inside -= 1
            if _inside == 0 and _before is None:
                os.environ.pop(_SETTING, None)
            elif _inside == 0 and _before is not None:
                os.environ[_SETTING] = _before
