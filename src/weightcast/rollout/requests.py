"""One generation request and its growing answer.

The scheduler writes the answer from its own thread; one reader follows it, from any thread or from an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from weightcast.errors import DeadlineExceeded, EngineFailure

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A prompt and its sampling settings.

    Attributes:
        request_id: Identifier, unique among the requests under way.
        prompt: Token ids, at least one.
        max_tokens: Largest number of tokens to generate, at most what the context holds beside the prompt; None
            generates until the context is full.
        temperature: Sampling temperature; 0 takes the likeliest token each time.
        top_p: Probability mass of the likeliest tokens to choose from; 1 for all.
        top_k: Number of the likeliest tokens to choose from; 0 for all.
        min_p: Least probability to choose from, as a share of the likeliest token's; 0 for all.
        frequency_penalty: Amount off a token's logit for each time that it was generated.
        presence_penalty: Amount off a token's logit if it was generated.
        repetition_penalty: Divisor of positive logits, and factor of negative ones, of tokens in prompt or answer.
        logit_bias: Amount to add to a token's logit, by token id.
        allowed_token_ids: The only tokens to choose from; None for all.
        seed: Seed of the random numbers.  The same seed, prompt and weights give the same tokens, independent of the
            rest of the batch.  None for fresh randomness.
        stop_token_ids: Tokens that end the answer and are part of it.
        ignore_eos: Continue after the model's own end-of-sequence tokens.
        top_logprobs: Number of alternatives to report with each token.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    allowed_token_ids: frozenset[int] | None = None
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    top_logprobs: int = 0


@dataclass(slots=True)
class GenerateAnswer:
    """Tokens so far, with the weight version of each.

    Attributes:
        logprobs: Natural log-probability of each in the model's own distribution, before temperature and filters.
        top: Alternatives of each token, likeliest first.
        spans: (version, number of tokens) in order; the numbers add up to ``len(tokens)``.
        version: Version of the last token; for an answer without tokens, the one served when it ended.
        finish_reason: Reason of the end, or None while the answer grows.
        error: Text of the error, if the reason is ``"error"``.
    """

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    version: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(slots=True)
class _Held:
    """The end of an answer that its reader must not see yet."""

    tokens: list[tuple[int, float, list[tuple[int, float]], int]] = field(default_factory=list)
    finish: tuple[FinishReason, int, str | None] | None = None


class Generation:
    """A request under way, for one reader: `result` in a thread, `finished` or `progress` in an event loop."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.answer = GenerateAnswer()  # so far; complete once `finish_reason` is set
        self._held: _Held | None = None
        self._changed = threading.Condition()
        self._read = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._each_token = False

    # -- the scheduler's side

    def hold(self) -> None:
        """Keeps what comes from now on from the reader, until `let_go` or `drop`; a second call changes nothing."""
        with self._changed:
            if self._held is None and self.answer.finish_reason is None:
                self._held = _Held()

    def let_go(self) -> None:
        """Gives the reader what was held."""
        with self._changed:  # tokens that come meanwhile wait, and come after those
            held, self._held = self._held, None
            if held is None:
                return
            for token, logprob, top, version in held.tokens:
                self.add(token, logprob, top, version=version)
            if held.finish is not None:
                reason, version, error = held.finish
                self.finish(reason, version=version, error=error)

    def drop(self, error: str) -> bool:
        """Forgets the tokens that were held.  If there were some, the answer ends with this error; True then."""
        with self._changed:
            held, self._held = self._held, None
            if held is not None and held.tokens:
                self.finish("error", version=self.answer.version, error=error)
                return True
            if held is not None and held.finish is not None:
                reason, version, words = held.finish
                self.finish(reason, version=version, error=words)
            return False

    def add(self, token: int, logprob: float, top: list[tuple[int, float]], *, version: int) -> None:
        """Appends one token."""
        answer = self.answer
        with self._changed:
            if self._held is not None:
                self._held.tokens.append((token, logprob, top, version))
                return
            if answer.finish_reason is not None:  # such as one that was dropped during its last step
                return
            answer.tokens.append(token)
            answer.logprobs.append(logprob)
            answer.top.append(top)
            if answer.spans and answer.spans[-1][0] == version:
                answer.spans[-1] = (version, answer.spans[-1][1] + 1)
            else:
                answer.spans.append((version, 1))
            answer.version = version
        if self._each_token:
            self._notify()

    def finish(self, reason: FinishReason, *, version: int, error: str | None = None) -> None:
        """Completes the answer; calls after the first change nothing."""
        with self._changed:
            if self.answer.finish_reason is not None:
                return
            if self._held is not None:
                self._held.finish = self._held.finish or (reason, version, error)
                return
            self.answer.finish_reason = reason
            self.answer.error = error
            if not self.answer.tokens:
                self.answer.version = version
            self._changed.notify_all()
        self._notify()

    # -- the reader's side

    def result(self, timeout_s: float) -> GenerateAnswer:
        """Waits in a thread until the answer is complete.

        Raises:
            DeadlineExceeded: The answer was not complete in time; it continues to grow.
            EngineFailure: The answer ended with an error.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.answer.finish_reason is not None, timeout_s):
                raise DeadlineExceeded(
                    who=f"request {self.request.request_id}", waiting_for="its last token", timeout_s=timeout_s
                )
        return self._complete()

    async def finished(self) -> GenerateAnswer:
        """Waits in an event loop until the answer is complete; ``EngineFailure`` if it ended with an error."""
        await self._wait(each_token=False)
        return self._complete()

    async def progress(self) -> AsyncIterator[GenerateAnswer]:
        """Yields each new part of the answer, without versions; the last one has the finish reason."""
        while True:
            await self._wait(each_token=True)
            with self._changed:
                answer, start = self.answer, self._read
                self._read = len(answer.tokens)
                gained = GenerateAnswer(
                    tokens=answer.tokens[start:],
                    logprobs=answer.logprobs[start:],
                    top=answer.top[start:],
                    finish_reason=answer.finish_reason,
                    error=answer.error,
                )
            yield gained
            if gained.finish_reason is not None:
                return

    def _complete(self) -> GenerateAnswer:
        if self.answer.finish_reason == "error":
            raise EngineFailure(self.answer.error or "the engine failed")
        return self.answer

    def _notify(self) -> None:
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and its reader with it
                loop.call_soon_threadsafe(wake.set)

    async def _wait(self, *, each_token: bool) -> None:
        if self._wake is None:
            self._wake = asyncio.Event()
            self._loop = asyncio.get_running_loop()
            self._each_token = each_token
        while True:
            self._wake.clear()
            with self._changed:
                gained = each_token and len(self.answer.tokens) > self._read
                if gained or self.answer.finish_reason is not None:
                    return
            await self._wake.wait()
