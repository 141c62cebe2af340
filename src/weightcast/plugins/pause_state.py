"""The hooks of an engine in its API server: why it does not run, and calls on the server's event loop.

Threads of the server call the hooks.  The engine's own code must run on the event loop.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Collection, Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from enum import Enum, auto
from typing import Any, ClassVar

from weightcast.config import PauseMode
from weightcast.errors import DeadlineExceeded, EngineFailure, Refused

WEIGHTS = "weights"  # all engines' tag of the memory of weights
SHORT_S = 30.0  # deadline of calls that an engine answers at once
CANCELLED = "pause cancelled: the update that asked for it was aborted"


class PauseState(Enum):
    """Why an engine does not run::

        RUNNING --- pause: it ran --------------> OURS -------- resume: the engine resumes --> RUNNING
                --- pause: it was paused before > OPERATORS --- resume: nothing is called ---> RUNNING
                --- pause within the switch ----> RUNNING, since there is nothing to resume
                --- a pause that fails half way > OURS, until resume
        OURS, OPERATORS --- another pause ------> as it was
        any of these --- memory sleeps ---------> ASLEEP, until all memory is back; then what it was before
        ASLEEP --- pause, resume ---------------> ASLEEP, and nothing is called
        any --- a rank on another host is lost -> ENDING, for good

    OURS is the pause of an update, of the quarantine, or on the way into sleep.
    """

    RUNNING = auto()
    OURS = auto()
    OPERATORS = auto()
    ASLEEP = auto()
    ENDING = auto()


class ServerHooks(ABC):
    """``EngineHooks`` of an engine whose own code runs on its API server's event loop."""

    engine: ClassVar[str]

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        self._stoppable: Future[Any] | None = None
        self._awake_state = PauseState.RUNNING
        self._asleep: frozenset[str] = frozenset()

    # -- the state

    @property
    def state(self) -> PauseState:
        return PauseState.ASLEEP if self.asleep else self._awake_state

    @property
    def asleep(self) -> frozenset[str]:
        """Tags of the memory that sleeps."""
        return self._asleep

    @property
    def sleep_words(self) -> str:
        """As ``Sleeps.sleep_words``."""
        return f"asleep: {', '.join(sorted(self.asleep))}" if self.asleep else ""

    @property
    def paused(self) -> bool:
        """As ``EngineHooks.paused``."""
        return self.state is not PauseState.RUNNING

    def become(self, state: PauseState) -> None:
        """Notes the state that the engine has, or will have once its memory is awake."""
        if self._awake_state is not PauseState.ENDING:
            self._awake_state = state

    def fell_asleep(self, tags: Collection[str]) -> None:
        """Notes memory that sleeps."""
        self._asleep |= frozenset(tags)

    def woke(self, tags: Collection[str]) -> None:
        """Notes memory that is back."""
        self._asleep -= frozenset(tags)

    def hold_for_sleep(self) -> None:  # noqa: B027  only some engines fall asleep while requests run
        """Returns when no request runs, with new ones held back.  Raises ``Refused`` if some do: nothing is held."""

    @abstractmethod
    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """As ``EngineHooks.pause``."""

    def resume(self) -> None:
        """Resumes the engine if the pause is ours, and all of its memory is awake."""
        if self.state is PauseState.OURS:
            self.wait(self._go_on(), SHORT_S, f"{self.engine} to resume")
        if not self.asleep:
            self.become(PauseState.RUNNING)

    def drop_caches(self) -> None:  # noqa: B027
        """Does nothing: the pause, or the switch, has dropped them."""

    def set_version(self, version: int) -> None:  # noqa: B027
        """Does nothing: the engine reports no version of its weights."""

    @abstractmethod
    def _go_on(self) -> Coroutine[Any, Any, Any]:
        """The engine's own call that ends a pause."""

    # -- calls on the event loop

    def note_loop(self) -> None:
        """Notes the running event loop, which exists once the server runs."""
        self._loop = asyncio.get_running_loop()

    def run(self, work: Awaitable[Any]) -> Any:
        """Waits for a call of the engine's own as long as it takes; its errors stay what they are."""
        assert self._loop is not None

        async def awaited() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result()

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
                raise Refused(CANCELLED) from error
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
