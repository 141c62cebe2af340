"""Access to an engine: bearer keys, compared in constant time, and no web pages."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

_BEARER = b"bearer"


class Keys:
    """The keys that an engine accepts; none at all accepts everybody."""

    def __init__(self, keys: Iterable[str]) -> None:
        # Digests have one length, so that not even a key's length can be measured.
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admit(self, authorization: bytes) -> bool:
        """True if this ``Authorization`` value is good enough; takes the same time wherever a key differs."""
        if not self._digests:
            return True
        scheme, _, given = authorization.partition(b" ")
        digest = hashlib.sha256(given.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches) and scheme.lower() == _BEARER
