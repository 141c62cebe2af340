"""The connections to one engine: how many there may be, and which of them may carry another request."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque

from weightcast.comm import event_loop
from weightcast.comm.http_connections import Connection, connect
from weightcast.comm.http_limit import ConnectionLimit
from weightcast.runtime.deadline import Deadline

# Shorter than servers keep a connection (uvicorn: 5 s).  A request on a connection that the server is closing is lost.
_KEEP_ALIVE_S = 2.0


class CannotConnect(Exception):
    """No connection could be opened."""


class Pool:
    """Connections to one host and port.  Every method is for the thread of the event loop."""

    def __init__(
        self, host: str, port: int, trust: ssl.SSLContext | None, *, max_connections: int, limit: ConnectionLimit
    ) -> None:
        """Opens nothing; without ``trust`` the connections are plain HTTP."""
        self.loop = asyncio.get_running_loop()
        self._host, self._port, self._trust = host, port, trust
        self._room = max_connections
        self._limit = limit
        self._lent: set[Connection] = set()
        self._open: set[Connection] = set()
        self._idle: deque[tuple[float, Connection]] = deque()  # the one used last is at the right
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._sweep: asyncio.TimerHandle | None = None

    async def take(self, deadline: Deadline, *, connect_s: float, at_once: bool = False) -> Connection:
        """Returns a connection that carries no request.  The caller gives it back or discards it.

        Args:
            deadline: Limit of the wait for room.
            connect_s: Limit of name resolution, connecting and TLS together, in seconds.
            at_once: True for a request that must not wait for the answers of other engines.

        Raises:
            CannotConnect: No connection could be opened; the cause says why.
            TimeoutError: All connections have been busy until the deadline; ``NoRoom`` if other engines had them.
        """
        while True:
            connection = self._take_idle()
            if connection is not None:
                return connection
            if self._room > 0:
                break
            turn = self.loop.create_future()
            self._waiting.append(turn)
            try:
                await event_loop.within(turn, deadline)
            except BaseException:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                elif turn.done() and not turn.cancelled() and turn.exception() is None:
                    self._wake()  # this turn is another one's now
                raise
        self._room -= 1
        try:
            await self._limit.enter(deadline, at_once=at_once)
            try:
                connection = await connect(self._host, self._port, self._trust, deadline.at_most(connect_s))
            except BaseException as error:
                self._limit.leave()
                if isinstance(error, OSError):  # a TimeoutError is one
                    raise CannotConnect(str(error)) from error
                raise
        except BaseException:
            self._room += 1
            self._wake()
            raise
        self._open.add(connection)
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keeps a connection for the next request."""
        connection.listen(None)
        if not connection.idle:
            self.discard(connection)
            return
        self._idle.append((self.loop.time(), connection))
        if self._sweep is None:
            self._sweep = self.loop.call_later(_KEEP_ALIVE_S, self._close_idle)
        self._wake()
        self._limit.rest(connection, self.discard)

    def lend(self, connection: Connection) -> None:
        """Leaves a connection to a stream that stays open until ``discard``; it no longer counts in the limit."""
        self._lent.add(connection)
        self._limit.leave()

    def discard(self, connection: Connection) -> None:
        """Closes a connection; safe to call twice."""
        connection.close()
        if connection in self._open:
            self._open.discard(connection)
            self._limit.resume(connection)
            if connection in self._lent:
                self._lent.discard(connection)
            else:
                self._limit.leave()
            self._room += 1
            self._wake()

    def close(self) -> None:
        """Closes every connection, also under requests."""
        for connection in tuple(self._open):
            self.discard(connection)
        self._idle.clear()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    def _take_idle(self) -> Connection | None:
        while self._idle:
            since, connection = self._idle.pop()
            if connection.idle and connection.quiet and self.loop.time() - since < _KEEP_ALIVE_S:
                self._limit.resume(connection)
                return connection
            self.discard(connection)
        return None

    def _close_idle(self) -> None:
        self._sweep = None
        now = self.loop.time()
        while self._idle and (self._idle[0][1].closed or now - self._idle[0][0] >= _KEEP_ALIVE_S):
            self.discard(self._idle.popleft()[1])
        if self._idle:
            self._sweep = self.loop.call_later(self._idle[0][0] + _KEEP_ALIVE_S - now, self._close_idle)

    def _wake(self) -> None:
        """Lets the request that has waited longest look again."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
