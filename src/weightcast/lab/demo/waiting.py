"""Tells what the demo waits for, at once and every few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

_INTERVAL_S = 5.0


@contextmanager
def waiting(what: str, note: Callable[[str], None], *, interval_s: float = _INTERVAL_S) -> Generator[None]:
    """Prints ``what`` now, and every ``interval_s`` with the seconds since then, until the block ends."""
    started_s, over = time.monotonic(), threading.Event()

    def repeat() -> None:
        while not over.wait(interval_s):
            note(f"  {what}: {time.monotonic() - started_s:.0f} s")

    note(f"  {what}")
    thread = threading.Thread(target=repeat, name="weightcast-demo-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
