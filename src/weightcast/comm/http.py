"""The HTTP client for engines: deadlines, bearer key, and the engine's own words in every error.

It stands on httpcore, like httpx.  We need nothing that httpx adds (redirects, cookies, proxies), and those would cost
half a millisecond for each message.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import quote, urlsplit

import httpcore

from weightcast.comm.http_connections import Backend
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
from weightcast.runtime.deadline import Deadline

_CONNECT_S = 10.0
# Shorter than servers keep a connection (uvicorn: 5 s).  A request on a connection that the server is closing is lost.
_KEEP_ALIVE_S = 2.0
_MAX_CONNECTIONS = 8
_DIAGNOSIS_S = 2.0  # for finding out why a connection broke
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

    def __init__(self, target: Target, *, timeout_s: float, max_connections: int = _MAX_CONNECTIONS) -> None:
        """Makes the client without sending anything.

        Args:
            target: The engine.
            timeout_s: Deadline of each request that sets none, in seconds.
            max_connections: Requests that may be under way at the same time.

        Raises:
            ConfigError: A certificate file cannot be used, or the host name is not valid.
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
            raise ConfigError(
                f"{target.url} has no valid host name: {error}", hint="check the spelling of the host name"
            ) from error
        self._root = httpcore.URL(scheme=parts.scheme, host=host, port=parts.port, target="/")
        self._prefix = quote(parts.path.rstrip("/"), safe="/%")
        named = f"[{host.decode()}]" if b":" in host else host.decode()
        headers["host"] = named if parts.port is None else f"{named}:{parts.port}"
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._trust: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._trust = client_context(ca_file=target.ca_file, cert_file=target.cert_file, key_file=target.key_file)
        self._pool = httpcore.ConnectionPool(
            ssl_context=self._trust,
            max_connections=max_connections,
            keepalive_expiry=_KEEP_ALIVE_S,
            network_backend=Backend(),
        )
        self._closed = False

    def get_json(self, path: str, *, timeout_s: float | Deadline | None = None) -> bytes:
        """Sends a GET and returns the body of the answer.  Arguments and errors are those of ``post_json``."""
        return self._ask("GET", path, None, timeout_s)

    def post_json(self, path: str, body: bytes, *, timeout_s: float | Deadline | None = None) -> bytes:
        """Posts JSON bytes and returns the body of the answer.

        Args:
            path: Route, relative to the path of the target's URL.
            body: JSON.
            timeout_s: One deadline for name resolution, connecting, sending and the whole answer, in seconds.  None
                takes the client's own.

        Raises:
            TargetUnreachable: Nothing listens there, the name does not resolve, or one end does not trust the other.
            DeadlineExceeded: The engine did not answer within the deadline.
            TargetLost: The connection broke after the request was sent.
            TargetRejected: The engine answered with a status of 400 or more; the error has its own words.
        """
        return self._ask("POST", path, body, timeout_s)

    def open_lease(self, path: str, body: bytes, *, timeout_s: float | Deadline | None = None) -> tuple[bytes, Lease]:
        """Posts JSON bytes and keeps the answer's stream open; closing it tells the engine that the caller is gone.

        Returns:
            The first frame of the answer and the lease.
        """
        deadline = self._deadline(timeout_s)
        response: httpcore.Response | None = None
        lease: Lease | None = None
        try:
            response = self._send("POST", path, body, deadline)
            if response.status >= 400:
                content = self._read(response)
                _hang_up_on_failure(response)
                raise self._refusal("POST", path, response.status, content)
            chunks = response.iter_stream()
            frame = _read_frame(chunks)
            lease = Lease(response, chunks)
            return frame, lease
        except (*_FAILURES, EOFError) as error:
            raise self._failure("POST", path, deadline, error) from error
        finally:
            if lease is None and response is not None:
                response.close()  # the caller got no lease, so the engine must see the stream close now

    def close(self) -> None:
        """Closes every connection."""
        self._closed = True
        self._pool.close()

    def _deadline(self, timeout_s: float | Deadline | None) -> Deadline:
        if isinstance(timeout_s, Deadline):
            return timeout_s
        return Deadline(self.timeout_s if timeout_s is None else timeout_s)

    def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float | Deadline | None) -> bytes:
        deadline = self._deadline(timeout_s)
        try:
            with closing(self._send(method, path, body, deadline)) as response:
                content = self._read(response)
                _hang_up_on_failure(response)
                if response.status >= 400:
                    raise self._refusal(method, path, response.status, content)
                return content
        except _FAILURES as error:
            raise self._failure(method, path, deadline, error) from error

    def _send(self, method: str, path: str, body: bytes | None, deadline: Deadline) -> httpcore.Response:
        """Sends a request and reads the head of the answer; the caller closes the response."""
        if self._closed:
            raise RuntimeError(f"{self.target.url}: this client is closed")
        root = self._root
        url = httpcore.URL(scheme=root.scheme, host=root.host, port=root.port, target=self._prefix + path)
        length = [] if body is None else [(b"content-length", str(len(body)).encode())]
        # Our connections take a ``Deadline``; only the pool's limit stays within httpcore, which takes seconds.
        limits: dict[str, Any] = {"connect": deadline.at_most(_CONNECT_S), "read": deadline, "write": deadline}
        limits["pool"] = max(deadline.left_s(), 0.0)
        request = httpcore.Request(
            method, url, headers=[*self._headers, *length], content=body, extensions={"timeout": limits}
        )
        response = self._pool.handle_request(request)
        encoding = next((value for name, value in response.headers if name.lower() == b"content-encoding"), b"identity")
        if encoding.lower() != b"identity":
            response.close()
            words = f"{self.target.url} answered in {encoding.decode(errors='replace')}, which was not asked for"
            raise TargetLost(words, url=self.target.url, hint="check whether a proxy in between compresses answers")
        return response

    def _read(self, response: httpcore.Response) -> bytes:
        chunks: list[bytes] = []
        size = 0
        for chunk in response.iter_stream():
            chunks.append(chunk)
            size += len(chunk)
            if size > _MAX_REPLY_BYTES:
                raise TargetLost(
                    f"{self.target.url} answered with more than {_MAX_REPLY_BYTES} bytes", url=self.target.url
                )
        return b"".join(chunks)

    def _refusal(self, method: str, path: str, status: int, answer: bytes) -> TargetRejected:
        hints = {
            401: "pass the engine's key: Target(url, api_key=...) or --api-key",
            403: "pass the engine's key: Target(url, api_key=...) or --api-key",
            404: "this server has no such route; check that it is an engine with the weightcast receiver",
        }
        return TargetRejected(
            f"{self.target.url} refused {method} {path} with status {status}: {_words(answer)}",
            url=self.target.url,
            hint=hints.get(status),
            status=status,
        )

    def _failure(self, method: str, path: str, deadline: Deadline, error: Exception) -> WeightcastError:
        """Makes the error for a request that got no answer."""
        url = self.target.url
        trouble = tls_trouble(error, has_certificate=self.target.cert_file is not None)
        if trouble is not None:
            return TargetUnreachable(f"{url}: {trouble[0]}", url=url, hint=trouble[1])
        if isinstance(error, httpcore.ConnectTimeout | httpcore.ConnectError):
            hint = "check host and port and that the engine is up; try `weightcast doctor`"
            return TargetUnreachable(f"{url}: cannot connect: {error}", url=url, hint=hint)
        if isinstance(error, httpcore.TimeoutException):
            return DeadlineExceeded(who=url, waiting_for=f"the answer to {method} {path}", timeout_s=deadline.limit_s)
        hint = None
        if not isinstance(self._trust, ssl.SSLContext):
            hint = "if the engine speaks TLS, write https:// in its URL"  # such a server hangs up on plain HTTP
        elif hangs_up_after_handshake(
            self.target.host, self._root.port or 443, self._trust, deadline=Deadline(_DIAGNOSIS_S)
        ):
            words, hint = client_distrusted(has_certificate=self.target.cert_file is not None)
            return TargetUnreachable(f"{url}: {words}", url=url, hint=hint)
        return TargetLost(f"{url}: the connection broke during {method} {path}: {error}", url=url, hint=hint)


class Lease:
    """An answer whose stream stays open until ``close``."""

    def __init__(self, response: httpcore.Response, chunks: Iterator[bytes]) -> None:
        self._response = response
        self._chunks = chunks  # httpcore closes the connection when this is collected

    def close(self) -> None:
        """Closes the stream; safe to call twice."""
        self._response.close()


def _hang_up_on_failure(response: httpcore.Response) -> None:
    """Closes the connection after a status of 500 or above.

    When a route raises, uvicorn answers and closes the connection a moment later without notice.  The next request on
    that connection would be lost.
    """
    if response.status >= 500:
        response.extensions["network_stream"].close()


def _read_frame(chunks: Iterator[bytes]) -> bytes:
    """Reads the first frame of a stream: a 4-byte big-endian length and that many bytes."""
    data = bytearray()
    while True:
        if len(data) >= _FRAME_BYTES:
            end = _FRAME_BYTES + int.from_bytes(data[:_FRAME_BYTES], "big")
            if end > _MAX_FRAME_BYTES:
                raise EOFError("the first frame is too large to be an answer")
            if len(data) >= end:
                return bytes(data[_FRAME_BYTES:end])
        chunk = next(chunks, None)
        if chunk is None:
            raise EOFError("the answer ended early")
        data += chunk


def _words(answer: bytes) -> str:
    """Takes the engine's own words out of the body of an error."""
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
