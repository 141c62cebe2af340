"""The event loop on which this process sends its requests to engines: one thread, however many engines there are.

The thread starts with the first request and is a daemon, so it keeps no process alive.  A forked process gets a loop of
its own with its first request, and closes its copies of the parent's sockets: a lease must end with the parent.

Code on the loop must not block.  ``run`` refuses to wait there.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar
from weakref import WeakSet

from weightcast.runtime.deadline import Deadline

_Result = TypeVar("_Result")
_Session = TypeVar("_Session")

_TURNS_TO_SEND = 3  # aiohttp sends a body in a task of its own


class _Running:
    def __init__(self) -> None:
        self.loop = asyncio.SelectorEventLoop()  # not the application's policy, which may be of another library
        self.sockets = WeakSet[socket.socket]()
        self.sessions: set[Any] = set()  # aiohttp logs an error for one that is dropped, and not closed
        self.tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps only weak references
        self.thread = threading.Thread(target=self._run, name="weightcast-http", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    @property
    def here(self) -> bool:
        """True on the loop's own thread."""
        return threading.current_thread() is self.thread

    def start(self, work: Coroutine[Any, Any, _Result], future: Future[_Result]) -> asyncio.Task[None]:
        """Starts a coroutine whose outcome goes to ``future``; on the loop's thread only."""
        task = self.loop.create_task(_deliver(work, future))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


_guard = threading.Lock()
_running: _Running | None = None
_parents: list[_Running] = []  # closing a parent's loop would take its sockets out of the parent's selector


def run(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs a coroutine on the loop and waits for its result.  An interrupt of the caller cancels it.

    Raises:
        RuntimeError: The caller is on the loop's thread, which must not wait, or the interpreter ends.
    """
    running = _current(work)
    if running.here:
        work.close()
        raise RuntimeError("code on the event loop cannot wait for a request")
    future = Future[_Result]()
    tasks: list[asyncio.Task[None]] = []
    try:
        running.loop.call_soon_threadsafe(lambda: tasks.append(running.start(work, future)))
        return future.result()
    except BaseException:
        if not future.done():
            running.loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
        raise


def run_each(works: Sequence[Coroutine[Any, Any, Any]]) -> list[BaseException | None]:
    """Runs coroutines at once, waits for all and returns each one's error, in order."""
    return run(together(works)) if works else []


async def together(works: Sequence[Coroutine[Any, Any, Any]]) -> list[BaseException | None]:
    """As ``run_each``, on the loop."""
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    return [outcome if isinstance(outcome, BaseException) else None for outcome in outcomes]


def submit(works: Sequence[Coroutine[Any, Any, _Result]]) -> list[Future[_Result]]:
    """Starts coroutines and returns a future for each, in order; any thread may call it."""
    if not works:
        return []
    running = _current(*works)
    futures = [Future[_Result]() for _ in works]

    def start() -> None:
        for work, future in zip(works, futures, strict=True):
            running.start(work, future)

    running.loop.call_soon_threadsafe(start)
    return futures


def flush() -> None:
    """Returns once all that was submitted has sent what it can send without an answer.

    A caller that keeps the lock of Python for long would keep the loop's thread from sending.
    """

    async def turns() -> None:
        for _ in range(_TURNS_TO_SEND):
            await asyncio.sleep(0)

    run(turns())


def call(do: Callable[[], object], loop: asyncio.AbstractEventLoop) -> None:
    """Calls a function on the loop without waiting; does nothing if ``loop`` is that of a parent process."""
    running = _running
    if running is None or running.loop is not loop:
        return
    if running.here:
        do()
    else:
        loop.call_soon_threadsafe(do)


def keep(end: socket.socket) -> None:
    """Notes a socket of the loop, which forked processes must not keep open; on the loop's thread only."""
    assert _running is not None
    _running.sockets.add(end)


def keep_session(session: _Session) -> _Session:
    """Keeps a session until ``end_session``; on the loop's thread only."""
    assert _running is not None
    _running.sessions.add(session)
    return session


def end_session(session: Any) -> None:
    """Closes a session that was given to ``keep_session``; on the loop's thread only."""
    running = _running
    assert running is not None
    running.start(session.close(), Future()).add_done_callback(lambda _: running.sessions.discard(session))


class Limited:
    """Cancels the code in it at a deadline, and raises TimeoutError."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    def _watch(self) -> None:
        left_s = self._deadline.left_s()  # longer than before if the deadline's clock has started meanwhile
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._watch)
        else:
            self._limit.reschedule(self._loop.time())

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._watch()

    async def __aexit__(self, *error: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._limit.__aexit__(*error)


async def _deliver(work: Coroutine[Any, Any, _Result], future: Future[_Result]) -> None:
    try:
        result = await work
    except BaseException as error:  # noqa: BLE001  raised again in the thread that waits for the future
        future.set_exception(error)
    else:
        future.set_result(result)


def _current(*works: Coroutine[Any, Any, Any]) -> _Running:
    """Returns the loop, which it starts if there is none."""
    global _running
    if sys.is_finalizing():  # the loop's thread is frozen, and no answer would ever come
        for work in works:
            work.close()
        raise RuntimeError("the interpreter ends, so no request can be sent any more")
    with _guard:
        if _running is None:
            _running = _Running()
        return _running


def _forget_parent() -> None:
    global _guard, _running
    _guard = threading.Lock()
    if _running is not None:
        for end in _running.sockets:
            end.close()
        _parents.append(_running)
        _running = None


os.register_at_fork(after_in_child=_forget_parent)
