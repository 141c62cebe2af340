"""An LRU cache that is bounded in bytes, for results that every update needs again.  Thread-safe."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Lru(Generic[_K, _V]):
    """Values by key; the least recently used is evicted first."""

    def __init__(self, limit_bytes: int) -> None:
        """``limit`` is that of all values together; a single one may be larger."""
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._found: OrderedDict[_K, tuple[_V, int]] = OrderedDict()
        self._size_bytes = 0

    def get(self, key: _K) -> _V | None:
        """Returns the value, or None if the cache does not have it."""
        with self._lock:
            found = self._found.get(key)
            if found is None:
                return None
            self._found.move_to_end(key)
            return found[0]

    def key_of(self, value: _V) -> _K | None:
        """Returns the key of this very object, or None if the cache does not have it."""
        with self._lock:
            return next((key for key, (found, _) in self._found.items() if found is value), None)

    def put(self, key: _K, value: _V, size_bytes: int) -> None:
        """Adds a value if the key has none; ``size_bytes`` is the size of both."""
        with self._lock:
            if key in self._found:
                return
            self._found[key] = value, size_bytes
            self._size_bytes += size_bytes
            while self._size_bytes > self._limit_bytes and len(self._found) > 1:
                _, (_, gone_bytes) = self._found.popitem(last=False)
                self._size_bytes -= gone_bytes
