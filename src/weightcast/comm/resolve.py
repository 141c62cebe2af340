"""Finds the addresses of host names without blocking the event loop, within a deadline.

Python cannot give the resolver a deadline, and an absent name server takes half a minute.  So each look-up has a thread
that may be left behind.  There are at most as many as ``_MAX_THREADS``; requests for one name share a look-up.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary

from weightcast.comm import event_loop
from weightcast.runtime.deadline import Deadline

Address = tuple[socket.AddressFamily, tuple[Any, ...]]
_Name = tuple[str, int]
_Answer = list[Address] | BaseException

_MAX_THREADS = 32


async def resolve(host: str, port: int, deadline: Deadline) -> list[Address]:
    """Returns the addresses of a host, in the order in which to try them.

    Raises:
        TimeoutError: The resolver did not answer in time.
        OSError: The host does not exist.
    """
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
    """The look-ups of one loop.  Every method is for the loop's thread."""

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
