"""Common to the API servers of all plug-ins: watchers, waits for the event loop, sleep and wake-up.

Sleep is kept apart from updates and from requests: new ones wait from the beginning of sleep until all memory is back
and the weights are known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

from weightcast.errors import DeadlineExceeded, EngineFailure, Refused, error_words
from weightcast.receiver.engine_state import EngineFacts, EngineHooks
from weightcast.receiver.executor import Executor
from weightcast.receiver.session import SessionHandler
from weightcast.watch.sessions import SessionWatcher
from weightcast.watch.spans import EngineSpans
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


class SleepingSessions(SessionHandler):
    """The sessions of an engine whose memory may sleep; its description of itself says what does."""

    def __init__(
        self,
        executor: Executor,
        hooks: TellsSleep,
        facts: EngineFacts,
        *,
        version: int | None,
        watchers: Sequence[SessionWatcher],
    ) -> None:
        super().__init__(executor, hooks, facts, version=version, watchers=watchers)
        self._tells_sleep = hooks

    def info(self) -> EngineInfo:
        """Implements ``SessionHandler.info`` and adds the memory that sleeps to its message."""
        info = super().info()
        return msgspec.structs.replace(info, message=self._with_sleep(info.message))

    def status(self) -> EngineStatus:
        """Implements ``SessionHandler.status``, likewise."""
        status = super().status()
        return msgspec.structs.replace(status, message=self._with_sleep(status.message))

    def held_back(self) -> str:
        """Implements ``SessionHandler.held_back``, and names the memory that sleeps."""
        asleep = self._asleep()
        if not asleep:
            return super().held_back()
        return f"asleep: {asleep}; it has the new weights, and answers no request until all its memory is awake"

    def _with_sleep(self, message: str) -> str:
        asleep = self._asleep()
        return "; ".join(filter(None, (message, asleep and f"asleep: {asleep}")))

    def _asleep(self) -> str:
        return ", ".join(sorted(self._tells_sleep.asleep))


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


class EngineLoop:
    """The event loop of an engine's API server, on which the engine's own code must run; for threads of the server."""

    engine: ClassVar[str]

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        self._stoppable: Future[Any] | None = None

    def set_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Notes the loop, which exists once the server runs."""
        self._loop = loop

    def wait(
        self,
        work: Coroutine[Any, Any, Any],
        timeout_s: float,
        what: str,
        *,
        grace_s: float = 0.0,
        stoppable: bool = False,
    ) -> Any:
        """Runs a coroutine and waits for its result; cancels it after ``timeout_s`` and ``grace_s``.

        Raises:
            Refused: ``stop_waiting`` was called, and the work is ``stoppable``.
            DeadlineExceeded: The work took too long.
            EngineFailure: The work failed; the error has the engine's words.
        """
        if self._loop is None:
            work.close()
            raise EngineFailure(f"{self.engine}'s server does not run yet")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        if stoppable:
            self._stoppable = future
        try:
            return future.result(timeout_s + grace_s)
        except CancelledError as error:
            if stoppable:
                raise Refused("pause cancelled: the update that asked for it was aborted") from error
            raise EngineFailure(f"{self.engine}'s server is stopping") from error
        except FutureTimeout as error:
            future.cancel()
            raise DeadlineExceeded(who=self.engine, waiting_for=what, timeout_s=timeout_s) from error
        except Exception as error:  # engines' errors have no common class
            words = str(error).strip() or "no words"
            raise EngineFailure(f"{self.engine}: {type(error).__name__}: {words}") from error
        finally:
            if stoppable:
                self._stoppable = None

    def stop_waiting(self) -> None:
        """Cancels a pause that waits for running requests; ``resume`` must follow."""
        stoppable = self._stoppable
        if stoppable is not None:
            stoppable.cancel()


def server_watchers(model_name: str, *, version: int | None, metrics: bool = True) -> Sequence[SessionWatcher]:
    """Returns the watchers for a ``SessionHandler``: spans, and metrics on the server's own ``/metrics``.

    Args:
        metrics: False for a server without ``/metrics``, or if something else of it has them already.
    """
    watchers: list[SessionWatcher] = [EngineSpans()]
    if metrics:
        # Imported here: prometheus_client chooses its multiprocess mode at the import, and servers set the variable
        # for it late.  In that mode they serve what the instruments of the default registry write to files.
        from prometheus_client import REGISTRY

        from weightcast.watch.engine_metrics import EngineMetrics

        watchers.append(EngineMetrics(REGISTRY, model_name=model_name, version=version))
    return watchers
