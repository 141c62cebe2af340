"""aiohttp's session with one engine, and what weightcast adds to it.

- Forked processes close their copies of its sockets (``event_loop``).
- A connection that the server has closed meanwhile is not used again: aiohttp repeats no POST.
- A connection that is not used again is aborted: closing it would wait for the rest of a request to be sent.
- Bytes in the middle of an answer that are no HTTP end it: aiohttp lets its reader wait.
- A look-up of a name has a thread of its own, which no deadline and no end of the interpreter waits for.
- All sessions together have a bound on requests under way and on idle connections.
"""

from __future__ import annotations

import asyncio
import resource
import select
import socket
import ssl
import threading
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.tracing import Trace

from weightcast.comm import event_loop
from weightcast.runtime.deadline import Deadline

# Shorter than servers keep a connection (uvicorn: 5 s).  A request on a connection that the server is closing is lost.
_KEEP_ALIVE_S = 2.0
_CONNECT_S = 10.0
_READ_BYTES = 1 << 20
_MAX_LOOK_UPS = 32
_MOST = 2048
_LEAST = 32

_Name = tuple[str, int]


@dataclass(slots=True)
class Asking:
    """How far one request has come; ``transport`` is None until it has a connection.

    ``peer`` is the address at the connection's other end.
    """

    has_room: bool = False
    transport: asyncio.Transport | None = None
    peer: Any = None
    protocol: ResponseHandler | None = None
    response: aiohttp.ClientResponse | None = None
    _last: bool = False

    def use_no_more(self) -> None:
        """Lets no other request have the connection; to be called before anything of the answer's body is read."""
        self._last = True
        if self.protocol is not None:
            self.protocol.force_close()

    def end(self) -> None:
        """Aborts the connection, unless the answer was whole: then another request may have it already."""
        response = self.response
        if self.transport is not None and (self._last or response is None or response.connection is not None):
            self.transport.abort()
        if response is not None:
            response.close()
            self.response = None  # the connection's owner keeps this object, and need not keep the answer


class Malformed(aiohttp.ClientPayloadError):
    """Something in the body of an answer is no HTTP; the error's text says what."""


_asking: ContextVar[Asking] = ContextVar("_asking")


def new_session(headers: dict[str, str], trust: ssl.SSLContext | None) -> aiohttp.ClientSession:
    """A session without redirects, cookies and proxies, for the thread of the event loop.

    It has no deadline but that for connecting.
    """
    connector = _Connector(
        ssl=True if trust is None else trust,
        limit=0,
        keepalive_timeout=_KEEP_ALIVE_S,
        resolver=shared().names,
        use_dns_cache=False,
        socket_factory=_new_socket,
    )
    return aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_S, sock_connect=None),
        auto_decompress=False,
        read_bufsize=_READ_BYTES,
    )


def abort_connections(session: aiohttp.ClientSession) -> None:
    """Ends every connection of ``new_session``, used or idle, without a wait for what is unsent."""
    assert isinstance(session.connector, _Connector)
    session.connector.abort()


async def hangs_up_after_handshake(peer: Any, host: str, trust: ssl.SSLContext, *, deadline: Deadline) -> bool:
    """Returns True if the server at the address ``peer`` closes a connection before any request.

    From TLS 1.3 on a client learns only after the handshake that its certificate is refused, and Python's servers hang
    up without an alert.  A server that accepts the client waits for a request instead.
    """
    end = _new_socket((socket.AF_INET6 if len(peer) == 4 else socket.AF_INET, socket.SOCK_STREAM, 0))
    try:
        async with event_loop.Limited(deadline):
            end.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(end, peer)
            except BaseException:
                end.close()
                raise
            reader, writer = await asyncio.open_connection(sock=end, ssl=trust, server_hostname=host)
            try:
                return not await reader.read(1)
            finally:
                writer.transport.abort()
    except (TimeoutError, ConnectionRefusedError):
        return False
    except (ssl.SSLError, ConnectionError):
        return True
    except OSError:
        return False


def asks() -> Asking:
    """Starts the state of a request, for the task that sends it."""
    asking = Asking()
    _asking.set(asking)
    return asking


def _new_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = address
    end = socket.socket(family, kind, protocol)
    event_loop.keep(end)
    return end


class _Connector(aiohttp.TCPConnector):
    """Notes the connection of each request, and takes none that has something to read before it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._used: dict[ResponseHandler, Asking] = {}  # the connections that are open, and the last request on each

    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout) -> Connection:
        while True:
            connection = await super().connect(req, traces, timeout)
            protocol, transport = connection.protocol, connection.transport
            if transport is None or protocol is None:
                return connection
            if protocol not in self._used or _quiet(transport):
                break
            connection.close()
        asking = _asking.get()
        asking.transport, asking.protocol = transport, protocol
        asking.peer = transport.get_extra_info("peername")
        if protocol not in self._used and protocol.closed is not None:
            here = shared()
            here.connections += 1
            protocol.closed.add_done_callback(partial(self._lost, protocol, here))
        self._used[protocol] = asking
        return connection

    def abort(self) -> None:
        for asking in self._used.values():
            assert asking.transport is not None
            asking.transport.abort()

    def _lost(self, protocol: ResponseHandler, here: _Shared, closed: asyncio.Future[None]) -> None:
        here.connections -= 1
        # Ends the answer that was under way, which aiohttp does not do for a malformed chunk.
        closed.exception()  # asyncio logs one that nobody has looked at
        response = self._used.pop(protocol).response
        if response is not None and not response.content.is_eof() and response.content.exception() is None:
            error = protocol.exception()
            words = error.message if isinstance(error, HttpProcessingError) else error
            response.content.set_exception(Malformed(words))


def _quiet(transport: asyncio.Transport) -> bool:
    poll = select.poll()
    poll.register(transport.get_extra_info("socket"), select.POLLIN)
    return not poll.poll(0)


class _Names(AbstractResolver):
    """Looks names up.  Every method is for the thread of the event loop.

    Python cannot give a look-up a deadline, and an absent name server takes half a minute.  So each look-up has a
    thread that may be left behind.  There are at most ``_MAX_LOOK_UPS``; requests for one name share a look-up.
    """

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(_MAX_LOOK_UPS)
        self._asked: dict[_Name, asyncio.Task[list[ResolveResult]]] = {}

    def looks_for(self, host: str) -> bool:
        """True while this name is looked up."""
        return any(name == host for name, _ in self._asked)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        name = (host, port)
        task = self._asked.get(name)
        if task is None:
            task = self._asked[name] = asyncio.get_running_loop().create_task(self._look_up(name))

            def ended(done: asyncio.Task[list[ResolveResult]]) -> None:
                del self._asked[name]
                if not done.cancelled():
                    done.exception()  # asyncio logs one that nobody has looked at

            task.add_done_callback(ended)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Does nothing: sessions share it."""

    async def _look_up(self, name: _Name) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        async with self._room:
            found: asyncio.Future[Any] = loop.create_future()

            def run() -> None:
                try:
                    answers = socket.getaddrinfo(*name, type=socket.SOCK_STREAM)
                except BaseException as error:  # noqa: BLE001  raised again on the loop
                    loop.call_soon_threadsafe(found.set_exception, error)
                else:
                    loop.call_soon_threadsafe(found.set_result, answers)

            threading.Thread(target=run, name="weightcast-resolve", daemon=True).start()
            answers = await found
        return [
            ResolveResult(hostname=name[0], host=address[0], port=address[1], family=family, proto=protocol, flags=0)
            for family, _, protocol, _, address in answers
        ]


class _Shared:
    """Look-ups of names and the bound on connections, for all sessions of a loop.

    Half of the files that this process may open are for requests and idle connections.  The other half is for the
    streams of sessions, of which each engine has one while it is updated, and for the application.
    """

    def __init__(self) -> None:
        self.names = _Names()
        self.most = most_requests()
        self.streams = self.connections = 0
        self.room = asyncio.Semaphore(self.most)

    @property
    def full(self) -> bool:
        """True if no idle connection should be kept."""
        return self.connections > self.most + self.streams


def most_requests() -> int:
    """Most requests under way: a quarter of the files that this process may open; as many connections may be idle."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if files == resource.RLIM_INFINITY else max(_LEAST, min(_MOST, files // 4))


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()


def shared() -> _Shared:
    """The part that all sessions of the running loop share."""
    loop = asyncio.get_running_loop()
    found = _of_loops.get(loop)
    if found is None:
        found = _of_loops[loop] = _Shared()
    return found
