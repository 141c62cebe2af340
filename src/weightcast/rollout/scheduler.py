"""Schedules the requests of one engine, and pauses and resumes it between two steps.

Threads submit, abort, pause and resume; the loop of ``loop.py`` carries it out.  ``batch.py`` decides what runs.

Several holders may pause the engine at once (an update, an operator, sleep).  It runs again when the last one resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from weightcast.config import PauseMode
from weightcast.errors import ConfigError, DeadlineExceeded, Refused
from weightcast.receiver.executor import Executor
from weightcast.rollout import commands
from weightcast.rollout.batch import ContinuousBatch, Limits, TokenSequence, check_tokens
from weightcast.rollout.commands import Chosen, Decode, Done, Prefill, Scores
from weightcast.rollout.loop import CommandLoop, LoopWork
from weightcast.rollout.pauses import SLEEP, UPDATE, Pauses
from weightcast.rollout.requests import Generation, GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counters since the start, and the present state."""

    state: Literal["serving", "paused", "asleep", "failed"]
    version: int
    running: int
    waiting: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    finished: dict[str, int]


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
        self.version = version
        self._eos = eos_token_ids
        self._vocab_size = vocab_size
        self._batch = ContinuousBatch(limits)
        self._aborted: set[str] = set()
        self._pauses = Pauses()
        self.loop = CommandLoop(executor, self)
        self._changed = self.loop.changed
        self.loop.start()

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
            stops_text: Function that takes each token of the answer, in order and in the loop's thread, and returns
                True if the answer ends with it.
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
            self.loop.check_alive()
            self._batch.add(generation, stop=stop, stops_text=stops_text)
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

        return self.loop.ask(commands.Score(rows=[list(token_ids)]), Scores, timeout_s, check=check).rows[0]

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
            self.loop.check_alive()
            pause = self._pauses.ask(mode, holder)
            self._changed.notify_all()
            self._changed.wait_for(lambda: pause.done or self.loop.ended, timeout_s)
            if pause.refusal:
                raise Refused(pause.refusal)
            if not pause.done:
                self._pauses.withdraw(pause)
                self._changed.notify_all()
                self.loop.check_alive()
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
            if self._batch.running or self.asleep:
                return
        self.loop.ask(commands.DropCache(), Done, timeout_s)

    def set_version(self, version: int) -> None:
        """Sets the version of tokens from now on.  Call it while the engine is paused."""
        with self._changed:
            self.version = version

    # -- state

    @property
    def paused(self) -> bool:
        return self._pauses.held

    @property
    def asleep(self) -> bool:
        return self._pauses.held_by(SLEEP)

    @property
    def failure(self) -> str | None:
        return self.loop.failure

    def stats(self) -> Stats:
        """Counters and the present state."""
        with self._changed:
            return Stats(
                state="failed" if self.failure else "asleep" if self.asleep else "paused" if self.paused else "serving",
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
        self.loop.close(timeout_s)

    # -- the loop's side: steps, with the lock held

    def settle(self) -> None:
        """Ends aborted requests, and carries out pauses."""
        self._batch.end_aborted(self._aborted, version=self.version)
        self._aborted.clear()
        if self._pauses.settle(self._batch, version=self.version):
            self._changed.notify_all()

    def next_step(self) -> LoopWork | None:
        """Prefills what can be admitted, or else decodes one token for every running request."""
        if self.paused:
            return None
        # A pause that waits for running requests to finish must not see new ones start.
        admitted = [] if self._pauses.pending else self._batch.admit()
        if not admitted and not self._batch.running:
            return None
        command, sequences = self._batch.prefill(admitted) if admitted else self._batch.decode()
        return partial(self._generate, command, sequences, self.version)

    def _generate(self, command: Prefill | Decode, sequences: Sequence[TokenSequence], version: int) -> None:
        """Runs a step, without the lock; `version` makes the tokens, and may not be the one after the step."""
        ended = self._batch.take(sequences, self.loop.send(command, Chosen), version=version)
        with self._changed:
            self._batch.end(ended, version=self.version)

    def end(self, failure: str | None) -> None:
        """Ends every request."""
        self._batch.end_all("error" if failure else "abort", version=self.version, error=failure)
