"""Several API servers of one vLLM (``--api-server-count N``): the first owns the sessions, and the others ask it.

The servers are processes that share one port, so a request may reach any of them.  Each has its own connection to the
engine cores.  Pauses, caches and weight versions are the cores' own and hold for the requests of all servers.  Sessions
are the owner's alone: every other server hands requests that concern updates on to it, as ASGI messages over a Unix
socket.  One connection carries one request and its answer, so the owner notices when the client hangs up.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weightcast.errors import ConfigError, EngineFailure
from weightcast.receiver.server import refusal
from weightcast.runtime.deadline import Deadline

log = logging.getLogger("weightcast.plugins.vllm")

_START_S = 600.0
_LOOK_S = 0.1
_CONNECT_S = 1.0
_LENGTH_BYTES = 8
_CREDENTIALS = struct.Struct("3i")  # of a peer: process, user, group
_ROUTES = "/weightcast/"
_KEPT_APART = frozenset({"/sleep", "/wake_up", "/release_kv_cache_memory", "/resume"})  # vLLM's own; see ``sleep``
_SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")
_HUNG_UP: Message = {"type": "http.disconnect"}
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


class Door:
    """The owner's Unix socket: an abstract one, which leaves no file if the process is killed.

    Its methods run on the server's event loop.
    """

    def __init__(self, app: ASGIApp) -> None:
        """``app`` is the owner's whole app, whose checks of keys apply to requests of other servers too."""
        self._app = app
        self._listening: asyncio.Server | None = None

    async def open(self) -> str:
        """Returns the name of the socket, to which the other servers can connect from now on."""
        name = f"\0weightcast-{secrets.token_hex(16)}"
        self._listening = await asyncio.start_unix_server(self._serve, name)
        return name

    def close(self) -> None:
        """Takes no more connections."""
        if self._listening is not None:
            self._listening.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # No file's rights keep other users out.
        peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(peer)[1] != os.geteuid():
            log.warning("weightcast: a process of another user was turned away from the socket of API server 0")
            writer.close()
            return

        async def receive() -> Message:
            return await _read(reader) or _HUNG_UP

        async def send(message: Message) -> None:
            with suppress(ConnectionError):  # the client has hung up, as ``receive`` says
                await _write(writer, message)

        try:
            scope = await _read(reader)
            if scope is not None:
                await self._app(scope, receive, send)
            while await _read(reader):  # closing with something unread would break the answer off
                pass
        finally:
            writer.close()


async def found_door(ask: Callable[[], Awaitable[Any]], number: int) -> str:
    """Returns the name of the owner's socket once it is open; then the owner is ready, too.

    Args:
        ask: Asks the engine cores for the name, which the owner tells them.

    Raises:
        EngineFailure: The owner did not open it in time.
    """
    deadline = Deadline(_START_S)
    while not (name := str(await ask())):
        if deadline.left_s() <= 0:
            raise EngineFailure(f"{_GONE}was not ready within {_START_S:g} s")
        await asyncio.sleep(_LOOK_S)
    log.info("weightcast: API server %d hands requests that concern updates on to API server 0", number)
    return name


def add_first(app: FastAPI, middleware: Any, **arguments: Any) -> None:
    """Adds a middleware around all others, also to an app that has put them together already, as vLLM 0.25 has."""
    app.user_middleware.insert(0, Middleware(middleware, **arguments))
    if app.middleware_stack is not None:
        app.middleware_stack = app.build_middleware_stack()


class HandsOn:
    """Middleware of an API server: requests that concern updates go to the owner, if that is another process."""

    def __init__(self, app: ASGIApp, *, owner: Callable[[], str]) -> None:
        """``owner`` returns the name of the owner's socket; empty in the owner itself."""
        self._app = app
        self._owner = owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Has a request answered here or by the owner."""
        name = self._owner() if scope["type"] == "http" else ""
        if not name or not _concerns_updates(scope["path"].removeprefix(scope.get("root_path", ""))):
            await self._app(scope, receive, send)
            return
        try:
            reader, writer = await _connected(name)
        except OSError as error:
            await refusal(503, f"{_GONE}cannot be reached: {error}")(scope, receive, send)
            return
        # Both at once: the owner may answer before it has the body, and must notice when the client hangs up.
        work = [asyncio.ensure_future(_ask(scope, receive, writer)), asyncio.ensure_future(_answer(reader, send))]
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            writer.close()
            for task in work:
                task.cancel()
            ended = await asyncio.gather(*work, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error


async def _connected(name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to the owner; raises OSError if it is gone, or does not take the connection."""
    end = socket.socket(socket.AF_UNIX)
    try:
        end.settimeout(_CONNECT_S)
        end.connect(name)  # at once; uvloop itself cannot connect to an abstract socket
        return await asyncio.open_unix_connection(sock=end)
    except BaseException:
        end.close()
        raise


def _concerns_updates(path: str) -> bool:
    return path.startswith(_ROUTES) or path in _KEPT_APART


async def _ask(scope: Scope, receive: Receive, writer: asyncio.StreamWriter) -> None:
    """Sends a request; returns when its client has hung up, or has the whole answer."""
    message = {name: scope[name] for name in (*_SCOPE, "headers") if name in scope}
    while message != _HUNG_UP:
        with suppress(ConnectionError):  # reading the answer says that the owner is gone
            await _write(writer, message)
        message = await receive()


async def _answer(reader: asyncio.StreamReader, send: Send) -> None:
    """Sends the owner's answer on.  Raises ``EngineFailure`` if it ends early: it must not look like a whole one."""
    more = True
    while more:
        message = await _read(reader)
        if message is None:
            raise EngineFailure(f"{_GONE}has ended in the middle of an answer")
        more = message["type"] != "http.response.body" or message.get("more_body", False)
        await send(message)


async def _write(writer: asyncio.StreamWriter, message: Message | dict[str, Any]) -> None:
    body = msgspec.msgpack.encode(message)
    writer.write(len(body).to_bytes(_LENGTH_BYTES, "big") + body)
    await writer.drain()


async def _read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Returns the next message; None if the other end has hung up."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        return msgspec.msgpack.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
