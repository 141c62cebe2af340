"""Access to an engine: bearer keys, compared in constant time, and no web pages.

``Guard`` stands before every route of ours, in our plug-ins as in the reference engine.  An engine's own check of keys
is not enough: SGLang and LMDeploy exempt paths such as ``/health``, and with Starlette before 1.0 they read the path
from a URL whose host the client chooses.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable, Iterable, Sequence

from fastapi import HTTPException, Request

from weightcast.errors import ConfigError
from weightcast.runtime.addresses import is_loopback

log = logging.getLogger("weightcast.receiver")

_BEARER = b"bearer"


def keys_of(given: object, *, engine: str, setting: str) -> list[str]:
    """The API keys in an engine's setting: a list, which may have empty keys, or None.

    Raises:
        ConfigError: It is one text, each letter of which the engine would take for a key.
    """
    if isinstance(given, str):
        words = f"{setting} is a text, and {engine} would take each of its letters for a key"
        raise ConfigError(words, hint=f'give a list: {setting}=["..."]')
    return [key for key in given or () if key]  # type: ignore[attr-defined]


def warn_if_open(keys: Sequence[str], *, host: str | None, port: int, option: str) -> None:
    """Logs a warning at an engine's start if everybody in the network may replace its weights.

    Args:
        host: Address that the server listens on; None or empty for all.
        option: The engine's own option for a key.
    """
    if keys or (host and is_loopback(host)):
        return
    log.warning(
        "weightcast: no API key is set, and the server listens on %s: whoever reaches port %d can read and replace the "
        "weights; set %s, or let the server listen on 127.0.0.1",
        host or "all addresses",
        port,
        option,
    )


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


class Guard:
    """Says who may use a route; ``check`` and ``check_key`` are dependencies of routes.

    It reads headers of the request and nothing else.  A rule about paths, hosts or methods could be passed by, since
    the client chooses them.  Its methods are async because FastAPI runs a plain function in a thread, which takes
    longer than the answer.
    """

    def __init__(self, keys: Iterable[str] | None = (), *, admitted: Callable[[], None] = lambda: None) -> None:
        """Makes a guard.

        Args:
            keys: Keys of which one is needed; empty admits requests without one.  None admits nobody before
                ``accept``.
            admitted: Function to call on the server's event loop for each request that is let in.
        """
        self._keys = None if keys is None else Keys(keys)
        self._admitted = admitted

    def accept(self, keys: Iterable[str]) -> None:
        """Accepts these keys from now on, and no others."""
        self._keys = Keys(keys)

    async def check(self, request: Request) -> None:
        """Refuses requests without a key, and those from web pages.

        Any web page can make its reader's browser send a request to this machine.  Browsers mark such requests.
        """
        await self.check_key(request)
        if "origin" in request.headers or request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise HTTPException(403, "web pages may not use this route")
        self._admitted()

    async def check_key(self, request: Request) -> None:
        """Refuses requests without a key."""
        if self._keys is None:
            raise HTTPException(503, "this engine is still starting")
        given = [value for name, value in request.scope["headers"] if name == b"authorization"]
        if not self._keys.admit(given[0] if len(given) == 1 else b""):
            raise HTTPException(401, "the request needs a valid API key as Authorization: Bearer")
