"""The connections to one engine, which of them may carry another request, and the most to all engines together."""

from __future__ import annotations

import asyncio
import resource
import ssl
from collections import OrderedDict, deque
from collections.abc import Callable

from weightcast.comm import event_loop
from weightcast.comm.http_connections import Connection, connect
from weightcast.runtime.deadline import Deadline

# Shorter than servers keep a connection (uvicorn: 5 s).  A request on a connection that the server is closing is lost.
_KEEP_ALIVE_S = 2.0
_MOST = 4096
_LEAST = 64


class CannotConnect(Exception):
    """No connection could be opened."""


class _Queue:
    """Requests that wait for room, in their order.  Every method is for the thread of the event loop."""

    def __init__(self) -> None:
        self._turns: deque[asyncio.Future[None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._turns)

    async def wait(self, deadline: Deadline) -> None:
        """Waits for a turn; raises TimeoutError at the deadline."""
        turn = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            await event_loop.within(turn, deadline)
        except BaseException:
            if turn in self._turns:
                self._turns.remove(turn)
            elif turn.done() and not turn.cancelled() and turn.exception() is None:
                self.wake()  # this turn is another one's now
            raise

    def wake(self) -> None:
        """Lets the request that has waited longest look again."""
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return


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
        self._waiting = _Queue()
        self._sweep: asyncio.TimerHandle | None = None

    async def take(self, deadline: Deadline, *, connect_s: float, at_once: bool = False) -> Connection:
        """Returns a connection that carries no request.  The caller gives it back or discards it.

        ``deadline`` limits the wait for room, and ``connect_s`` name resolution, connecting and TLS.  With ``at_once``,
        the request must not wait for the answers of other engines.  It raises CannotConnect, whose cause says why, and
        TimeoutError without room; ``NoRoom`` if other engines had the connections.
        """
        while True:
            connection = self._take_idle()
            if connection is not None:
                return connection
            if self._room > 0:
                break
            await self._waiting.wait(deadline)
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
            self._waiting.wake()
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
        self._waiting.wake()
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
            self._waiting.wake()

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


class NoRoom(TimeoutError):
    """The limit of connections left no room until the deadline."""


def default_limit() -> int:
    """Half of the files that this process may open: the other half is for sessions and for the application."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if files == resource.RLIM_INFINITY else max(_LEAST, min(_MOST, files // 2))


class ConnectionLimit:
    """The most connections that several pools keep, open or being opened.  For the event loop's thread.

    Above the limit, the idle connection that was used longest ago is closed, and a request waits until another one has
    its answer.  Two kinds of connections go above it, because waiting would be for ever.  A request that engines answer
    only when all of them have it (a bucket of a group, an invitation) never waits.  The stream of a session does not
    count: each engine has one as long as its session is open.
    """

    def __init__(self, most: int | None = None) -> None:
        """Takes the limit; None takes ``default_limit``."""
        self.most = default_limit() if most is None else most
        self.count = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: OrderedDict[Connection, Callable[[Connection], None]] = OrderedDict()  # used last at the right
        self._waiting = _Queue()

    async def enter(self, deadline: Deadline, *, at_once: bool) -> None:
        """Waits until one more connection may be opened, and counts it; NoRoom if that is not until the deadline.

        ``at_once`` is True for a request that must not wait for the answers to others.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # the first one, or a forked process, which has none of its parent's connections
            self._loop, self.count = loop, 0
            self._idle.clear()
            self._waiting = _Queue()
        while self.count >= self.most:
            if self._close_oldest():
                continue
            if at_once:
                break
            try:
                await self._waiting.wait(deadline)
            except TimeoutError as error:
                raise NoRoom(f"all {self.most} connections were busy") from error
        self.count += 1

    def leave(self) -> None:
        """Counts one connection less."""
        self.count -= 1
        if self.count < self.most:
            self._waiting.wake()

    def rest(self, connection: Connection, close: Callable[[Connection], None]) -> None:
        """Notes an idle connection; ``close``, which ends in ``leave``, closes it if room is wanted."""
        self._idle[connection] = close
        while (self._waiting or self.count > self.most) and self._close_oldest():
            pass

    def resume(self, connection: Connection) -> None:
        """Notes that a connection is not idle any more: it is in use again, or closed."""
        self._idle.pop(connection, None)

    def _close_oldest(self) -> bool:
        if not self._idle:
            return False
        connection, close = self._idle.popitem(last=False)
        close(connection)
        return True
