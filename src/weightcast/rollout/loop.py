"""The thread that owns the ranks: it sends them one command at a time.

Callers' commands go before the next step of generation.  One lock, `changed`, guards all that steps are made of; the
loop takes it between two commands and never during one.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from weightcast.errors import DeadlineExceeded, EngineFailure, Refused
from weightcast.receiver.executor import Executor
from weightcast.rollout import commands
from weightcast.rollout.commands import Chosen, Command, Done, Scores

log = logging.getLogger("weightcast.rollout")

CommandAnswer = TypeVar("CommandAnswer", Chosen, Scores, Done)
LoopWork = Callable[[], None]

_HEARTBEAT_S = 1.0


class LoopSteps(Protocol):
    """The work of a loop beside callers' commands; the loop calls these methods with its lock held."""

    def settle(self) -> None:
        """Carries out what may only change between two steps."""
        ...

    def next_step(self) -> LoopWork | None:
        """Returns the next step, which the loop then runs without the lock; None if there is nothing to do."""
        ...

    def end(self, failure: str | None) -> None:
        """Ends every request; ``failure`` is None if the engine shuts down."""
        ...


class CommandLoop:
    """Runs steps and callers' commands in a thread of its own, until it is closed or the engine fails.

    Attributes:
        changed: Guards the loop's steps; notify it when there may be something to do.
        failure: Reason why the engine has failed; None while it has not.
    """

    def __init__(self, executor: Executor, steps: LoopSteps) -> None:
        self.changed = threading.Condition()
        self.failure: str | None = None
        self._closing = False
        self._executor = executor
        self._steps = steps
        self._jobs: deque[LoopWork] = deque()
        self._thread = threading.Thread(target=self._run, name="weightcast-scheduler", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Ends the loop; waits at most `timeout_s` seconds for a command under way."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def check_alive(self) -> None:
        """Raises ``EngineFailure`` if the engine has failed or is shutting down."""
        if self.failure is not None:
            raise EngineFailure(self.failure, hint="restart the engine")
        if self._closing:
            raise EngineFailure("the engine is shutting down")

    @property
    def ended(self) -> bool:
        """True if the engine has failed or is shutting down."""
        return self.failure is not None or self._closing

    def send(self, command: Command, kind: type[CommandAnswer]) -> CommandAnswer:
        """Runs a command on every rank now; only for work that the loop runs."""
        return commands.decode_answer(self._executor.run(commands.encode(command)), kind)

    def ask(
        self, command: Command, kind: type[CommandAnswer], timeout_s: float, *, check: Callable[[], None] = lambda: None
    ) -> CommandAnswer:
        """Lets the loop run a command between two steps, and waits for its answer.

        The loop calls `check` right before the command; if it raises `Refused`, the command does not run.
        """
        future: Future[CommandAnswer] = Future()

        def job() -> None:
            try:
                check()
                self.check_alive()
            except (Refused, EngineFailure) as error:
                future.set_exception(error)
                return
            try:
                future.set_result(self.send(command, kind))
            except Exception as error:
                future.set_exception(error)
                if not self._closing:
                    raise

        with self.changed:
            self.check_alive()
            self._jobs.append(job)
            self.changed.notify_all()
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                who="engine", waiting_for=f"{type(command).__name__.lower()} on every rank", timeout_s=timeout_s
            ) from None

    def _run(self) -> None:
        failure: str | None = None
        try:
            while (work := self._next()) is not None:
                work()
        except EngineFailure as error:
            failure = str(error)
            log.error("the engine has failed: %s", failure)
        except Exception as error:
            # The ranks and this thread may no longer agree, so more tokens could be wrong.
            failure = f"the scheduler failed: {type(error).__name__}: {error}"
            log.exception("the engine has failed")
        with self.changed:
            self.failure = failure
            self._steps.end(failure)
            while self._jobs:
                self._jobs.popleft()()  # finds that the engine is not alive and fails the caller's future
            self.changed.notify_all()

    def _next(self) -> LoopWork | None:
        """Waits for work; None once the loop is closed."""
        with self.changed:
            while not self._closing:
                self._steps.settle()
                work = self._jobs.popleft() if self._jobs else self._steps.next_step()
                if work is not None:
                    return work
                if not self.changed.wait(_HEARTBEAT_S):
                    return self._ping  # to notice a rank that died
            return None

    def _ping(self) -> None:
        self.send(commands.Ping(), Done)
