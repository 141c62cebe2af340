"""The most connections that the pools of several engines keep open together.

Above the limit, the idle connection that was used longest ago is closed, and a request waits until another one has its
answer.  Two kinds of connections go above it, because waiting would be for ever.  A request that engines answer only
when all of them have it (a bucket of a group, an invitation) never waits.  The stream of a session does not count: each
engine has one as long as its session is open.
"""

from __future__ import annotations

import asyncio
import resource
from collections import OrderedDict, deque
from collections.abc import Callable

from weightcast.comm import event_loop
from weightcast.comm.http_connections import Connection
from weightcast.runtime.deadline import Deadline

_MOST = 4096
_LEAST = 64


class NoRoom(TimeoutError):
    """The limit of connections left no room until the deadline."""


def default_limit() -> int:
    """Half of the files that this process may open: the other half is for sessions and for the application."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if files == resource.RLIM_INFINITY else max(_LEAST, min(_MOST, files // 2))


class ConnectionLimit:
    """Counts the connections of several pools, open or being opened.  Every method is for the event loop's thread."""

    def __init__(self, most: int | None = None) -> None:
        """Takes the limit; None takes ``default_limit``."""
        self.most = default_limit() if most is None else most
        self.count = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: OrderedDict[Connection, Callable[[Connection], None]] = OrderedDict()  # used last at the right
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self, deadline: Deadline, *, at_once: bool) -> None:
        """Waits until one more connection may be opened, and counts it.

        ``at_once`` is True for a request that must not wait for the answers to others.

        Raises:
            NoRoom: All connections have been busy until the deadline.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # the first one, or a forked process, which has none of its parent's connections
            self._loop, self.count = loop, 0
            self._idle.clear()
            self._waiting.clear()
        while self.count >= self.most:
            if self._close_oldest():
                continue
            if at_once:
                break
            turn = loop.create_future()
            self._waiting.append(turn)
            try:
                await event_loop.within(turn, deadline)
            except BaseException as error:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:
                    self._wake()  # this turn is another one's now
                if isinstance(error, TimeoutError):
                    raise NoRoom(f"all {self.most} connections were busy") from error
                raise
        self.count += 1

    def leave(self) -> None:
        """Counts one connection less."""
        self.count -= 1
        self._wake()

    def rest(self, connection: Connection, close: Callable[[Connection], None]) -> None:
        """Notes that a connection is idle, and closes it if another request waits for room or the limit is passed.

        ``close`` closes it, which ends in ``leave``.
        """
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

    def _wake(self) -> None:
        """Lets the request that has waited longest look again."""
        while self._waiting and self.count < self.most:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
