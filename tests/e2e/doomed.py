"""Trainers that die or stop by themselves at a chosen point of an update."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.helpers.clock import AMPLE_S
from tests.helpers.harness import SMALL_BUCKETS, trainer_of
from weightcast import WeightUpdater
from weightcast.comm.update_group import UpdateGroup
from weightcast.errors import WeightcastError
from weightcast.transports.link import Link
from weightcast.transports.pump import Pump
from weightcast.update.verify import Verifier

# What each point is; a number after a colon counts from 0.
POINTS: dict[str, Callable[[int, Callable[[], None]], None]] = {}


def update(urls: list[str], version: int, where: str, number: int, options: dict[str, Any], said: Any = None) -> None:
    """Connect, then meet one's fate while updating.

    Args:
        urls: The engines.
        version: What to update to.
        where: ``point`` or ``point:k``.
        number: The signal to send to oneself.
        options: For ``connect``.
        said: Pipe for the error of a trainer that lives on.
    """
    options = {"bucket_bytes": SMALL_BUCKETS, "timeout_s": AMPLE_S} | options
    point, _, count = where.partition(":")

    updater = WeightUpdater.connect(trainer_of(version), urls, **options)
    POINTS[point](int(count or 0), lambda: os.kill(os.getpid(), number))
    try:
        updater.update(version=version)
    except WeightcastError as error:
        if said is not None:
            said.send(f"{type(error).__name__}: {error}")
        return
    if said is not None:
        said.send("updated")


def point(install: Callable[[int, Callable[[], None]], None]) -> None:
    POINTS[install.__name__.strip("_")] = install


def wrap(
    owner: Any, name: str, *, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        value = original(*args, **kwargs)
        if after is not None:
            after(*args, **kwargs)
        return value

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        value = await original(*args, **kwargs)
        if after is not None:
            after(*args, **kwargs)
        return value

    setattr(owner, name, awaited if inspect.iscoroutinefunction(original) else wrapped)


def on_call(count: int, die: Callable[[], None]) -> Callable[..., None]:
    """Die at the call number ``count``."""
    calls = iter(range(1_000_000))
    lock = threading.Lock()

    def called(*_: Any, **__: Any) -> None:
        with lock:
            if next(calls) == count:
                die()

    return called


@point
def opened(_: int, die: Callable[[], None]) -> None:
    """One engine is open, another may be."""
    wrap(Link, "open", after=on_call(0, die))


@point
def posted(count: int, die: Callable[[], None]) -> None:
    """A bucket is under way."""
    wrap(Pump, "put", after=on_call(count, die))


@point
def announced(count: int, die: Callable[[], None]) -> None:
    """The engines wait for a broadcast that never comes."""

    def wait_then_die() -> None:
        time.sleep(0.1)
        die()

    wrap(UpdateGroup, "start_broadcast", before=on_call(count, wait_then_die))


@point
def closed(_: int, die: Callable[[], None]) -> None:
    """Everything has arrived and was proven."""
    wrap(Verifier, "close_all", after=on_call(0, die))


@point
def committed(_: int, die: Callable[[], None]) -> None:
    """One engine has the new version."""
    wrap(Link, "commit", after=on_call(0, die))


KILL, STOP = int(signal.SIGKILL), int(signal.SIGSTOP)
