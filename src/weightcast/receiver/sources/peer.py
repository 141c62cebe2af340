"""Chunks of a peer engine's weights, over HTTP: rank r reads from rank r, one chunk at a time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from weightcast.config import Target
from weightcast.errors import EngineFailure, WeightcastError
from weightcast.wire.codec import encode
from weightcast.wire.messages import CHUNK, Fetch, PeerEngine, ReadChunk

if TYPE_CHECKING:
    from weightcast.comm.http import Client


class PeerSource:
    """Connections of one rank to the peer of a session."""

    def __init__(self) -> None:
        self._peer: PeerEngine | None = None
        self._client: Client | None = None

    def read(self, message: Fetch, *, rank: int, layout: str, timeout_s: float) -> bytes:
        """Reads one chunk, given the hash of this rank's layout; ``timeout_s`` limits the whole request.

        EngineFailure names a peer that refused, is gone or did not answer in time.
        """
        asked = ReadChunk(rank=rank, index=message.index, layout=layout, version=message.version, digest=message.digest)
        try:
            return self._connected(message.peer).post_json(CHUNK, encode(asked), timeout_s=timeout_s)
        except ImportError as error:
            raise EngineFailure(
                f"this engine cannot ask the peer {message.peer.url} for a chunk: {error}",
                hint=f"pip install {(error.name or 'aiohttp').partition('.')[0]} in the engine's environment",
            ) from error
        except WeightcastError as error:
            words = f"chunk {message.index} did not come from the peer {message.peer.url}: {error}"
            raise EngineFailure(words, hint=error.hint) from error

    def close(self) -> None:
        """Closes the connections; safe to call twice."""
        if self._client is not None:
            self._client.close()
        self._client = self._peer = None

    def _connected(self, peer: PeerEngine) -> Client:
        if self._client is None or self._peer != peer:
            from weightcast.comm.http import Client  # it needs aiohttp, which an engine's environment may lack

            self.close()
            self._client = Client(_target(peer), timeout_s=60.0)
            self._peer = peer
        return self._client


def _target(peer: PeerEngine) -> Target:
    """The peer as a target.  This host's own settings say which certificates to trust and to show."""
    key = peer.api_key or None
    if not peer.url.lower().startswith("https://"):
        return Target(peer.url, api_key=key)
    ca_file, cert_file, key_file = (os.environ.get(f"WEIGHTCAST_{name}_FILE") or None for name in ("CA", "CERT", "KEY"))
    return Target(peer.url, api_key=key, ca_file=ca_file, cert_file=cert_file, key_file=key_file)
