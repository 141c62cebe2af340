"""Connections for httpcore with one deadline over name resolution, connecting, TLS, writing and reading.

httpcore gives every single read the whole limit, so a peer that sends a byte now and then would never time out.
Here the limit is a ``Deadline``, which httpcore passes on unchanged from the request's extension ``timeout``.
"""

from __future__ import annotations

import ipaddress
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, cast

import httpcore

from weightcast.runtime.deadline import Deadline

Address = tuple[socket.AddressFamily, tuple[Any, ...]]


def resolve(host: str, port: int, deadline: Deadline) -> list[Address]:
    """Returns the addresses of a host, in the order in which to try them.

    Raises:
        TimeoutError: The resolver did not answer in time.
        OSError: The host does not exist.
    """
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        found = Future[list[Address]]()
        # Python cannot give the resolver a deadline, and an absent name server takes half a minute.
        threading.Thread(target=_look_up, args=(host, port, found), name="weightcast-resolve", daemon=True).start()
        try:
            return found.result(max(deadline.left_s(), 0.0))
        except TimeoutError:
            if found.done():
                raise
            raise TimeoutError(f"the name {host} was not resolved in time") from None
    found = Future[list[Address]]()
    _look_up(host, port, found)  # an address asks no name server
    return found.result()


def connect(host: str, port: int, deadline: Deadline) -> socket.socket:
    """Opens a TCP connection to the first address of a host that accepts one.

    Raises:
        TimeoutError: No address has accepted one in time.
        OSError: The host does not exist, or every address refuses.
    """
    addresses = resolve(host, port, deadline)
    trouble: OSError = OSError(f"{host} has no address")
    for number, (family, address) in enumerate(addresses):
        left_s = deadline.left_s()
        if left_s <= 0:
            raise TimeoutError("timed out")
        end = socket.socket(family, socket.SOCK_STREAM)
        try:
            # An address that does not answer must leave time for the next ones.
            end.settimeout(left_s / (len(addresses) - number))
            end.connect(address)
        except OSError as error:
            end.close()
            trouble = error
            continue
        return end
    raise trouble


class Backend(httpcore.NetworkBackend):
    """Opens connections; ``timeout`` is a ``Deadline`` here and everywhere below."""

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        """Opens a connection without TLS."""
        try:
            end = connect(host, port, _deadline(timeout))
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _Stream(end)

    def sleep(self, seconds: float) -> None:
        """Implements the base class."""
        time.sleep(seconds)


class _Stream(httpcore.NetworkStream):
    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        deadline = _deadline(timeout)
        while True:
            try:
                self._limit(deadline)
                return self._end.recv(max_bytes)
            except TimeoutError as error:
                if deadline.left_s() <= 0:  # otherwise its clock has started meanwhile
                    raise httpcore.ReadTimeout(str(error)) from error
            except OSError as error:
                raise httpcore.ReadError(str(error)) from error

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        deadline = _deadline(timeout)
        left = memoryview(buffer)
        while left:
            try:
                self._limit(deadline)
                left = left[self._end.send(left) :]
            except TimeoutError as error:
                if deadline.left_s() <= 0:
                    raise httpcore.WriteTimeout(str(error)) from error
            except OSError as error:
                raise httpcore.WriteError(str(error)) from error

    def close(self) -> None:
        self._end.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        try:
            self._limit(_deadline(timeout))
            return _Stream(ssl_context.wrap_socket(self._end, server_hostname=server_hostname))
        except TimeoutError as error:
            self.close()
            raise httpcore.ConnectTimeout(str(error)) from error
        except OSError as error:
            self.close()
            raise httpcore.ConnectError(str(error)) from error

    def get_extra_info(self, info: str) -> Any:
        if info == "ssl_object":
            return self._end if isinstance(self._end, ssl.SSLSocket) else None
        if info == "is_readable":  # httpcore takes an idle connection that is readable for closed
            return self._end.fileno() < 0 or _is_readable(self._end)
        with suppress(OSError):
            if info == "client_addr":
                return self._end.getsockname()
            if info == "server_addr":
                return self._end.getpeername()
        return self._end if info == "socket" else None

    def _limit(self, deadline: Deadline) -> None:
        left_s = deadline.left_s()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._end.settimeout(left_s)


def _look_up(host: str, port: int, found: Future[list[Address]]) -> None:
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        found.set_result([(family, address) for family, _, _, _, address in answers])
    except BaseException as error:  # noqa: BLE001  ``resolve`` raises it
        found.set_exception(error)


def _is_readable(end: socket.socket) -> bool:
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(0))


def _deadline(timeout: float | None) -> Deadline:
    """Casts the request's ``timeout``: httpcore annotates it as a number but only passes it on."""
    return cast(Deadline, timeout)
