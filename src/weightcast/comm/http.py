"""HTTP to an engine: one client, deadlines, bearer key, the engine's own words in every error.

It knows URLs and bytes, no engine's routes.  httpcore is what httpx stands on; what httpx adds to it (redirects,
cookies, proxies) is not wanted here, and takes half a millisecond of each message, for which engines wait.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import quote, urlsplit

import httpcore

from weightcast.comm.tls import client_context, client_distrusted, hangs_up_after_handshake, tls_trouble
from weightcast.config import Target
from weightcast.errors import (
    ConfigError,
    DeadlineExceeded,
    TargetLost,
    TargetRejected,
    TargetUnreachable,
    WeightcastError,
)

_CONNECT_S = 10.0
# Below what servers allow (uvicorn: 5 s): a connection that the server is closing loses the request sent into it.
_KEEP_ALIVE_S = 2.0
_MAX_CONNECTIONS = 8
_FRAME_BYTES = 4
_MAX_REPLY_BYTES = 512 << 20
_MAX_FRAME_BYTES = 64 << 20
_FAILURES = (
    httpcore.TimeoutException,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.UnsupportedProtocol,
)


class Client:
    """HTTP to one target.  Thread-safe; ``close`` is safe to call twice."""

    def __init__(self, target: Target, *, timeout_s: float) -> None:
        """Nothing is sent yet.

        Raises:
            ConfigError: A certificate file cannot be used, or the host name cannot be one.
        """
        headers = {"content-type": "application/json", "accept-encoding": "identity", "user-agent": "weightcast"}
        if target.api_key is not None:
            headers["authorization"] = f"Bearer {target.api_key}"
        self.target = target
        self.timeout_s = timeout_s
        parts = urlsplit(target.url)
        try:
            host = (parts.hostname or "").encode("idna")
        except UnicodeError as error:
            raise ConfigError(f"{target.url}: {error}", hint="is its host name spelt right?") from error
        self._root = httpcore.URL(scheme=parts.scheme, host=host, port=parts.port, target="/")
        self._prefix = quote(parts.path.rstrip("/"), safe="/%")
        named = f"[{host.decode()}]" if b":" in host else host.decode()
        headers["host"] = named if parts.port is None else f"{named}:{parts.port}"
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._trust: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._trust = client_context(ca_file=target.ca_file, cert_file=target.cert_file, key_file=target.key_file)
        self._pool = httpcore.ConnectionPool(
            ssl_context=self._trust, max_connections=_MAX_CONNECTIONS, keepalive_expiry=_KEEP_ALIVE_S
        )
        self._closed = False

    def get_json(self, path: str, *, timeout_s: float | None = None) -> bytes:
        """GET; the body of a 200."""
        return self._ask("GET", path, None, timeout_s)

    def post_json(self, path: str, body: bytes, *, timeout_s: float | None = None) -> bytes:
        """POST JSON bytes; the body of the answer.

        Raises:
            TargetUnreachable: Nothing listens there, the name does not resolve, or one end does not trust the other.
            DeadlineExceeded: No answer within the deadline.
            TargetLost: The connection broke after the request was sent.
            TargetRejected: A status of 400 or more, with the engine's own words.
        """
        return self._ask("POST", path, body, timeout_s)

    def open_lease(self, path: str, body: bytes, *, timeout_s: float | None = None) -> tuple[bytes, Lease]:
        """POST and keep the answer's stream open: closing it tells the engine that the caller is gone.

        Returns:
            The first frame of the answer and the lease.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        response: httpcore.Response | None = None
        lease: Lease | None = None
        try:
            response = self._send("POST", path, body, limit)
            if response.status >= 400:
                content = self._read(response, deadline)
                _hang_up_on_failure(response)
                raise self._refusal("POST", path, response.status, content)
            chunks = response.iter_stream()
            frame = _read_frame(chunks, deadline)
            lease = Lease(response, chunks)
            return frame, lease
        except (*_FAILURES, EOFError) as error:
            raise self._failure("POST", path, limit, error) from error
        finally:
            if lease is None and response is not None:
                response.close()  # who has not got a lease holds none: the engine hears of it now

    def close(self) -> None:
        """Close every connection."""
        self._closed = True
        self._pool.close()

    def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float | None) -> bytes:
        limit = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        try:
            with closing(self._send(method, path, body, limit)) as response:
                # The limit that was given is on each read: an answer that trickles would never end.
                content = self._read(response, deadline)
                _hang_up_on_failure(response)
                if response.status >= 400:
                    raise self._refusal(method, path, response.status, content)
                return content
        except _FAILURES as error:
            raise self._failure(method, path, limit, error) from error

    def _send(self, method: str, path: str, body: bytes | None, limit_s: float) -> httpcore.Response:
        """A request; of the answer its head has come, and who asked closes it."""
        if self._closed:
            raise RuntimeError(f"{self.target.url}: this client is closed")
        root = self._root
        url = httpcore.URL(scheme=root.scheme, host=root.host, port=root.port, target=self._prefix + path)
        length = [] if body is None else [(b"content-length", str(len(body)).encode())]
        limits = {"connect": min(limit_s, _CONNECT_S), "read": limit_s, "write": limit_s, "pool": limit_s}
        request = httpcore.Request(
            method, url, headers=[*self._headers, *length], content=body, extensions={"timeout": limits}
        )
        response = self._pool.handle_request(request)
        encoding = next((value for name, value in response.headers if name.lower() == b"content-encoding"), b"identity")
        if encoding.lower() != b"identity":
            response.close()
            words = f"{self.target.url}: its answer is in {encoding.decode(errors='replace')}, which was not asked for"
            raise TargetLost(words, url=self.target.url, hint="does a proxy in between compress?")
        return response

    def _read(self, response: httpcore.Response, deadline: float) -> bytes:
        chunks: list[bytes] = []
        size = 0
        for chunk in response.iter_stream():
            chunks.append(chunk)
            size += len(chunk)
            if size > _MAX_REPLY_BYTES:
                raise TargetLost(f"{self.target.url}: its answer is too long", url=self.target.url)
            if time.monotonic() > deadline:
                raise httpcore.ReadTimeout("the answer trickles")
        return b"".join(chunks)

    def _refusal(self, method: str, path: str, status: int, answer: bytes) -> TargetRejected:
        hints = {
            401: "pass the engine's key: Target(url, api_key=...) or --api-key",
            403: "pass the engine's key: Target(url, api_key=...) or --api-key",
            404: "this server has no such route; is it an engine with the weightcast receiver?",
        }
        return TargetRejected(
            f"{self.target.url} refused {method} {path} with status {status}: {_words(answer)}",
            url=self.target.url,
            hint=hints.get(status),
            status=status,
        )

    def _failure(self, method: str, path: str, limit_s: float, error: Exception) -> WeightcastError:
        """What a request that got no answer means."""
        url = self.target.url
        trouble = tls_trouble(error, has_certificate=self.target.cert_file is not None)
        if trouble is not None:
            return TargetUnreachable(f"{url}: {trouble[0]}", url=url, hint=trouble[1])
        if isinstance(error, httpcore.ConnectTimeout | httpcore.ConnectError):
            hint = "check host and port; is the engine up? try `weightcast doctor`"
            return TargetUnreachable(f"{url}: cannot connect: {error}", url=url, hint=hint)
        if isinstance(error, httpcore.TimeoutException):
            return DeadlineExceeded(who=url, waiting_for=f"the answer to {method} {path}", timeout_s=limit_s)
        hint = None
        if not isinstance(self._trust, ssl.SSLContext):
            hint = "if it speaks TLS, write https:// in its URL"  # it hangs up on plain HTTP
        elif hangs_up_after_handshake(self.target.host, self._root.port or 443, self._trust):
            words, hint = client_distrusted(has_certificate=self.target.cert_file is not None)
            return TargetUnreachable(f"{url}: {words}", url=url, hint=hint)
        return TargetLost(f"{url}: connection broke during {method} {path}: {error}", url=url, hint=hint)


class Lease:
    """An answer that is kept open on purpose."""

    def __init__(self, response: httpcore.Response, chunks: Iterator[bytes]) -> None:
        self._response = response
        self._chunks = chunks  # httpcore closes the connection when this is collected

    def close(self) -> None:
        """Let go; safe to call twice."""
        self._response.close()


def _hang_up_on_failure(response: httpcore.Response) -> None:
    """Use the connection no more after a status of 500 or above.

    A server whose route raised (uvicorn) answers, and closes the connection a moment later without having said so: the
    next request would be lost in it.
    """
    if response.status >= 500:
        response.extensions["network_stream"].close()


def _read_frame(chunks: Iterator[bytes], deadline: float) -> bytes:
    """First frame of a stream: a 4-byte big-endian length and that many bytes."""
    data = bytearray()
    while True:
        if len(data) >= _FRAME_BYTES:
            end = _FRAME_BYTES + int.from_bytes(data[:_FRAME_BYTES], "big")
            if end > _MAX_FRAME_BYTES:
                raise EOFError("the first frame is too large to be an answer")
            if len(data) >= end:
                return bytes(data[_FRAME_BYTES:end])
        if time.monotonic() > deadline:
            raise httpcore.ReadTimeout("the answer trickles")
        chunk = next(chunks, None)
        if chunk is None:
            raise EOFError("the answer ended early")
        data += chunk


def _words(answer: bytes) -> str:
    """The engine's own words, whatever envelope it put them in."""
    text = answer.decode(errors="replace").strip()[:500] or "no text"
    try:
        body: Any = json.loads(answer)
    except (ValueError, RecursionError):
        return text
    fields: dict[str, Any] = body if isinstance(body, dict) else {}
    for key in ("error", "detail", "message"):
        inner: Any = fields.get(key)
        if isinstance(inner, dict):
            inner = inner.get("message", inner)
        if inner:
            return str(inner)[:2000]
    return text
