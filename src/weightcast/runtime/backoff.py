"""Sleeps of a poll: short at first, longer the longer it waits."""

from __future__ import annotations

import time

_SHORTEST_S = 5e-5
_LONGEST_S = 2e-3
_SHARE = 1 / 16  # polling adds at most this share to the wait


class Backoff:
    """The sleeps of one poll, which begins now."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def sleep(self) -> None:
        """Sleeps until the next poll."""
        time.sleep(min(max((time.monotonic() - self._began) * _SHARE, _SHORTEST_S), _LONGEST_S))
