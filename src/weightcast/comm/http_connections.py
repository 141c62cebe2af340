"""Connections to engines on the event loop, with one deadline over name resolution, connecting and TLS.

A ``Connection`` hands what arrives to its listener and keeps what cannot be sent yet.  TLS runs in memory here and not
in asyncio, so that a failed handshake raises OpenSSL's own error.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import select
import socket
import ssl
import threading
from collections import deque
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from weightcast.comm import event_loop
from weightcast.runtime.deadline import Deadline

Address = tuple[socket.AddressFamily, tuple[Any, ...]]
_Name = tuple[str, int]
_Answer = list[Address] | BaseException

_READ_BYTES = 256 << 10
_MAX_THREADS = 32


class Listener(Protocol):
    """Hears what arrives on a connection.  Each method is called on the event loop."""

    def received(self, data: bytes) -> None:
        """Takes bytes."""
        ...

    def ended(self, error: Exception | None) -> None:
        """Nothing more arrives: the other end has closed the connection, or it broke."""
        ...


class Connection:
    """An open connection; ``broken`` once nothing can travel any more.  Every method is for the event loop's thread."""

    def __init__(self, end: socket.socket) -> None:
        self.closed = self.broken = False
        self._loop = asyncio.get_running_loop()
        self._end = end
        # asyncio adds a file by a failed look-up, whose error spells the file: two system calls for a socket.
        self._number = end.fileno()
        self._listener: Listener | None = None
        self._unsent = memoryview(b"")
        self._tls: ssl.SSLObject | None = None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._more: asyncio.Future[None] | None = None  # during a handshake
        self._loop.add_reader(self._number, self._read)

    @property
    def idle(self) -> bool:
        """True if the connection can carry another request, unless something has arrived that was not read yet."""
        return not (self.closed or self.broken or self._unsent)

    @property
    def quiet(self) -> bool:
        """True if nothing waits to be read; costs a system call."""
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        return not poll.poll(0)

    async def shake_hands(self, context: ssl.SSLContext, host: str, deadline: Deadline) -> None:
        """Starts TLS; raises TimeoutError at the deadline, and OSError if the handshake fails."""
        tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        while True:
            self._more = self._loop.create_future()
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                self._send(self._outgoing.read())
            else:
                break
            finally:
                if self._outgoing.pending:  # an alert tells the other end why
                    self._send(self._outgoing.read())
            await event_loop.within(self._more, deadline)
        self._more, self._tls = None, tls

    def listen(self, listener: Listener | None) -> None:
        """Hands what arrives from now on to a listener; None closes the connection as soon as anything arrives."""
        self._listener = listener

    def pause(self) -> None:
        """Reads nothing more, so that an endless stream fills no memory and takes no time."""
        if not self.closed:  # another socket may have the number by now
            self._loop.remove_reader(self._number)

    def send(self, data: bytes) -> None:
        """Sends bytes, as soon as the other end takes them.

        A failure is not reported: an engine may refuse a request before it has read all of it, and hang up.
        """
        if self._tls is None:
            self._send(data)
            return
        with suppress(ssl.SSLError):  # reading reports it
            self._tls.write(data)
        self._send(self._outgoing.read())

    def close(self) -> None:
        """Closes the connection; safe to call twice."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._number)
        if self._unsent:
            self._loop.remove_writer(self._number)
            self._unsent = memoryview(b"")
        event_loop.close(self._end)
        self._over(None)

    def _send(self, data: bytes) -> None:
        if self.closed or not data:
            return
        if self._unsent:
            self._unsent = memoryview(bytes(self._unsent) + data)
            return
        self._unsent = memoryview(data)
        self._write()
        if self._unsent:
            self._loop.add_writer(self._number, self._write_rest)

    def _write_rest(self) -> None:
        self._write()
        if not self._unsent:
            self._loop.remove_writer(self._number)

    def _write(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._end.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.broken = True
            self._unsent = memoryview(b"")

    def _read(self) -> None:
        try:
            data = self._end.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end_of_stream(error)
            return
        if self._tls is None and self._more is None:
            self._hear(data)
            return
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()
        if self._more is not None:
            if not data:
                self._loop.remove_reader(self._number)  # it would be readable for ever
            if not self._more.done():
                self._more.set_result(None)
        else:
            self._decrypt()

    def _decrypt(self) -> None:
        assert self._tls is not None
        while not self.closed and not self.broken:
            try:
                data = self._tls.read(_READ_BYTES)
            except ssl.SSLWantReadError:
                break
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                data = b""
            except ssl.SSLError as error:
                self._end_of_stream(error)
                return
            self._hear(data)

    def _hear(self, data: bytes) -> None:
        if not data:
            self._end_of_stream(None)
        elif self._listener is not None:
            self._listener.received(data)
        else:
            self.close()

    def _end_of_stream(self, error: Exception | None) -> None:
        self.broken = True
        self._loop.remove_reader(self._number)
        if self._more is not None and not self._more.done():
            self._more.set_exception(error or EOFError("the connection was closed"))
        elif self._listener is None:
            self.close()
        else:
            self._over(error)

    def _over(self, error: Exception | None) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.ended(error)


async def connect(host: str, port: int, trust: ssl.SSLContext | None, deadline: Deadline) -> Connection:
    """Connects to the first address of a host that accepts it, and starts TLS if there is ``trust``.

    It raises TimeoutError if none has in time, and OSError if all refuse, there is no such host or TLS failed.
    """
    addresses = await resolve(host, port, deadline)
    trouble: OSError = OSError(f"{host} has no address")
    for number, (family, address) in enumerate(addresses):
        left_s = deadline.left_s()
        if left_s <= 0:
            raise TimeoutError("timed out")
        try:
            # An address that does not answer must leave time for the next ones.
            limit = deadline.at_most(left_s / (len(addresses) - number))
            connection = await _connect(family, address, limit)
        except OSError as error:
            trouble = error
            continue
        if trust is not None:
            try:
                await connection.shake_hands(trust, host, deadline)
            except BaseException:
                connection.close()
                raise
        return connection
    raise trouble


async def _connect(family: socket.AddressFamily, address: tuple[object, ...], deadline: Deadline) -> Connection:
    loop = asyncio.get_running_loop()
    end = socket.socket(family, socket.SOCK_STREAM)
    event_loop.keep(end)
    try:
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number = end.connect_ex(address)
        if number == errno.EINPROGRESS:
            writable = loop.create_future()
            loop.add_writer(end.fileno(), lambda: writable.done() or writable.set_result(None))
            try:
                await event_loop.within(writable, deadline)
            finally:
                loop.remove_writer(end.fileno())
            number = end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise OSError(number, os.strerror(number))
        return Connection(end)
    except BaseException:
        event_loop.close(end)
        raise


async def resolve(host: str, port: int, deadline: Deadline) -> list[Address]:
    """The addresses of a host, in the order in which to try them; TimeoutError or OSError if there are none."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        pass
    else:
        return _look_up((host, port))  # an address asks no name server
    loop = asyncio.get_running_loop()
    resolver = _resolvers.get(loop)
    if resolver is None:
        resolver = _resolvers[loop] = _Resolver(loop)
    found = loop.create_future()
    resolver.ask((host, port), found)
    try:
        answer = await event_loop.within(found, deadline)
    except TimeoutError:
        raise TimeoutError(f"the name {host} was not resolved in time") from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


class _Resolver:
    """The look-ups of one loop.  Every method is for the loop's thread.

    Python cannot give the resolver a deadline, and an absent name server takes half a minute.  So each look-up has a
    thread that may be left behind.  There are at most ``_MAX_THREADS``; requests for one name share a look-up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[_Name, list[asyncio.Future[_Answer]]] = {}
        self._queue = deque[_Name]()
        self._threads = 0

    def ask(self, name: _Name, found: asyncio.Future[_Answer]) -> None:
        if name in self._waiting:
            self._waiting[name].append(found)
            return
        self._waiting[name] = [found]
        self._queue.append(name)
        self._start()

    def _start(self) -> None:
        while self._queue and self._threads < _MAX_THREADS:
            self._threads += 1
            name = self._queue.popleft()
            threading.Thread(target=self._run, args=(name,), name="weightcast-resolve", daemon=True).start()

    def _run(self, name: _Name) -> None:
        answer: _Answer
        try:
            answer = _look_up(name)
        except BaseException as error:  # noqa: BLE001  ``resolve`` raises it
            answer = error
        self._loop.call_soon_threadsafe(self._answered, name, answer)

    def _answered(self, name: _Name, answer: _Answer) -> None:
        self._threads -= 1
        for found in self._waiting.pop(name):
            if not found.done():
                found.set_result(answer)
        self._start()


_resolvers: WeakKeyDictionary[asyncio.AbstractEventLoop, _Resolver] = WeakKeyDictionary()


def _look_up(name: _Name) -> list[Address]:
    answers = socket.getaddrinfo(*name, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in answers]
