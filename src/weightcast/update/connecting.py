"""A log line where ``connect`` takes long: what it is doing, since it sends nothing that a progress bar could show."""

from __future__ import annotations

import logging
import threading
import time
from typing import Self

log = logging.getLogger("weightcast.update")

_LONG_S = 2.0


class Connecting:
    """One call of ``connect``.  It writes a line after two seconds, and again each time that the wait has doubled."""

    def __init__(self, *, long_s: float = _LONG_S) -> None:
        self._long_s = long_s
        self._doing = "the model's tensors are looked at"
        self._done = threading.Event()

    def now(self, doing: str) -> None:
        """Says what begins, as a sentence without its full stop."""
        self._doing = doing

    def silence(self) -> None:
        """Leaves the lines to another trainer rank."""
        self._done.set()

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="weightcast-connecting", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def _watch(self) -> None:
        began, wait_s = time.monotonic(), self._long_s
        while not self._done.wait(wait_s):
            taken_s = time.monotonic() - began
            log.info("connect has taken %.0f s so far: %s", taken_s, self._doing)
            wait_s = taken_s
