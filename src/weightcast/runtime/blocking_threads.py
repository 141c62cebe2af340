"""Threads for calls that block inside torch with no deadline that we control.

The caller waits for such a thread as long as it likes and then leaves it behind.  It is a daemon, because a call that
never returns must not keep the interpreter from ending.  But a thread that returns from torch while the interpreter
ends takes the whole process down ("terminate called without an active exception").  So at interpreter exit this module
tells the threads still under way to give up, and waits for them a little.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Result = TypeVar("_Result")

LAST_WAIT_S = 5.0  # at interpreter exit, for all threads together

_under_way: weakref.WeakKeyDictionary[threading.Thread, Callable[[], None] | None] = weakref.WeakKeyDictionary()
_guard = threading.Lock()


def start(work: Callable[[], None], *, name: str, give_up: Callable[[], None] | None = None) -> threading.Thread:
    """Runs ``work`` on a thread that may be left behind.

    ``give_up`` makes the work end soon; it is called at interpreter exit if the work is still under way.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    with _guard:
        _under_way[thread] = give_up
    thread.start()
    return thread


def call(work: Callable[[], _Result], *, name: str, give_up: Callable[[], None] | None = None) -> Future[_Result]:
    """As ``start``; the future has what ``work`` returns or raises."""
    done = Future[_Result]()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised where the future is waited for
            done.set_exception(error)

    start(run, name=name, give_up=give_up)
    return done


def wait_for_all(limit_s: float) -> list[str]:
    """Tells the threads under way to give up, waits, and returns the names of those that did not end in time."""
    deadline = time.monotonic() + limit_s
    with _guard:
        alive = {thread: give_up for thread, give_up in _under_way.items() if thread.is_alive()}
    for give_up in alive.values():
        if give_up is not None:
            give_up()
    for thread in alive:
        thread.join(max(deadline - time.monotonic(), 0.0))
    return [thread.name for thread in alive if thread.is_alive()]


atexit.register(wait_for_all, LAST_WAIT_S)
