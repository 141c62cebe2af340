"""What comes again and again, kept as it was worked out the first time.

An update says what the one before it said: the same tables of tensors, the same work on the same memory.  Bounded in
bytes; what has not been asked for longest is forgotten first.  Thread-safe.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Known(Generic[_K, _V]):
    """Values by key, least recently used first to go."""

    def __init__(self, limit_bytes: int) -> None:
        """Empty.

        Args:
            limit_bytes: What all values together may take; a single one may take more.
        """
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._found: OrderedDict[_K, tuple[_V, int]] = OrderedDict()
        self._size_bytes = 0

    def get(self, key: _K) -> _V | None:
        """The value; None if it is not known, or no longer."""
        with self._lock:
            found = self._found.get(key)
            if found is None:
                return None
            self._found.move_to_end(key)
            return found[0]

    def put(self, key: _K, value: _V, size_bytes: int) -> None:
        """Keep a value for a key that has none.

        Args:
            key: Of the value.
            value: To be kept.
            size_bytes: What it takes, key included.
        """
        with self._lock:
            if key in self._found:
                return
            self._found[key] = value, size_bytes
            self._size_bytes += size_bytes
            while self._size_bytes > self._limit_bytes and len(self._found) > 1:
                _, (_, gone_bytes) = self._found.popitem(last=False)
                self._size_bytes -= gone_bytes
