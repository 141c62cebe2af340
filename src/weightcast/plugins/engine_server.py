"""Our half of an engine's API server: sessions, routes, watchers, and the guards of keys and of sleep.

An engine's plug-in makes an ``EngineServer``, starts it with its hooks and its executor, and adds its routers to the
engine's app.  It wraps the engine's own calls for sleep and wake-up in a ``SleepGuard``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from fastapi import HTTPException

from weightcast.errors import Refused, error_words
from weightcast.plugins.pause_state import WEIGHTS, ServerHooks
from weightcast.receiver.api_keys import Guard
from weightcast.receiver.engine_state import EngineFacts
from weightcast.receiver.executor import Executor
from weightcast.receiver.peer_routes import peer_routes
from weightcast.receiver.server import Late, ScorePrompt, weight_routes
from weightcast.receiver.session import SessionHandler
from weightcast.watch.sessions import SessionWatcher
from weightcast.watch.spans import EngineSpans

T = TypeVar("T")

_FIRST_VERSION = 0  # of the weights that an engine was started with


class EngineServer(Late):
    """The routes of our receiver in one engine's API server, and the sessions behind them once it is started."""

    def __init__(self, engine: str, *, keys: Iterable[str] | None, score: ScorePrompt | None = None) -> None:
        """Makes the routes, which answer 503 before ``start``.

        Args:
            engine: Name of the engine.
            keys: As for ``Guard``.
            score: As for ``weight_routes``.
        """
        super().__init__(self.ready)
        self._name = engine
        self._sessions: SessionHandler | None = None
        self._hooks: ServerHooks | None = None
        self.guard = Guard(keys, admitted=self._admitted)
        self.routers = (
            weight_routes(self, score, guard=self.guard),
            peer_routes(self.ready, guard=self.guard),
        )

    def start(
        self, executor: Executor, hooks: ServerHooks, facts: EngineFacts, *, metrics: bool = True
    ) -> SessionHandler:
        """Makes the sessions.

        Args:
            metrics: False for a server without ``/metrics``.
        """
        watchers: list[SessionWatcher] = [EngineSpans()]
        if metrics:
            # Imported here: prometheus_client chooses its multiprocess mode at the import, and servers set the variable
            # for it late.  In that mode they serve what the instruments of the default registry write to files.
            from prometheus_client import REGISTRY

            from weightcast.watch.engine_metrics import EngineMetrics

            watchers.append(EngineMetrics(REGISTRY, model_name=facts.model, version=_FIRST_VERSION))
        self._hooks = hooks
        self._sessions = sessions = SessionHandler(executor, hooks, facts, version=_FIRST_VERSION, watchers=watchers)
        return sessions

    def ready(self) -> SessionHandler:
        """The sessions; ``HTTPException`` before ``start``."""
        if self._sessions is None:
            raise HTTPException(503, f"{self._name} is still starting")
        return self._sessions

    def _admitted(self) -> None:
        if self._hooks is not None:
            self._hooks.note_loop()


class SleepGuard:
    """Keeps an engine's sleep and wake-up apart from updates and from requests, which wait until weights are known."""

    def __init__(
        self,
        engine: SessionHandler,
        hooks: ServerHooks,
        refusal: Callable[[str], Exception],
        *,
        also: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Makes the guard of one engine.

        Args:
            refusal: Makes the server's error from words.
            also: Context that keeps out other updates than those of ``engine``; raises ``Refused`` during one.
        """
        self._engine, self._hooks, self._refusal, self._also = engine, hooks, refusal, also

    async def alone(self, do: Callable[[], T]) -> T:
        """Calls a function on a thread while no update is under way."""
        self._hooks.note_loop()

        def locked() -> T:
            with self._engine.between_updates(), self._also():
                return do()

        try:
            return await asyncio.to_thread(locked)
        except Refused as error:
            raise self._refusal(error_words(error)) from error

    async def sleep(
        self, do: Callable[[], T], *, tags: Collection[str] = (), awake: Collection[str] = (), discards: str = ""
    ) -> T:
        """Puts memory to sleep.

        Args:
            do: The engine's own call, on a thread.
            tags: Memory that sleeps then.
            awake: Memory that must not sleep yet.
            discards: Reason of the quarantine if the weights are lost; else empty.
        """

        def asleep() -> T:
            refuse(frozenset(awake) & self._hooks.asleep, "sleeps already")
            self._hooks.hold_for_sleep()
            try:
                if discards and WEIGHTS not in self._hooks.asleep:
                    self._engine.discarded(discards)  # before the call, which may fail half way
                answer = do()
                self._hooks.fell_asleep(tags)
                return answer
            finally:
                self._end_hold()

        return await self.alone(asleep)

    async def wake(self, do: Callable[[], T]) -> T:
        """Wakes memory by ``do``, which tells the hooks what woke."""

        def awake() -> T:
            answer = do()
            self._end_hold()
            return answer

        return await self.alone(awake)

    def _end_hold(self) -> None:
        if self._engine.state != "quarantined":  # otherwise the next update ends the hold
            self._hooks.resume()


def refuse(tags: Collection[str], why: str) -> None:
    """Raises ``Refused`` if there are tags: the request names memory in another state."""
    if tags:
        raise Refused(f"memory {why}: {', '.join(sorted(tags))}", hint="GET /weightcast/info says what sleeps")
