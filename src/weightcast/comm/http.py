"""The HTTP client for engines: deadlines, bearer key, and the engine's own words in every error.

Requests run on the event loop of ``comm/event_loop.py``, so that a thousand of them need no thread each.  There are no
redirects, cookies or proxies.
"""

from __future__ import annotations

import asyncio
import errno
import json
import ssl
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from weightcast.comm import event_loop
from weightcast.comm.http_answer import Answer, NoAnswer
from weightcast.comm.http_connections import Connection
from weightcast.comm.http_pool import CannotConnect, ConnectionLimit, NoRoom, Pool
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
from weightcast.wire.fields import shown

_CONNECT_S = 10.0
_MAX_CONNECTIONS = 8
_DIAGNOSIS_S = 2.0  # for finding out why a connection broke
_MAX_REPLY_BYTES = 512 << 20
_MAX_FRAME_BYTES = 64 << 20
_COPIED_BYTES = 64 << 10  # a smaller body is sent with its head, in one system call
_PORTS = {"http": 80, "https": 443}


class Client:
    """HTTP to one target.  Thread-safe; ``close`` is safe to call twice.

    Each request has two forms: a coroutine for the event loop (``get``, ``post``, ``lease``) and a function that waits
    for it (``get_json``, ``post_json``, ``open_lease``).
    """

    def __init__(
        self,
        target: Target,
        *,
        timeout_s: float,
        max_connections: int = _MAX_CONNECTIONS,
        limit: ConnectionLimit | None = None,
    ) -> None:
        """Makes the client without sending anything; ConfigError for a bad certificate file or host name.

        ``timeout_s`` is for requests that set none, and ``max_connections`` limits those under way at the same time.
        ``limit`` holds for several clients together.
        """
        headers = {"content-type": "application/json", "accept-encoding": "identity", "user-agent": "weightcast"}
        if target.api_key is not None:
            headers["authorization"] = f"Bearer {target.api_key}"
        self.target = target
        self.timeout_s = timeout_s
        parts = urlsplit(target.url)
        try:
            self._host = (parts.hostname or "").encode("idna").decode()
        except UnicodeError as error:
            raise ConfigError(
                f"{target.url} has no valid host name: {error}", hint="check the spelling of the host name"
            ) from error
        self._port = parts.port or _PORTS[parts.scheme]
        self._prefix = quote(parts.path.rstrip("/"), safe="/%")
        named = f"[{self._host}]" if ":" in self._host else self._host
        headers["host"] = named if parts.port is None else f"{named}:{parts.port}"
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._trust: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._trust = client_context(ca_file=target.ca_file, cert_file=target.cert_file, key_file=target.key_file)
            self._trust.set_alpn_protocols(["http/1.1"])
        self._max_connections = max_connections
        self._limit = limit or ConnectionLimit()
        self._pool: Pool | None = None
        self._closed = False

    def get_json(self, path: str, *, timeout_s: float | Deadline | None = None) -> bytes:
        """Sends a GET and returns the body of the answer.  Arguments and errors are those of ``post_json``."""
        return event_loop.run(self.get(path, timeout_s=timeout_s))

    def post_json(self, path: str, body: bytes, *, timeout_s: float | Deadline | None = None) -> bytes:
        """Posts JSON bytes and returns the body of the answer.

        ``timeout_s`` is one deadline for name resolution, connecting, sending and the whole answer; None takes the
        client's.

        Raises:
            TargetUnreachable: Nothing listens there, the name does not resolve, or one end does not trust the other.
            DeadlineExceeded: The engine did not answer within the deadline.
            TargetLost: The connection broke after the request was sent, or the answer is a redirect.
            TargetRejected: The engine answered with a status of 400 or more; the error has its own words.
        """
        return event_loop.run(self.post(path, body, timeout_s=timeout_s))

    def open_lease(self, path: str, body: bytes, *, timeout_s: float | Deadline | None = None) -> tuple[bytes, Lease]:
        """Posts JSON bytes; returns the answer's first frame and the lease on its stream, which the caller closes."""
        return event_loop.run(self.lease(path, body, timeout_s=timeout_s))

    async def get(self, path: str, *, timeout_s: float | Deadline | None = None) -> bytes:
        """As ``get_json``."""
        return (await self._ask("GET", path, None, timeout_s)).body

    async def post(
        self, path: str, body: bytes, *, timeout_s: float | Deadline | None = None, at_once: bool = False
    ) -> bytes:
        """As ``post_json``; with ``at_once``, the request does not wait for the answers of other engines."""
        return (await self._ask("POST", path, body, timeout_s, at_once=at_once)).body

    async def lease(self, path: str, body: bytes, *, timeout_s: float | Deadline | None = None) -> tuple[bytes, Lease]:
        """As ``open_lease``."""
        lease: list[Lease] = []
        answer = await self._ask("POST", path, body, timeout_s, lease)
        frame = answer.frame
        assert frame is not None
        return frame, lease[0]

    @property
    def closed(self) -> bool:
        """True after ``close``."""
        return self._closed

    def close(self) -> None:
        """Closes every connection."""
        self._closed = True
        if self._pool is not None:
            event_loop.call(self._pool.close, self._pool.loop)

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float | Deadline | None,
        lease: list[Lease] | None = None,
        *,
        at_once: bool = False,
    ) -> Answer:
        """Sends a request and returns a good answer; with ``lease``, its stream stays open and goes there."""
        if self._closed:
            raise RuntimeError(f"{self.target.url}: this client is closed")
        if not isinstance(timeout_s, Deadline):
            timeout_s = Deadline(self.timeout_s if timeout_s is None else timeout_s)
        pool = self._pool
        if pool is None or pool.loop is not asyncio.get_running_loop():  # none yet, or that of a parent process
            pool = self._pool = Pool(
                self._host, self._port, self._trust, max_connections=self._max_connections, limit=self._limit
            )
        try:
            connection = await pool.take(timeout_s, connect_s=_CONNECT_S, at_once=at_once)
            answer = Answer(stream=lease is not None, max_bytes=_MAX_REPLY_BYTES, max_frame_bytes=_MAX_FRAME_BYTES)
            kept = False
            try:
                await self._exchange(connection, answer, method, path, body, timeout_s)
                self._check(answer, method, path)
                if lease is not None:
                    connection.pause()
                    pool.lend(connection)
                    lease.append(Lease(pool, connection))
                    kept = True
            finally:
                if not kept:
                    (pool.give_back if answer.reusable and answer.done.done() else pool.discard)(connection)
                answer.release()
        except (CannotConnect, NoAnswer, TimeoutError) as error:
            raise await self._failure(method, path, timeout_s, error) from error
        return answer

    async def _exchange(
        self, connection: Connection, answer: Answer, method: str, path: str, body: bytes | None, deadline: Deadline
    ) -> None:
        if deadline.left_s() <= 0:
            raise TimeoutError("timed out")
        length = "" if body is None else f"content-length: {len(body)}\r\n"
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{length}\r\n"
        connection.listen(answer)
        if body is not None and len(body) > _COPIED_BYTES:
            connection.send(head.encode())
            connection.send(body)
        else:
            connection.send(head.encode() + (body or b""))
        try:
            await event_loop.within(answer.done, deadline)
        except BaseException:
            answer.reusable = False  # the answer may still come
            raise

    def _check(self, answer: Answer, method: str, path: str) -> None:
        url = self.target.url
        if answer.encoding.lower() != b"identity":
            words = f"{url} answered in {answer.encoding.decode(errors='replace')}, which was not asked for"
            raise TargetLost(words, url=url, hint="check whether a proxy in between compresses answers")
        if answer.too_large:
            raise TargetLost(f"{url} answered with more than {_MAX_REPLY_BYTES} bytes", url=url)
        if answer.status >= 400:
            raise self._refusal(method, path, answer.status, answer.body)
        if answer.status >= 300:
            there = urljoin(url + path, shown(answer.location.decode(errors="replace")))
            raise TargetLost(
                f"{url} redirects {method} {path} to {there} (status {answer.status}), and redirects are not followed",
                url=url,
                hint=f"use {there.partition('?')[0].removesuffix(path.partition('?')[0])} as the URL of the engine",
            )

    def _refusal(self, method: str, path: str, status: int, answer: bytes) -> TargetRejected:
        hints = {
            401: "pass the engine's key: Target(url, api_key=...) or --api-key",
            403: "pass the engine's key: Target(url, api_key=...) or --api-key",
            404: "this server has no such route; check that it is an engine with the weightcast receiver",
        }
        return TargetRejected(
            f"{self.target.url} refused {method} {path} with status {status}: {shown(_words(answer))}",
            url=self.target.url,
            hint=hints.get(status),
            status=status,
        )

    async def _failure(self, method: str, path: str, deadline: Deadline, error: Exception) -> WeightcastError:
        """Makes the error for a request that got no answer."""
        url = self.target.url
        trouble = tls_trouble(error, has_certificate=self.target.cert_file is not None)
        if trouble is not None:
            return TargetUnreachable(f"{url}: {trouble[0]}", url=url, hint=trouble[1])
        if isinstance(error, CannotConnect):
            hint = "check host and port and that the engine is up; try `weightcast doctor`"
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.EMFILE, errno.ENFILE):
                hint = "raise this process's limit of open files (`ulimit -n`): an update needs 2 or 3 for each engine"
            return TargetUnreachable(f"{url}: cannot connect: {error}", url=url, hint=hint)
        if isinstance(error, NoRoom):
            return DeadlineExceeded(
                who=url,
                waiting_for=f"a free connection for {method} {path}: {error}",
                timeout_s=deadline.limit_s,
                hint="other engines have not answered; raise this process's limit of open files (`ulimit -n`)",
            )
        if isinstance(error, TimeoutError):
            return DeadlineExceeded(who=url, waiting_for=f"the answer to {method} {path}", timeout_s=deadline.limit_s)
        hint = None
        if self._trust is None:
            hint = "if the engine speaks TLS, write https:// in its URL"  # such a server hangs up on plain HTTP
        elif await hangs_up_after_handshake(self._host, self._port, self._trust, deadline=Deadline(_DIAGNOSIS_S)):
            words, hint = client_distrusted(has_certificate=self.target.cert_file is not None)
            return TargetUnreachable(f"{url}: {words}", url=url, hint=hint)
        return TargetLost(f"{url}: the connection broke during {method} {path}: {error}", url=url, hint=hint)


class Lease:
    """An answer whose stream stays open until ``close``."""

    def __init__(self, pool: Pool, connection: Connection) -> None:
        self._pool = pool
        self._connection = connection

    def close(self) -> None:
        """Closes the stream; safe to call twice and from any thread."""
        event_loop.call(lambda: self._pool.discard(self._connection), self._pool.loop)

    def __del__(self) -> None:
        if not self._connection.closed:
            with suppress(RuntimeError):  # the loop is gone at the interpreter's end, and its sockets with it
                self.close()


def _words(answer: bytes) -> str:
    """Takes the engine's own words out of the body of an error, as one line."""
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
