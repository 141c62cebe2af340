"""The continuous decode loop: runs steps on the ranks, and pauses and resumes between them.

One thread owns the ranks and sends them one command at a time.  Other threads submit, abort, pause and resume; the
loop does what they ask between two steps.  ``batch.py`` decides which requests run.

Several holders may pause the engine at once (an update, an operator, sleep).  It runs again when the last one resumes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from weightcast.config import PauseMode
from weightcast.errors import ConfigError, DeadlineExceeded, EngineFailure, Refused
from weightcast.receiver.executor import Executor
from weightcast.rollout import commands
from weightcast.rollout.batch import ContinuousBatch, Limits, TokenSequence, check_tokens
from weightcast.rollout.commands import Chosen, Command, Done, Scores
from weightcast.rollout.pauses import SLEEP, UPDATE, Pauses, Unproven
from weightcast.rollout.requests import Generation, GenerationRequest

log = logging.getLogger("weightcast.rollout")

SchedulerState = Literal["serving", "paused", "asleep", "failed"]
CommandAnswer = TypeVar("CommandAnswer", Chosen, Scores, Done)

_HEARTBEAT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counters since the start, and the present state."""

    state: SchedulerState
    version: int
    running: int
    waiting: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    finished: dict[str, int]


# Over 350 lines: one condition guards the batch, the pauses and the jobs, and the loop reads all three in one step.
class Scheduler:
    """Generates for many requests at once.  Every public method is thread-safe.

    Args:
        executor: All ranks of the engine.  The scheduler runs commands on it and does not close it.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        limits: Limits,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        version: int = 0,
    ) -> None:
        self.limits = limits
        self._executor = executor
        self._eos = eos_token_ids
        self._vocab_size = vocab_size
        self.version = version
        self._changed = threading.Condition()
        self._batch = ContinuousBatch(limits)
        self._aborted: set[str] = set()
        self._pauses = Pauses()
        self._jobs: deque[Callable[[], None]] = deque()
        self.failure: str | None = None
        self._unproven: Unproven | None = None
        self._closing = False
        self._moving = threading.Lock()  # held while weights move off the accelerator or back
        self._moved = False
        self._thread = threading.Thread(target=self._loop, name="weightcast-scheduler", daemon=True)
        self._thread.start()

    # -- requests

    def submit(
        self,
        request: GenerationRequest,
        *,
        stops_text: Callable[[int], bool] | None = None,
        on_change: Callable[[bool], None] = lambda _: None,
    ) -> Generation:
        """Queues a request; while the engine is paused the request waits.

        Args:
            stops_text: Function that takes each token of the answer, in order and in the scheduler's thread, and
                returns True if the answer ends with it.
            on_change: The same as for `Generation`.

        Raises:
            ConfigError: This engine cannot serve the request; the text says why.
            Refused: Too many requests wait already.
            EngineFailure: The engine has failed or is shutting down.
        """
        self.limits.check(request, vocab_size=self._vocab_size)
        stop = request.stop_token_ids if request.ignore_eos else request.stop_token_ids | self._eos
        generation = Generation(request, on_change)
        with self._changed:
            self._check_alive()
            self._batch.add(generation, stop=stop, stops_text=stops_text)
            if self._unproven is not None:
                self._unproven.hold(generation)
            self._changed.notify_all()
        return generation

    def abort(self, request_id: str) -> None:
        """Ends a request with the tokens that it has; unknown ids are ignored."""
        with self._changed:
            self._aborted.add(request_id)
            self._changed.notify_all()

    def score(self, token_ids: Sequence[int], *, timeout_s: float = 120.0, during_update: bool = True) -> list[float]:
        """Log-probability of each token after the first, given those before it, under the live weights.

        It works while the engine is paused, so that new weights can be tried before they serve.

        Args:
            during_update: Also score while an update pauses the engine, when weights may be of two versions.

        Raises:
            ConfigError: There are fewer than two tokens, too many for the context, or ids that are not the model's.
            Refused: The engine is asleep, or paused by an update although ``during_update`` is False.
            EngineFailure: The engine has failed.
        """
        if not 2 <= len(token_ids) <= self.limits.max_len:
            raise ConfigError(f"cannot score {len(token_ids)} tokens: the engine takes 2 to {self.limits.max_len}")
        check_tokens(token_ids, vocab_size=self._vocab_size)

        def check() -> None:
            if self.asleep:
                raise Refused("the engine is asleep", hint="POST /wake first")
            if not during_update and self._pauses.held_by(UPDATE):
                raise Refused("the engine is paused by an update", hint="ask again when the update is over")
            if not during_update and self._unproven is not None:
                raise Refused("the new weights are not proven yet", hint="ask again when the update is over")

        return self._do(commands.Score(rows=[list(token_ids)]), Scores, timeout_s, check=check).rows[0]

    # -- pausing

    def pause(self, mode: PauseMode, timeout_s: float, *, holder: str = UPDATE) -> None:
        """Pauses the engine and returns when nothing runs; it runs again when every holder has called `resume`.

        Args:
            mode: ``abort`` ends running and waiting requests; ``retract`` keeps requests and tokens and recomputes
                their cache on resume; ``in_place`` keeps the cache too; ``wait`` lets running requests finish and
                admits no others.
            timeout_s: Deadline, in seconds; only ``wait`` comes near it.

        Raises:
            DeadlineExceeded: Requests were still running; the engine is not paused.
            Refused: The mode is ``wait``, and another holder keeps running requests in place.
            EngineFailure: The engine has failed.
        """
        with self._changed:
            self._check_alive()
            pause = self._pauses.ask(mode, holder)
            self._changed.notify_all()
            in_time = self._changed.wait_for(lambda: pause.done or self.failure is not None or self._closing, timeout_s)
            if not pause.done:
                self._pauses.withdraw(pause)
                self._changed.notify_all()
                self._check_alive()
            if pause.refusal:
                raise Refused(pause.refusal)
            if not in_time:
                raise DeadlineExceeded(
                    who="engine",
                    waiting_for=f"{len(self._batch.running)} running requests to finish (pause mode {mode})",
                    timeout_s=timeout_s,
                    hint="allow more time, or pause with abort, retract or in_place",
                )

    def stop_waiting(self, *, holder: str = UPDATE) -> None:
        """Cancels this holder's unfinished `pause` in mode ``wait``, which then raises `Refused`."""
        with self._changed:
            self._pauses.call_off(holder)
            self._changed.notify_all()

    def resume(self, *, holder: str = UPDATE) -> None:
        """Ends this holder's pause, if it has one; the engine runs when no other holder pauses it."""
        with self._changed:
            self._pauses.release(holder)
            self._changed.notify_all()

    def drop_caches(self, *, timeout_s: float = 60.0) -> None:
        """Drops all keys and values, except those of requests that are paused in place."""
        with self._changed:
            if self._batch.running or self._pauses.held_by(SLEEP):
                return
        self._do(commands.DropCache(), Done, timeout_s)

    def set_version(self, version: int) -> None:
        """Sets the version of tokens from now on.  Call it while the engine is paused."""
        with self._changed:
            self.version = version

    # -- weights that are not proven yet

    def resume_unproven(self, version: int, *, holder: str = UPDATE) -> None:
        """Ends this holder's pause for weights of this version, which are read back next.

        Whatever they generate is kept from its reader until `proven` or `end_unproven`.
        """
        with self._changed:
            self._unproven = Unproven(self.version, self._batch.generations())
            self.version = version
            self._pauses.release(holder)
            self._changed.notify_all()

    def proven(self) -> None:
        """Gives readers what was generated since `resume_unproven`."""
        with self._changed:
            unproven, self._unproven = self._unproven, None
            if unproven is not None:
                unproven.let_go()

    def end_unproven(self, why: str, timeout_s: float, *, holder: str = UPDATE) -> int:
        """Pauses the engine and ends, with an error, each request for which unproven weights have generated.

        The others keep their tokens and cache.  Tokens have the version of before again.

        Returns:
            The number of requests that ended so.

        Raises:
            DeadlineExceeded, EngineFailure: The engine is not paused.  The requests have ended all the same.
        """
        try:
            self.pause("in_place", timeout_s, holder=holder)
        finally:
            with self._changed:
                ended = self._drop_unproven(why)
        return ended

    def _drop_unproven(self, why: str) -> int:
        unproven, self._unproven = self._unproven, None
        if unproven is None:
            return 0
        self.version = unproven.version_before
        dropped = unproven.drop(why)
        self._batch.end_these(dropped, version=self.version, error=why)
        return len(dropped)

    def sleep(
        self,
        mode: PauseMode = "abort",
        *,
        timeout_s: float = 60.0,
        alone: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Pauses, frees the cache and moves the weights off the accelerator.

        Args:
            alone: Context that keeps updates out; entered once nothing runs, not while requests finish.

        Raises:
            ConfigError: The mode is ``in_place``, which keeps the cache that sleep frees.
            Refused: `alone` refused, or a caller woke the engine before the weights had moved.
            DeadlineExceeded, EngineFailure: The same as for `pause`.
        """
        if mode == "in_place":
            raise ConfigError("mode in_place keeps the cache, which sleep frees", hint="use abort, retract or wait")
        if not self.asleep:
            self.pause(mode, timeout_s, holder=SLEEP)
        with self._moving:
            if not self.asleep:
                raise Refused("sleep cancelled: the engine was woken before its weights had moved")
            if self._moved:
                return
            try:
                with alone():
                    self._moved = True  # first, because ranks carry the command out even if its answer is late
                    self._do(commands.Sleep(), Done, timeout_s)
            finally:
                if not self._moved:
                    self.resume(holder=SLEEP)

    def wake(self, *, timeout_s: float = 60.0) -> None:
        """Undoes `sleep`; the weights are the same, bit for bit.  Raises ``EngineFailure`` if the engine has failed."""
        # Never between the pause and the command of `sleep`: the engine would run without weights and fail.
        with self._moving:
            if self._moved:
                self._do(commands.Wake(), Done, timeout_s)
                self._moved = False
            self.resume(holder=SLEEP)

    # -- state

    @property
    def paused(self) -> bool:
        return self._pauses.held

    @property
    def asleep(self) -> bool:
        return self._pauses.held_by(SLEEP)

    def stats(self) -> Stats:
        """Counters and the present state."""
        with self._changed:
            return Stats(
                state=self._state(),
                version=self.version,
                running=len(self._batch.running),
                waiting=len(self._batch.waiting),
                steps=self._batch.steps,
                prompt_tokens=self._batch.prompt_tokens,
                generated_tokens=self._batch.generated_tokens,
                finished=dict(self._batch.finished),
            )

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Ends every request and the loop; safe to call twice.

        It waits at most `timeout_s` seconds for a step under way, which ends when the executor is closed.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _state(self) -> SchedulerState:
        if self.failure is not None:
            return "failed"
        if self._pauses.held_by(SLEEP):
            return "asleep"
        return "paused" if self._pauses.held else "serving"

    # -- checks

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise EngineFailure(self.failure, hint="restart the engine")
        if self._closing:
            raise EngineFailure("the engine is shutting down")

    # -- the loop

    def _loop(self) -> None:
        try:
            while self._step():
                pass
        except EngineFailure as error:
            self._fail(str(error))
        except Exception as error:
            # The ranks and this thread may no longer agree, so more tokens could be wrong.
            log.exception("the scheduler failed")
            self._fail(f"the scheduler failed: {type(error).__name__}: {error}")

    def _step(self) -> bool:
        """Sends one command to the ranks, or waits for work.  False ends the loop."""
        with self._changed:
            if self._closing:
                self._drop_unproven("the engine was shut down before its new weights were proven")
                self._batch.end_all("abort", version=self.version)
                self._end_jobs()
                return False
            self._batch.end_aborted(self._aborted, version=self.version)
            self._aborted.clear()
            if self._pauses.settle(self._batch, version=self.version):
                self._changed.notify_all()
            job = self._jobs.popleft() if self._jobs else None
            idle = self._pauses.held or not (self._batch.running or self._batch.waiting)
            # A pause that waits for running requests to finish must not see new ones start.
            admitted = [] if job or idle or self._pauses.pending else self._batch.admit()
            if job is None and (idle or not (admitted or self._batch.running)):
                # An idle engine pings its ranks, to notice one that died.
                if self._changed.wait(_HEARTBEAT_S):
                    return True
                job = partial(self._run, commands.Ping(), Done)
        if job is not None:
            job()
        else:
            self._generate(admitted)
        return True

    def _generate(self, admitted: list[TokenSequence]) -> None:
        """Prefills what was admitted, or else decodes one token for every running request."""
        with self._changed:
            command, sequences = self._batch.prefill(admitted) if admitted else self._batch.decode()
        version = self.version  # the version that makes the tokens, not the one after the step
        chosen = self._run(command, Chosen)
        ended = self._batch.take(sequences, chosen, version=version)
        with self._changed:
            self._batch.end(ended, version=self.version)

    def _fail(self, why: str) -> None:
        log.error("the engine has failed: %s", why)
        with self._changed:
            self.failure = why
            self._drop_unproven(why)
            self._batch.end_all("error", version=self.version, error=why)
            self._end_jobs()
            self._changed.notify_all()

    def _end_jobs(self) -> None:
        while self._jobs:
            self._jobs.popleft()()  # finds that the engine is not alive and fails the caller's future

    # -- commands

    def _run(self, command: Command, kind: type[CommandAnswer]) -> CommandAnswer:
        return commands.decode_answer(self._executor.run(commands.encode(command)), kind)

    def _do(
        self, command: Command, kind: type[CommandAnswer], timeout_s: float, *, check: Callable[[], None] = lambda: None
    ) -> CommandAnswer:
        """Lets the loop run a command between two steps, and waits for its answer.

        The loop calls `check` right before the command; if it raises `Refused`, the command does not run.
        """
        future: Future[CommandAnswer] = Future()

        def job() -> None:
            try:
                check()
            except Refused as error:
                future.set_exception(error)
                return
            try:
                self._check_alive()
                future.set_result(self._run(command, kind))
            except Exception as error:
                future.set_exception(error)
                if self.failure is None and not self._closing:
                    raise

        with self._changed:
            self._check_alive()
            self._jobs.append(job)
            self._changed.notify_all()
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                who="engine", waiting_for=f"{type(command).__name__.lower()} on every rank", timeout_s=timeout_s
            ) from None
