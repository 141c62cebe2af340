"""Several API servers of one vLLM (``--api-server-count N``): the first owns the sessions, and the others ask it.

The servers are processes that share one port, so a request may reach any of them.  Each has its own connection to the
engine cores.  Pauses, caches and weight versions are the cores' own and hold for the requests of all servers.  Sessions
are the owner's alone: every other server hands requests that concern updates on to it, by HTTP over a Unix socket.
One connection carries one request and its answer, so the owner notices when the client hangs up.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvicorn
from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    ConnectionTimeoutError,
    UnixConnector,
)
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from weightcast.errors import ConfigError, EngineFailure
from weightcast.receiver.server import refusal
from weightcast.runtime.deadline import Deadline

log = logging.getLogger("weightcast.plugins.vllm")

_START_S = 600.0
_LOOK_S = 0.1
_TIMEOUT = ClientTimeout(total=None, sock_connect=1.0)  # a lease lasts as long as its session
_ROUTES = "/weightcast/"
_KEPT_APART = frozenset({"/sleep", "/wake_up", "/release_kv_cache_memory", "/resume"})  # vLLM's own; see ``sleep``
_OF_A_CONNECTION = frozenset({b"connection", b"expect", b"keep-alive", b"te", b"transfer-encoding", b"upgrade"})
_GONE = "API server 0, which owns the sessions of updates, "


def number_of(vllm_config: Any, args: Any) -> tuple[int, int]:
    """Returns the number of this API server, and how many there are.

    Raises:
        ConfigError: There are several, and this version of vLLM does not number them.
    """
    servers = int(getattr(args, "api_server_count", None) or 1)
    number = getattr(vllm_config.parallel_config, "_api_process_rank", None)
    if servers > 1 and number is None:
        raise ConfigError(
            "several API servers cannot update one engine, since this version of vLLM does not number them",
            hint="set --api-server-count 1; with --data-parallel-size, vllm serve starts several by default",
        )
    return max(number or 0, 0), servers


class Door(uvicorn.Server):
    """The owner's Unix socket, in a folder that no other user can enter.

    Its methods run on the server's event loop.
    """

    def __init__(self, app: ASGIApp) -> None:
        """``app`` is the owner's whole app, whose checks of keys apply to requests of other servers too."""
        self._folder = TemporaryDirectory(prefix="weightcast-")
        self.path = str(Path(self._folder.name) / "owner")
        os.mknod(self.path, 0o600 | stat.S_IFSOCK)  # uvicorn keeps the mode of a socket that it finds
        # The other server adds the headers of its own, and vLLM's server has set up the log.
        own: dict[str, Any] = {"server_header": False, "date_header": False, "proxy_headers": False, "log_config": None}
        super().__init__(uvicorn.Config(app, uds=self.path, lifespan="off", ws="none", **own))

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leaves signals to vLLM's own server in this process."""
        yield

    async def open(self) -> str:
        """Returns the path of the socket, to which the other servers can connect from now on."""
        self._serving = asyncio.create_task(self._serve_until_closed())
        while not self.started:
            await asyncio.sleep(_LOOK_S)
        return self.path

    async def close(self) -> None:
        """Ends the requests of other servers, and deletes the socket."""
        self.should_exit = self.force_exit = True
        await self._serving

    async def _serve_until_closed(self) -> None:
        with self._folder:
            await self.serve()


async def found_door(ask: Callable[[], Awaitable[Any]], number: int) -> str:
    """Returns the path of the owner's socket once it is open; then the owner is ready, too.

    Args:
        ask: Asks the engine cores for the path, which the owner tells them.

    Raises:
        EngineFailure: The owner did not open it in time.
    """
    deadline = Deadline(_START_S)
    while not (path := str(await ask())):
        if deadline.left_s() <= 0:
            raise EngineFailure(f"{_GONE}was not ready within {_START_S:g} s")
        await asyncio.sleep(_LOOK_S)
    log.info("weightcast: API server %d hands requests that concern updates on to API server 0", number)
    return path


def add_first(app: FastAPI, middleware: Any, **arguments: Any) -> None:
    """Adds a middleware around all others, also to an app that has put them together already, as vLLM 0.25 has."""
    app.user_middleware.insert(0, Middleware(middleware, **arguments))
    if app.middleware_stack is not None:
        app.middleware_stack = app.build_middleware_stack()


class HandsOn:
    """Middleware of an API server: requests that concern updates go to the owner, if that is another process."""

    def __init__(self, app: ASGIApp, *, owner: Callable[[], str]) -> None:
        """``owner`` returns the path of the owner's socket; empty in the owner itself."""
        self._app = app
        self._owner = owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Has a request answered here or by the owner."""
        path = self._owner() if scope["type"] == "http" else ""
        root = scope.get("root_path", "")
        if not path or not _concerns_updates(scope["path"].removeprefix(root)):
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        url = URL.build(
            scheme="http",
            host="owner",
            path=scope["raw_path"].decode().removeprefix(root),
            query_string=scope["query_string"].decode(),
            encoded=True,
        )
        has_body = "content-length" in request.headers or "transfer-encoding" in request.headers
        async with ClientSession(connector=UnixConnector(path), auto_decompress=False, timeout=_TIMEOUT) as session:
            try:
                answer = await session.request(
                    request.method,
                    url,
                    data=request.stream() if has_body else None,
                    headers=[(name.decode(), value.decode()) for name, value in _end_to_end(request.headers.raw)],
                    skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                    allow_redirects=False,
                )
            except (ClientConnectorError, ConnectionTimeoutError) as error:
                await refusal(503, f"{_GONE}cannot be reached: {error}")(scope, receive, send)
                return
            async with answer:
                response = StreamingResponse(_parts(answer), answer.status)
                response.raw_headers = _end_to_end(answer.raw_headers)
                await response(scope, receive, send)


def _concerns_updates(path: str) -> bool:
    return path.startswith(_ROUTES) or path in _KEPT_APART


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Leaves out what belongs to one connection."""
    return [(name.lower(), value) for name, value in headers if name.lower() not in _OF_A_CONNECTION]


async def _parts(answer: ClientResponse) -> AsyncIterator[bytes]:
    """Yields the owner's answer.  Raises ``EngineFailure`` if it ends early: it must not look like a whole one."""
    try:
        async for part in answer.content.iter_any():
            yield part
    except ClientError as error:
        raise EngineFailure(f"{_GONE}has ended in the middle of an answer") from error
