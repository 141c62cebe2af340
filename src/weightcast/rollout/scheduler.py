"""The continuous decode loop: who runs, who waits, and when the engine must hold still.

One thread owns the ranks: every command to them comes from it, one at a time.  Other threads submit,
abort, pause and resume; what they ask for happens between two steps.  The scheduler knows tokens and
versions; text, HTTP and weights are other people's business.

Several parties may hold the engine still at once (an update, an operator, sleep): it runs again when
the last of them lets go.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, TypeVar

from weightcast.config import PauseMode
from weightcast.errors import ConfigError, DeadlineExceeded, EngineFailure, Refused
from weightcast.receiver.executor import Executor
from weightcast.rollout import commands
from weightcast.rollout.commands import Chosen, Command, Decode, Done, Move, Prefill, Sampling, Scores
from weightcast.rollout.requests import FinishReason, Generation, GenerationRequest

log = logging.getLogger("weightcast.rollout")

EngineState = Literal["serving", "paused", "asleep", "failed"]
Answered = TypeVar("Answered", Chosen, Scores, Done)

_HEARTBEAT_S = 1.0
_SLEEP = "sleep"
_UPDATE = "update"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much runs at once.

    Attributes:
        max_batch: Requests that run at once.
        max_len: Tokens of a request, prompt and answer together.
        max_waiting: Requests that may wait; more are refused.
        prefill_tokens: Prompt tokens, padding included, that are computed in one step (one long prompt may have more).
    """

    max_batch: int = 32
    max_len: int = 2048
    max_waiting: int = 4096
    prefill_tokens: int = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counters since the start, and what is going on now."""

    state: EngineState
    version: int
    running: int
    waiting: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    finished: dict[str, int]


class _Sequence:
    """A request on its way: its tokens, and how many of them are in the cache."""

    __slots__ = ("cached", "generation", "limit", "random", "stop", "tokens")

    def __init__(self, generation: Generation, *, limit: int, stop: frozenset[int]) -> None:
        request = generation.request
        self.generation = generation
        self.tokens = list(request.prompt)
        self.cached = 0
        self.limit = limit
        self.stop = stop
        self.random = random.Random(request.seed)


class _Pause:
    """Somebody wants the engine to hold still."""

    def __init__(self, mode: PauseMode, holder: str) -> None:
        self.mode: PauseMode = mode
        self.holder = holder
        self.done = False
        self.refusal: str | None = None


class Scheduler:
    """Generates for many requests at once.  Every public method is thread-safe.

    Args:
        executor: All ranks of the engine.  The scheduler runs commands on it and does not close it.
        limits: How much runs at once.
        eos_token_ids: The model's own end-of-sequence tokens.
        vocab_size: Token ids are below this.
        version: Version of the weights at the start.
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
        self._version = version
        self._changed = threading.Condition()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._moves: list[Move] = []
        self._aborted: set[str] = set()
        self._holders: set[str] = set()
        self._pauses: list[_Pause] = []
        self._jobs: deque[Callable[[], None]] = deque()
        self._failure: str | None = None
        self._closing = False
        self._moving = threading.Lock()  # whoever moves the weights off the accelerator or back
        self._moved = False
        self._steps = self._prompt_tokens = self._generated_tokens = 0
        self._finished: dict[str, int] = {}
        self._thread = threading.Thread(target=self._loop, name="weightcast-scheduler", daemon=True)
        self._thread.start()

    # -- requests

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request; while the engine is paused it waits.

        Raises:
            ConfigError: The request cannot be served by this engine; the text says why.
            Refused: Too many requests wait already.
            EngineFailure: The engine has failed or is shutting down.
        """
        self._check_request(request)
        room = self.limits.max_len - len(request.prompt)
        limit = len(request.prompt) + min(room, request.max_tokens if request.max_tokens is not None else room)
        stop = request.stop_token_ids if request.ignore_eos else request.stop_token_ids | self._eos
        generation = Generation(request)
        with self._changed:
            self._check_alive()
            if len(self._waiting) >= self.limits.max_waiting:
                raise Refused(f"{len(self._waiting)} requests are waiting already", hint="send fewer at once")
            self._waiting.append(_Sequence(generation, limit=limit, stop=stop))
            self._changed.notify_all()
        return generation

    def abort(self, request_id: str) -> None:
        """End a request with what it has; unknown ids are ignored."""
        with self._changed:
            self._aborted.add(request_id)
            self._changed.notify_all()

    def score(self, token_ids: Sequence[int], *, timeout_s: float = 120.0, during_update: bool = True) -> list[float]:
        """Log-probability of each token after the first, given those before it, under the live weights.

        Works while paused, so that new weights can be tried before they serve.

        Args:
            token_ids: The text.
            timeout_s: Limit.
            during_update: Also while an update holds the engine still, with weights that may be of two versions.

        Raises:
            ConfigError: Fewer than two tokens, or more than the context holds, or ids that are not the model's.
            Refused: The engine is asleep, or held still by an update although ``during_update`` is False.
            EngineFailure: The engine has failed.
        """
        if not 2 <= len(token_ids) <= self.limits.max_len:
            raise ConfigError(f"{len(token_ids)} tokens: 2 to {self.limits.max_len} can be scored")
        self._check_tokens(token_ids)

        def check() -> None:
            if self.asleep:
                raise Refused("the engine is asleep", hint="POST /wake first")
            if not during_update and _UPDATE in self._holders:
                raise Refused("an update holds the engine still", hint="ask again when it is over")

        return self._do(commands.Score(rows=[list(token_ids)]), Scores, timeout_s, check=check).rows[0]

    # -- holding still

    def pause(self, mode: PauseMode, timeout_s: float, *, holder: str = _UPDATE) -> None:
        """Return when nothing runs; no step runs until every holder has called `resume`.

        Args:
            mode: ``abort`` ends running and waiting requests; ``retract`` keeps requests and tokens and
                computes their cache anew on resume; ``in_place`` keeps the cache too; ``wait`` lets running
                requests finish, the waiting ones wait.
            timeout_s: Limit; only ``wait`` comes near it.
            holder: Who asks.

        Raises:
            DeadlineExceeded: Requests were still running; the engine goes on as before.
            Refused: ``wait`` while somebody else holds running requests in place.
            EngineFailure: The engine has failed.
        """
        pause = _Pause(mode, holder)
        with self._changed:
            self._check_alive()
            if _SLEEP in self._holders and holder != _SLEEP:
                raise Refused("the engine is asleep", hint="POST /wake first")
            self._pauses.append(pause)
            self._changed.notify_all()
            in_time = self._changed.wait_for(
                lambda: pause.done or self._failure is not None or self._closing, timeout_s
            )
            if not pause.done:
                self._pauses.remove(pause)
                self._changed.notify_all()
                self._check_alive()
            if pause.refusal:
                raise Refused(pause.refusal)
            if not in_time:
                raise DeadlineExceeded(
                    who="engine",
                    waiting_for=f"{len(self._running)} running requests to finish (pause mode {mode})",
                    timeout_s=timeout_s,
                    hint="allow more time, or pause with abort, retract or in_place",
                )

    def stop_waiting(self, *, holder: str = _UPDATE) -> None:
        """Call off this holder's `pause` in mode ``wait`` that is not reached yet: it raises `Refused`."""
        with self._changed:
            for pause in self._pauses:
                if pause.holder == holder and pause.mode == "wait":
                    pause.refusal = "whoever wanted the engine to hold still has gone"
                    pause.done = True
            self._pauses = [pause for pause in self._pauses if not pause.done]
            self._changed.notify_all()

    def resume(self, *, holder: str = _UPDATE) -> None:
        """Let go; the engine runs when nobody else holds it.  Without a pause, nothing happens."""
        with self._changed:
            self._holders.discard(holder)
            self._changed.notify_all()

    def drop_caches(self, *, timeout_s: float = 60.0) -> None:
        """Forget keys and values, except those of requests that are held in place."""
        with self._changed:
            if self._running or _SLEEP in self._holders:
                return
        self._do(commands.DropCache(), Done, timeout_s)

    def set_version(self, version: int) -> None:
        """Tokens from now on come from this version.  Called while the engine holds still."""
        with self._changed:
            self._version = version

    def sleep(
        self,
        mode: PauseMode = "abort",
        *,
        timeout_s: float = 60.0,
        alone: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Hold still, free the cache, move the weights off the accelerator.

        Args:
            mode: As `pause`.
            timeout_s: Limit.
            alone: Keeps whatever else moves weights out; entered when nothing runs any more, not while requests finish.

        Raises:
            ConfigError: ``in_place``, which keeps what sleep frees.
            Refused: `alone` was, or somebody called `wake` before the weights had moved.
            DeadlineExceeded, EngineFailure: As `pause`.
        """
        if mode == "in_place":
            raise ConfigError("sleep frees the cache: in_place cannot keep it", hint="abort, retract or wait")
        if not self.asleep:
            self.pause(mode, timeout_s, holder=_SLEEP)
        with self._moving:
            if not self.asleep:
                raise Refused("the engine was woken while it was falling asleep")
            if self._moved:
                return
            try:
                with alone():
                    self._moved = True  # first: a command whose answer is late is carried out all the same
                    self._do(commands.Sleep(), Done, timeout_s)
            finally:
                if not self._moved:
                    self.resume(holder=_SLEEP)

    def wake(self, *, timeout_s: float = 60.0) -> None:
        """Undo `sleep`; the weights are the same, bit for bit.

        Raises:
            EngineFailure: The engine has failed.
        """
        # Not between the hold and the command of `sleep`: with weights that moved with nobody holding, the next request
        # ends the engine.
        with self._moving:
            if self._moved:
                self._do(commands.Wake(), Done, timeout_s)
                self._moved = False
            self.resume(holder=_SLEEP)

    # -- what it is doing

    @property
    def version(self) -> int:
        """Version of the weights that generate now."""
        return self._version

    @property
    def paused(self) -> bool:
        """True while anybody holds the engine still."""
        return bool(self._holders)

    @property
    def asleep(self) -> bool:
        """True between `sleep` and `wake`."""
        return _SLEEP in self._holders

    @property
    def failure(self) -> str | None:
        """Why the engine cannot serve any more, or None."""
        return self._failure

    def stats(self) -> Stats:
        """Counters and the present state."""
        with self._changed:
            return Stats(
                state=self._state(),
                version=self._version,
                running=len(self._running),
                waiting=len(self._waiting),
                steps=self._steps,
                prompt_tokens=self._prompt_tokens,
                generated_tokens=self._generated_tokens,
                finished=dict(self._finished),
            )

    def close(self, *, timeout_s: float = 5.0) -> None:
        """End every request and the loop; safe to call twice.

        A step under way is waited for no longer than `timeout_s`; closing the executor ends it.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _state(self) -> EngineState:
        if self._failure is not None:
            return "failed"
        if _SLEEP in self._holders:
            return "asleep"
        return "paused" if self._holders else "serving"

    # -- checks

    def _check_request(self, request: GenerationRequest) -> None:
        if not request.prompt:
            raise ConfigError("the prompt has no tokens")
        if len(request.prompt) >= self.limits.max_len:
            raise ConfigError(
                f"the prompt has {len(request.prompt)} tokens; the context holds {self.limits.max_len}, "
                "one of them for an answer"
            )
        if request.max_tokens is not None and request.max_tokens < 1:
            raise ConfigError(f"max_tokens is {request.max_tokens}; at least 1 can be generated")
        self._check_tokens(request.prompt)

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            raise ConfigError(f"token ids go from 0 to {self._vocab_size - 1}")

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineFailure(self._failure, hint="restart the engine")
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
            # Whatever it was, the ranks and this thread no longer agree: serving on could serve wrong tokens.
            log.exception("the scheduler failed")
            self._fail(f"the scheduler failed: {type(error).__name__}: {error}")

    def _step(self) -> bool:
        """One command to the ranks, or a wait for something to do.  False to end."""
        with self._changed:
            if self._closing:
                self._end_all("abort", None)
                self._end_jobs()
                return False
            self._end_aborted()
            self._settle_pauses()
            job = self._jobs.popleft() if self._jobs else None
            idle = bool(self._holders) or not (self._running or self._waiting)
            admitted = [] if job or idle else self._admit()
            if job is None and (idle or not (admitted or self._running)):
                # Also with nothing to do somebody must notice a rank that died.
                if not self._changed.wait(_HEARTBEAT_S):
                    job = self._ping
                if job is None:
                    return True
        if job is not None:
            job()
        elif admitted:
            self._prefill(admitted)
        else:
            self._decode()
        return True

    def _settle_pauses(self) -> None:
        for pause in list(self._pauses):
            if pause.mode == "abort":
                self._end_all("abort", None)
            elif pause.mode == "retract":
                self._retract()
            elif pause.mode == "wait" and self._running:
                if not self._holders:
                    continue
                pause.refusal = f"{len(self._running)} requests are held in place and cannot finish"
            if not pause.refusal:
                self._holders.add(pause.holder)
            pause.done = True
            self._pauses.remove(pause)
            self._changed.notify_all()

    def _retract(self) -> None:
        for sequence in reversed(self._running):
            sequence.cached = 0
            self._waiting.appendleft(sequence)
        self._running.clear()
        self._moves.clear()

    def _admit(self) -> list[_Sequence]:
        """Take the next few off the queue, oldest first, as many as fit into a batch and into one step."""
        if self._pauses:  # somebody waits for the running ones to finish
            return []
        admitted: list[_Sequence] = []
        unique: set[tuple[int, ...]] = set()
        longest = 0
        while self._waiting and len(self._running) + len(admitted) < self.limits.max_batch:
            sequence = self._waiting[0]
            tokens = tuple(sequence.tokens)
            width = max(longest, len(tokens))
            rows = len(unique | {tokens})
            if admitted and rows * width > self.limits.prefill_tokens:
                break
            unique.add(tokens)
            longest = width
            admitted.append(self._waiting.popleft())
        return admitted

    def _prefill(self, admitted: list[_Sequence]) -> None:
        # The samples of one prompt are computed once and copied.
        rows: dict[tuple[int, ...], _Sequence] = {}
        twins: list[_Sequence] = []
        for sequence in admitted:
            if rows.setdefault(tuple(sequence.tokens), sequence) is not sequence:
                twins.append(sequence)
        order = [*rows.values(), *twins]
        index = {tokens: place for place, tokens in enumerate(rows)}
        command = Prefill(
            moves=self._take_moves(),
            first_slot=len(self._running),
            rows=[list(tokens) for tokens in rows],
            twins=[index[tuple(sequence.tokens)] for sequence in twins],
            sampling=_sampling(order),
        )
        with self._changed:
            self._running += order
            self._prompt_tokens += sum(len(sequence.tokens) for sequence in order)
        version = self._version  # not that of after the step
        chosen = self._run(command, Chosen)
        for sequence in order:
            sequence.cached = len(sequence.tokens)
        self._take(order, chosen, version)

    def _decode(self) -> None:
        running = self._running
        command = Decode(
            moves=self._take_moves(),
            tokens=[sequence.tokens[-1] for sequence in running],
            positions=[sequence.cached for sequence in running],
            sampling=_sampling(running),
        )
        version = self._version
        chosen = self._run(command, Chosen)
        for sequence in running:
            sequence.cached += 1
        self._take(running, chosen, version)

    def _take(self, sequences: Sequence[_Sequence], chosen: Chosen, version: int) -> None:
        """Give each sequence its token, made by this version; end those that are complete."""
        ended: list[tuple[_Sequence, FinishReason, str | None]] = []
        for sequence, token, logprob, top in zip(sequences, chosen.tokens, chosen.logprobs, chosen.top, strict=True):
            if token < 0:
                ended.append((sequence, "error", f"version {version} gives logits that are not finite"))
                continue
            sequence.tokens.append(token)
            sequence.generation.add(token, logprob, top, version=version)
            if token in sequence.stop:
                ended.append((sequence, "stop", None))
            elif len(sequence.tokens) >= sequence.limit:
                ended.append((sequence, "length", None))
        with self._changed:
            self._steps += 1
            self._generated_tokens += len(chosen.tokens)
            for sequence, reason, error in ended:
                self._remove_running(sequence)
                self._end(sequence, reason, error)

    def _remove_running(self, sequence: _Sequence) -> None:
        """Close the gap with the last slot, so that running sequences stay without holes."""
        slot = next(place for place, other in enumerate(self._running) if other is sequence)
        last = self._running.pop()
        if last is not sequence:
            self._running[slot] = last
            self._moves.append(Move(len(self._running), slot, last.cached))

    def _take_moves(self) -> list[Move]:
        moves, self._moves = self._moves, []
        return moves

    def _end_aborted(self) -> None:
        if not self._aborted:
            return
        for sequence in [*self._running, *self._waiting]:
            if sequence.generation.request.request_id in self._aborted:
                if any(sequence is other for other in self._running):
                    self._remove_running(sequence)
                else:
                    self._waiting.remove(sequence)
                self._end(sequence, "abort", None)
        self._aborted.clear()

    def _end_all(self, reason: FinishReason, error: str | None) -> None:
        for sequence in [*self._running, *self._waiting]:
            self._end(sequence, reason, error)
        self._running.clear()
        self._waiting.clear()
        self._moves.clear()

    def _end(self, sequence: _Sequence, reason: FinishReason, error: str | None) -> None:
        self._finished[reason] = self._finished.get(reason, 0) + 1
        sequence.generation.finish(reason, version=self._version, error=error)

    def _fail(self, why: str) -> None:
        log.error("the engine has failed: %s", why)
        with self._changed:
            self._failure = why
            self._end_all("error", why)
            self._end_jobs()
            self._changed.notify_all()

    def _end_jobs(self) -> None:
        while self._jobs:
            self._jobs.popleft()()  # finds that the engine is not alive and tells whoever waits for it

    # -- commands

    def _run(self, command: Command, kind: type[Answered]) -> Answered:
        return commands.decode_answer(self._executor.run(commands.encode(command)), kind)

    def _ping(self) -> None:
        self._run(commands.Ping(), Done)

    def _do(
        self, command: Command, kind: type[Answered], timeout_s: float, *, check: Callable[[], None] = lambda: None
    ) -> Answered:
        """Have the loop run a command between two steps; wait for its answer.

        `check` may refuse it just before; nobody gets hold of the engine between that and the command.
        """
        future: Future[Answered] = Future()

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
                if self._failure is None and not self._closing:
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


def _sampling(sequences: Sequence[_Sequence]) -> Sampling:
    requests = [sequence.generation.request for sequence in sequences]
    return Sampling(
        temperature=[request.temperature for request in requests],
        top_k=[request.top_k for request in requests],
        top_p=[request.top_p for request in requests],
        uniform=[sequence.random.random() for sequence in sequences],
        top_logprobs=[request.top_logprobs for request in requests],
    )
