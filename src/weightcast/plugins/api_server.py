"""Common to the API servers of all plug-ins: events, waits for the event loop, sleep and wake-up.

Sleep is kept apart from updates and from requests: new ones wait from the beginning of sleep until all memory is back
and the weights are known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Protocol, TypeVar

import msgspec

from weightcast.errors import DeadlineExceeded, EngineFailure, Refused, error_words
from weightcast.receiver.engine_state import EngineFacts, EngineHooks
from weightcast.receiver.executor import Executor
from weightcast.receiver.session import SessionHandler
from weightcast.watch.listeners import Events, Listener
from weightcast.watch.logs import UpdateLog
from weightcast.watch.spans import EngineSpans
from weightcast.wire.engine_info import EngineInfo, EngineStatus

T = TypeVar("T")
_Result = TypeVar("_Result")


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
        _end_hold(engine, hooks)


def wake_up(engine: SessionHandler, hooks: SleepHooks, do: Callable[[], object]) -> None:
    """Wakes memory; called inside ``between_updates``."""
    do()
    _end_hold(engine, hooks)


def _end_hold(engine: SessionHandler, hooks: SleepHooks) -> None:
    if engine.state != "quarantined":  # otherwise the weights are not known, and the next update ends the hold
        hooks.resume()


def refuse(tags: Collection[str], why: str) -> None:
    """Raises ``Refused`` if there are tags: the request names memory in another state."""
    if tags:
        raise Refused(f"memory {why}: {', '.join(sorted(tags))}", hint="GET /weightcast/info says what sleeps")


def result_of(future: Future[_Result], timeout_s: float, *, engine: str, what: str) -> _Result:
    """Waits, on another thread, for work of the engine's own code on the event loop; cancels it after ``timeout_s``.

    Raises:
        Refused: The work was cancelled, because the update that asked for it was aborted.
        DeadlineExceeded: The work took too long.
        EngineFailure: The work failed; the error has the engine's words.
    """
    try:
        return future.result(timeout_s)
    except CancelledError as error:
        raise Refused("pause cancelled: the update that asked for it was aborted") from error
    except FutureTimeout as error:
        future.cancel()
        raise DeadlineExceeded(who=engine, waiting_for=what, timeout_s=timeout_s) from error
    except Exception as error:  # engines' errors have no common class
        raise EngineFailure(f"{engine}: {type(error).__name__}: {str(error).strip() or 'no words'}") from error


def server_events(model_name: str, *, version: int | None, metrics: bool = True) -> Events:
    """Returns the events for a ``SessionHandler``: log lines, spans, and metrics on the server's own ``/metrics``.

    Args:
        metrics: False for a server without ``/metrics``, or if something else of it has them already.
    """
    listeners: list[Listener] = [UpdateLog(), EngineSpans()]
    if metrics:
        # Imported here: prometheus_client chooses its multiprocess mode at the import, and servers set the variable
        # for it late.  In that mode they serve what the instruments of the default registry write to files.
        from prometheus_client import REGISTRY

        from weightcast.watch.engine_metrics import EngineMetrics

        listeners.append(EngineMetrics(REGISTRY, model_name=model_name, version=version))
    return Events(listeners)
