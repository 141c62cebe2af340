"""HTTP to an engine: one client, deadlines, bearer key, the engine's own words in every error.

It knows URLs and bytes, no engine's routes.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator
from typing import Any

import httpx

from weightcast.comm.tls import client_context, client_distrusted, hangs_up_after_handshake, tls_trouble
from weightcast.config import Target
from weightcast.errors import DeadlineExceeded, TargetLost, TargetRejected, TargetUnreachable, WeightcastError

_CONNECT_S = 10.0
# Below what servers allow (uvicorn: 5 s): a connection that the server is closing loses the request sent into it.
_KEEP_ALIVE_S = 2.0
_FRAME_BYTES = 4
_MAX_REPLY_BYTES = 512 << 20
_MAX_FRAME_BYTES = 64 << 20


class Client:
    """HTTP to one target.  Thread-safe; ``close`` is safe to call twice."""

    def __init__(self, target: Target, *, timeout_s: float) -> None:
        """Nothing is sent yet.

        Raises:
            ConfigError: A certificate file cannot be used.
        """
        headers = {"content-type": "application/json"}
        if target.api_key is not None:
            headers["authorization"] = f"Bearer {target.api_key}"
        self.target = target
        self.timeout_s = timeout_s
        self._trust: ssl.SSLContext | None = None
        if target.url.lower().startswith("https:"):
            self._trust = client_context(ca_file=target.ca_file, cert_file=target.cert_file, key_file=target.key_file)
        # trust_env=False: a proxy from the environment would sit between the trainer and the engine it is told of.
        self._client = httpx.Client(
            base_url=target.url,
            headers=headers,
            limits=httpx.Limits(max_connections=8, keepalive_expiry=_KEEP_ALIVE_S),
            # Over plain HTTP a context that trusts nobody: httpx would read all authorities, tens of milliseconds.
            verify=self._trust or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            trust_env=False,
        )
        self._client.timeout = self._timeouts(None)

    def get_json(self, path: str, *, timeout_s: float | None = None) -> bytes:
        """GET; the body of a 200."""
        return self._ask("GET", path, b"", timeout_s)

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
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        request = self._client.build_request("POST", path, content=body, timeout=self._timeouts(timeout_s))
        response: httpx.Response | None = None
        lease: Lease | None = None
        try:
            response = self._client.send(request, stream=True)
            if response.status_code >= 400:
                content = self._read(response, deadline)
                _hang_up_on_failure(response)
                raise self._refusal("POST", path, response.status_code, content)
            chunks = response.iter_raw()
            frame = _read_frame(chunks, deadline)
            lease = Lease(response, chunks)
            return frame, lease
        except (httpx.RequestError, EOFError) as error:
            raise self._failure("POST", path, timeout_s, error) from error
        finally:
            if lease is None and response is not None:
                response.close()  # who has not got a lease holds none: the engine hears of it now

    def close(self) -> None:
        """Close every connection."""
        self._client.close()

    def _timeouts(self, timeout_s: float | None) -> httpx.Timeout:
        limit = self.timeout_s if timeout_s is None else timeout_s
        return httpx.Timeout(limit, connect=min(limit, _CONNECT_S))

    def _ask(self, method: str, path: str, body: bytes, timeout_s: float | None) -> bytes:
        limit = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        try:
            with self._client.stream(method, path, content=body, timeout=self._timeouts(limit)) as response:
                # httpx's own limit is on each read: an answer that trickles would never end.
                content = self._read(response, deadline)
                _hang_up_on_failure(response)
                if response.status_code >= 400:
                    raise self._refusal(method, path, response.status_code, content)
                return content
        except httpx.RequestError as error:
            raise self._failure(method, path, timeout_s, error) from error

    def _read(self, response: httpx.Response, deadline: float) -> bytes:
        chunks: list[bytes] = []
        size = 0
        for chunk in response.iter_bytes():
            chunks.append(chunk)
            size += len(chunk)
            if size > _MAX_REPLY_BYTES:
                raise TargetLost(f"{self.target.url}: its answer is too long", url=self.target.url)
            if time.monotonic() > deadline:
                raise httpx.ReadTimeout("the answer trickles")
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

    def _failure(self, method: str, path: str, timeout_s: float | None, error: Exception) -> WeightcastError:
        """What a request that got no answer means."""
        url = self.target.url
        trouble = tls_trouble(error, has_certificate=self.target.cert_file is not None)
        if trouble is not None:
            return TargetUnreachable(f"{url}: {trouble[0]}", url=url, hint=trouble[1])
        if isinstance(error, httpx.ConnectTimeout | httpx.ConnectError):
            hint = "check host and port; is the engine up? try `weightcast doctor`"
            return TargetUnreachable(f"{url}: cannot connect: {error}", url=url, hint=hint)
        if isinstance(error, httpx.TimeoutException):
            limit = self.timeout_s if timeout_s is None else timeout_s
            return DeadlineExceeded(who=url, waiting_for=f"the answer to {method} {path}", timeout_s=limit)
        hint = None
        if not isinstance(self._trust, ssl.SSLContext):
            hint = "if it speaks TLS, write https:// in its URL"  # it hangs up on plain HTTP
        elif hangs_up_after_handshake(self.target.host, self._client.base_url.port or 443, self._trust):
            words, hint = client_distrusted(has_certificate=self.target.cert_file is not None)
            return TargetUnreachable(f"{url}: {words}", url=url, hint=hint)
        return TargetLost(f"{url}: connection broke during {method} {path}: {error}", url=url, hint=hint)


class Lease:
    """An answer that is kept open on purpose."""

    def __init__(self, response: httpx.Response, chunks: Iterator[bytes]) -> None:
        self._response = response
        self._chunks = chunks  # httpx closes the connection when this is collected

    def close(self) -> None:
        """Let go; safe to call twice."""
        self._response.close()


def _hang_up_on_failure(response: httpx.Response) -> None:
    """Use the connection no more after a status of 500 or above.

    A server whose route raised (uvicorn) answers, and closes the connection a moment later without having said so: the
    next request would be lost in it.
    """
    if response.status_code >= 500:
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
            raise httpx.ReadTimeout("the answer trickles")
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
