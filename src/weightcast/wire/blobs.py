"""Tables that travel once: each has a name, BLAKE2b of its encoded bytes, and both ends keep it.

A message names its tables, and brings those that its sender has not sent before (``codec.py``).  A process that lacks
one says so (``UnknownBlob``), and the sender sends the message again with all of them.  The name of a table that comes
is computed from its bytes, so none is taken for another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from weightcast.errors import WireError
from weightcast.runtime.lru import Lru

_T = TypeVar("_T")
_KEPT_BYTES = 512 << 20
_TIMES_ITS_BYTES = 8  # memory of a decoded table and its bytes
_LEAST_BYTES = 1 << 12  # smaller ones are encoded as fast as they are found
_MOST_SENT = 1 << 16


class UnknownBlob(WireError):
    """A message names a table that this process does not have.  The sender must send it in full."""


def hash_of(encoded: bytes) -> str:
    """BLAKE2b of an encoded table, 32 hex characters."""
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


@dataclass(frozen=True)
class BlobKind(Generic[_T]):
    """One kind of table, with its word for errors.  ``decode`` checks every field; it raises ValueError."""

    word: str
    encode: Callable[[_T], bytes]
    decode: Callable[[bytes], _T]


@dataclass(frozen=True, slots=True)
class Blob(Generic[_T]):
    """A table with its encoding and name."""

    value: _T
    encoded: bytes
    name: str


class Blobs:
    """Tables with their encodings: those that came by their names, and all by the identity of the decoded object."""

    def __init__(self, limit_bytes: int = _KEPT_BYTES) -> None:
        """``limit_bytes`` is the memory of all tables; the least recently used go first."""
        self._found: Lru[Hashable, Blob[Any]] = Lru(limit_bytes)

    def encoded(self, kind: BlobKind[_T], value: _T) -> Blob[_T]:
        """Returns the encoding of a table; a large one is encoded once."""
        blob = self._found.get(id(value))
        if blob is None:
            data = kind.encode(value)
            blob = Blob(value, data, hash_of(data))
            self._keep_encoded(blob)
        return blob

    def take(self, kind: BlobKind[_T], name: str, encoded: bytes | None = None) -> _T:
        """Returns the table of a name, the same object while it is kept.

        Args:
            kind: The kind of table.
            name: Its name.
            encoded: The bytes that came with the message, of which it is the name; None if none came.

        Raises:
            UnknownBlob: No bytes came, and the table is not kept.
            ValueError: The bytes are not a table of this kind.
        """
        blob = self._found.get((kind.word, name))
        if blob is None:
            if encoded is None:
                raise UnknownBlob(f"this process does not have the {kind.word} {name}; it must be sent in full")
            made = Blob(kind.decode(encoded), encoded, name)
            self._found.put((kind.word, name), made, _size_of(made))
            blob = self._found.get((kind.word, name)) or made  # another thread may have been faster
            self._keep_encoded(blob)
        return blob.value

    def _keep_encoded(self, blob: Blob[Any]) -> None:
        if len(blob.encoded) >= _LEAST_BYTES:
            self._found.put(id(blob.value), blob, _size_of(blob))  # kept alive, so that its id stays its own


def _size_of(blob: Blob[Any]) -> int:
    return _LEAST_BYTES // 4 + _TIMES_ITS_BYTES // 2 * len(blob.encoded)  # large ones are kept under two keys


class SentBlobs:
    """The names of the tables that another process was sent, and has unless it says otherwise."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def add(self, names: Iterable[str]) -> None:
        """Notes tables that were sent."""
        if len(self._names) > _MOST_SENT:
            self._names.clear()
        self._names.update(names)

    def clear(self) -> None:
        """Forgets all: the other process may have lost them."""
        self._names.clear()


KEPT = Blobs()  # of this process
