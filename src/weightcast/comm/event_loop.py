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

from weightcast.runtime.deadline import Deadline

_Result = TypeVar("_Result")


class _Running:
    def __init__(self) -> None:
        self.loop = asyncio.SelectorEventLoop()  # not the application's policy, which may be of another library
        self.sockets: set[socket.socket] = set()
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
    run(asyncio.sleep(0))


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


def close(end: socket.socket) -> None:
    """Closes a socket that was given to ``keep``; on the loop's thread only."""
    if _running is not None:
        _running.sockets.discard(end)
    end.close()


async def within(future: asyncio.Future[_Result], deadline: Deadline) -> _Result:
    """Waits for a future of the caller's own; raises TimeoutError at the deadline."""
    loop = asyncio.get_running_loop()

    def expire() -> None:
        nonlocal timer
        left_s = deadline.left_s()
        if left_s > 0:  # the deadline's clock has started meanwhile
            timer = loop.call_later(left_s, expire)
        elif not future.done():
            future.set_exception(TimeoutError("timed out"))

    timer = loop.call_later(max(deadline.left_s(), 0.0), expire)
    try:
        return await future
    finally:
        timer.cancel()


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
