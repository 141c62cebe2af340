"""The HTTP client for engines: deadlines, bearer key, and the engine's own words in every error.

aiohttp sends the requests, on the event loop of ``comm/event_loop.py``, so that a thousand of them need no thread each.
There are no redirects, cookies or proxies.
"""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
from contextlib import nullcontext, suppress
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import aiohttp
from yarl import URL

from weightcast.comm import event_loop
from weightcast.comm.http_session import (
    Asking,
    Malformed,
    abort_connections,
    asks,
    hangs_up_after_handshake,
    new_session,
    shared,
)
from weightcast.comm.tls import client_context, client_distrusted, tls_trouble
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

_DIAGNOSIS_S = 2.0  # for finding out why a connection broke
_MAX_REPLY_BYTES = 512 << 20
_MAX_FRAME_BYTES = 64 << 20
_LENGTH_BYTES = 4
_WHOLE_BYTES = 1 << 20  # a larger body is sent in pieces
_SERVER_FAILED = 500
_AT_ONCE = nullcontext()
_PORTS = {"http": 80, "https": 443}


class _NoAnswer(Exception):
    """The answer is none that can be used, or only a part of one has come."""


class Client:
    """HTTP to one target.  Thread-safe; ``close`` is safe to call twice.

    Each request has two forms: a coroutine for the event loop (``get``, ``post``, ``lease``) and a function that waits
    for it (``get_json``, ``post_json``, ``open_lease``).
    """

    def __init__(self, target: Target, *, timeout_s: float) -> None:
        """Makes the client without sending anything; ConfigError for a bad certificate file or host name.

        ``timeout_s`` is for requests that set none.
        """
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the session
        self._session: aiohttp.ClientSession | None = None
        self._urls: dict[str, URL] = {}
        self._headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            "user-agent": "weightcast",
        }
        if target.api_key is not None:
            self._headers["authorization"] = f"Bearer {target.api_key}"
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
        named = f"[{self._host}]" if ":" in self._host else self._host
        self._base = f"{parts.scheme}://{named}:{self._port}{quote(parts.path.rstrip('/'), safe='/%')}"
        self._trust = None
        if parts.scheme == "https":
            self._trust = client_context(ca_file=target.ca_file, cert_file=target.cert_file, key_file=target.key_file)
            self._trust.set_alpn_protocols(["http/1.1"])

    def get_json(self, path: str, *, timeout_s: float | Deadline | None = None) -> bytes:
        """Sends a GET and returns the body of the answer.  Arguments and errors are those of ``post_json``."""
        return event_loop.run(self.get(path, timeout_s=timeout_s))

    def post_json(self, path: str, body: bytes, *, timeout_s: float | Deadline | None = None) -> bytes:
        """Posts JSON bytes and returns the body of the answer.

        ``timeout_s`` is one deadline for name resolution, connecting, sending and the whole answer; None takes the
        client's.  Connecting takes at most 10 s of it.  Over TLS, finding out why a connection broke can take 2 s more.

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
        return (await self._ask("GET", path, None, timeout_s))[0]

    async def post(
        self, path: str, body: bytes, *, timeout_s: float | Deadline | None = None, at_once: bool = False
    ) -> bytes:
        """As ``post_json``; with ``at_once``, the request does not wait for the answers of other engines."""
        return (await self._ask("POST", path, body, timeout_s, at_once=at_once))[0]

    async def lease(self, path: str, body: bytes, *, timeout_s: float | Deadline | None = None) -> tuple[bytes, Lease]:
        """As ``open_lease``."""
        frame, asking = await self._ask("POST", path, body, timeout_s, lease=True)
        return frame, Lease(asking)

    @property
    def closed(self) -> bool:
        """True after ``close``."""
        return self._closed

    def close(self) -> None:
        """Closes every connection, also under requests and leases, which end at once.

        A request that is still connecting ends when it has connected, or at its deadline.
        """
        self._closed = True
        if self._loop is not None:
            event_loop.call(self._end_session, self._loop)

    def __del__(self) -> None:
        if not self._closed:
            with suppress(RuntimeError):  # the loop is gone at the interpreter's end, and its sockets with it
                self.close()

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            abort_connections(session)
            event_loop.end_session(session)

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float | Deadline | None,
        *,
        lease: bool = False,
        at_once: bool = False,
    ) -> tuple[bytes, Asking]:
        """Sends a request; returns the body of a good answer, or with ``lease`` the first frame of its open stream."""
        if self._closed:
            raise RuntimeError(f"{self.target.url}: this client is closed")
        if not isinstance(timeout_s, Deadline):
            timeout_s = Deadline(self.timeout_s if timeout_s is None else timeout_s)
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:  # none yet, or that of a parent process
            self._loop, self._session = loop, event_loop.keep_session(new_session(self._headers, self._trust))
        asking = asks()
        data = io.BytesIO(body) if body is not None and len(body) > _WHOLE_BYTES else body
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(f"{self._base}{path}", encoded=True)
        here = shared()
        kept = False
        try:
            if timeout_s.left_s() <= 0:
                raise TimeoutError
            async with event_loop.Limited(timeout_s), _AT_ONCE if at_once else here.room:
                asking.has_room = True
                if self.closed:  # since ``close``, while this request waited
                    raise _NoAnswer("this client is closed")
                asking.response = response = await self._session.request(method, url, data=data, allow_redirects=False)
                # When a route raises, uvicorn answers and closes the connection a moment later without notice.
                # The next request on that connection would be lost.
                if response.status >= _SERVER_FAILED or (here.full and not lease):
                    asking.use_no_more()
                answer = await self._read(response, frame=lease)
                self._check(response, method, path, answer)
                kept = lease
        except (aiohttp.ClientError, OSError, _NoAnswer) as error:  # a TimeoutError is an OSError
            raise await self._failure(method, path, timeout_s, asking, error) from error
        finally:
            if not kept:
                asking.end()
        return answer, asking

    async def _read(self, response: aiohttp.ClientResponse, *, frame: bool) -> bytes:
        """Reads the body; with ``frame``, the first frame of a good one: a 4-byte big-endian length and its bytes."""
        url, content = self.target.url, response.content
        encoding = response.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            words = f"{url} answered in {shown(encoding)}, which was not asked for"
            raise TargetLost(words, url=url, hint="check whether a proxy in between compresses answers")
        if response.status < 200:
            raise _NoAnswer("the engine switches to another protocol")
        size, parts = 0, list[bytes]()
        try:
            if frame and response.status < 300:
                length = int.from_bytes(await content.readexactly(_LENGTH_BYTES), "big")
                if length > _MAX_FRAME_BYTES:
                    raise _NoAnswer("the first frame is too large to be an answer")
                return await content.readexactly(length)
            while part := await content.readany():
                parts.append(part)
                size += len(part)
                if size > _MAX_REPLY_BYTES:
                    raise TargetLost(f"{url} answered with more than {_MAX_REPLY_BYTES} bytes", url=url)
        except (asyncio.IncompleteReadError, aiohttp.ClientPayloadError) as error:
            came = "" if frame else f", after {size} bytes"
            why = f": {shown(str(error))}" if isinstance(error, Malformed) else ""
            raise _NoAnswer(f"the answer ended early{came}{why}") from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _check(self, response: aiohttp.ClientResponse, method: str, path: str, answer: bytes) -> None:
        url, status = self.target.url, response.status
        if status >= 400:
            raise self._refusal(method, path, status, answer)
        if status >= 300:
            there = urljoin(url + path, shown(response.headers.get("location", "")))
            raise TargetLost(
                f"{url} redirects {method} {path} to {there} (status {status}), and redirects are not followed",
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

    async def _failure(
        self, method: str, path: str, deadline: Deadline, asking: Asking, error: Exception
    ) -> WeightcastError:
        """Makes the error for a request that got no answer."""
        url = self.target.url
        if self._closed:
            return TargetLost(f"{url}: {method} {path} ended because this client is closed", url=url)
        trouble = tls_trouble(error, has_certificate=self.target.cert_file is not None)
        if trouble is not None:
            return TargetUnreachable(f"{url}: {trouble[0]}", url=url, hint=trouble[1])
        late = isinstance(error, TimeoutError)
        if late and not asking.has_room:
            return DeadlineExceeded(
                who=url,
                waiting_for=f"room for {method} {path}: {shared().most} other requests were under way",
                timeout_s=deadline.limit_s,
                hint="other engines have not answered; raise this process's limit of open files (`ulimit -n`)",
            )
        if asking.transport is None:
            hint = "check host and port and that the engine is up; try `weightcast doctor`"
            if _number(error) in (errno.EMFILE, errno.ENFILE):
                hint = "raise this process's limit of open files (`ulimit -n`): an update needs 2 or 3 for each engine"
            return TargetUnreachable(f"{url}: cannot connect: {self._why(error)}", url=url, hint=hint)
        if late:
            return DeadlineExceeded(who=url, waiting_for=f"the answer to {method} {path}", timeout_s=deadline.limit_s)
        hint = None
        if self._trust is None:
            hint = "if the engine speaks TLS, write https:// in its URL"  # such a server hangs up on plain HTTP
        elif asking.peer is not None and await hangs_up_after_handshake(
            asking.peer, self._host, self._trust, deadline=Deadline(_DIAGNOSIS_S)
        ):
            words, hint = client_distrusted(has_certificate=self.target.cert_file is not None)
            return TargetUnreachable(f"{url}: {words}", url=url, hint=hint)
        return TargetLost(f"{url}: the connection broke during {method} {path}: {self._why(error)}", url=url, hint=hint)

    def _why(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            if shared().names.looks_for(self._host):
                return f"the name {self._host} was not resolved in time"
            return "timed out"
        if isinstance(error, aiohttp.ServerDisconnectedError):
            return "it closed the connection without an answer"
        if isinstance(error, aiohttp.ClientResponseError):
            return shown(error.message).strip(" :")
        number = _number(error)
        return str(error) if not number or number < 0 else f"[Errno {number}] {os.strerror(number)}"


def _number(error: BaseException | None) -> int | None:
    """The system's number of the error at the bottom."""
    while error is not None and not (isinstance(error, OSError) and error.errno is not None):
        error = error.__cause__
    return error.errno if isinstance(error, OSError) else None


class Lease:
    """An answer whose stream stays open until ``close``."""

    def __init__(self, asking: Asking) -> None:
        self._loop = asyncio.get_running_loop()
        self._asking = asking
        self._closed = False
        shared().streams += 1

    def close(self) -> None:
        """Closes the stream; safe to call twice and from any thread."""
        event_loop.call(self._close, self._loop)

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._asking.end()
            shared().streams -= 1

    def __del__(self) -> None:
        if not self._closed:
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
