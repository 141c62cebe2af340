"""Sleep and wake-up in an engine's API server, kept apart from updates and from requests: common to all plug-ins.

New requests wait from the beginning of sleep until all memory is back and the weights are known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

import msgspec

from weightcast.errors import Refused, error_words
from weightcast.receiver.engine_state import EngineFacts, EngineHooks
from weightcast.receiver.executor import Executor
from weightcast.receiver.session import SessionHandler
from weightcast.watch.listeners import Events
from weightcast.wire.engine_info import EngineInfo, EngineStatus

T = TypeVar("T")


class TellsSleep(EngineHooks, Protocol):
    """Hooks of an engine whose memory may sleep."""

    @property
    def asleep(self) -> frozenset[str]:
        """Tags of the memory that sleeps."""
        ...


class SleepHooks(TellsSleep, Protocol):
    """Hooks that hold requests back while memory sleeps."""

    def hold_for_sleep(self) -> None:
        """Holds new requests back; returns when none runs.  Raises ``Refused`` if some do; then nothing is held."""
        ...

    def end_hold_of_sleep(self, *, serves: bool) -> None:
        """Lets requests go on if all memory is back.

        If not ``serves``, the weights are not known, and the next update ends the hold.
        """
        ...


class SleepingSessions(SessionHandler):
    """The sessions of an engine whose memory may sleep; its description of itself says what does."""

    def __init__(
        self, executor: Executor, hooks: TellsSleep, facts: EngineFacts, *, version: int | None, events: Events
    ) -> None:
        super().__init__(executor, hooks, facts, version=version, events=events)
        self._tells_sleep = hooks

    def info(self) -> EngineInfo:
        """Implements ``SessionHandler.info`` and adds the memory that sleeps to its message."""
        info = super().info()
        return msgspec.structs.replace(info, message=self._with_sleep(info.message))

    def status(self) -> EngineStatus:
        """Implements ``SessionHandler.status``, likewise."""
        status = super().status()
        return msgspec.structs.replace(status, message=self._with_sleep(status.message))

    def _with_sleep(self, message: str) -> str:
        asleep = ", ".join(sorted(self._tells_sleep.asleep))
        return "; ".join(filter(None, (message, asleep and f"asleep: {asleep}")))


async def between_updates(engine: SessionHandler, do: Callable[[], T], refusal: Callable[[str], Exception]) -> T:
    """Calls a function on a thread while no update is under way; ``refusal`` makes the server's error from words."""

    def locked() -> T:
        with engine.between_updates():
            return do()

    try:
        return await asyncio.to_thread(locked)
    except Refused as error:
        raise refusal(error_words(error)) from error


def fall_asleep(
    engine: SessionHandler, hooks: SleepHooks, tags: Collection[str], do: Callable[[], object], *, discarded: str = ""
) -> None:
    """Puts memory to sleep; called inside ``between_updates``.

    Args:
        tags: Memory that must be awake.
        discarded: Reason of the quarantine if the weights are lost; else empty.

    Raises:
        Refused: Requests run, or the memory sleeps already.
    """
    refuse(frozenset(tags) & hooks.asleep, "sleeps already")
    hooks.hold_for_sleep()
    try:
        if discarded:
            engine.discarded(discarded)  # before the call, which may fail half way
        do()
    finally:
        hooks.end_hold_of_sleep(serves=engine.state != "quarantined")


def wake_up(engine: SessionHandler, hooks: SleepHooks, do: Callable[[], object]) -> None:
    """Wakes memory; called inside ``between_updates``."""
    do()
    hooks.end_hold_of_sleep(serves=engine.state != "quarantined")


def refuse(tags: Collection[str], why: str) -> None:
    """Raises ``Refused`` if there are tags: the request names memory in another state."""
    if tags:
        raise Refused(f"memory {why}: {', '.join(sorted(tags))}", hint="GET /weightcast/info says what sleeps")
