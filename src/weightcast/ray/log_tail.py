"""Keeps the last bytes of a process's output in memory."""

from __future__ import annotations

import os
import threading
from typing import IO


class Tail:
    """Reads a pipe to its end on a thread of its own and keeps the last bytes."""

    def __init__(self, pipe: IO[bytes], *, num_bytes: int) -> None:
        """Starts reading; only this object may read the pipe from now on."""
        self._end = os.dup(pipe.fileno())  # the caller may close the pipe while the thread reads
        self._num_bytes = num_bytes
        self._kept = bytearray()
        self._guard = threading.Lock()
        self._reading = threading.Thread(target=self._read, name="weightcast-tail", daemon=True)
        self._reading.start()

    def text(self, *, patience_s: float = 0.0) -> str:
        """Returns the last output, after ``patience_s`` at most: children of a dead process may still hold the pipe."""
        self._reading.join(patience_s)
        with self._guard:
            return self._kept.decode(errors="replace").strip()

    def _read(self) -> None:
        try:
            while chunk := os.read(self._end, 1 << 16):
                with self._guard:
                    self._kept += chunk
                    del self._kept[: -self._num_bytes]
        finally:
            os.close(self._end)
