"""One generation request and its growing answer.

The scheduler writes the answer from its own thread; one reader follows it from any other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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


class Generation:
    """A request under way, for one reader, which gets its `result` or follows its `news`.

    Args:
        on_change: Called in the scheduler's thread after each new token, and with True at the end.
    """

    def __init__(self, request: GenerationRequest, on_change: Callable[[bool], None] = lambda _: None) -> None:
        self.request = request
        self.answer = GenerateAnswer()  # so far; complete once `finish_reason` is set
        self._changed = threading.Condition()
        self._on_change = on_change
        self._read = 0

    # -- the scheduler's side

    def add(self, token: int, logprob: float, top: list[tuple[int, float]], *, version: int) -> None:
        """Appends one token."""
        answer = self.answer
        with self._changed:
            answer.tokens.append(token)
            answer.logprobs.append(logprob)
            answer.top.append(top)
            if not answer.spans or answer.spans[-1][0] != version:
                answer.spans.append((version, 0))
            answer.spans[-1] = (version, answer.spans[-1][1] + 1)
            answer.version = version
        self._on_change(False)

    def finish(self, reason: FinishReason, *, version: int, error: str | None = None) -> None:
        """Completes the answer."""
        with self._changed:
            self.answer.finish_reason = reason
            self.answer.error = error
            if not self.answer.tokens:
                self.answer.version = version
            self._changed.notify_all()
        self._on_change(True)

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
        if self.answer.finish_reason == "error":
            raise EngineFailure(self.answer.error or "the engine failed")
        return self.answer

    def news(self) -> GenerateAnswer:
        """The tokens since the last call, with the versions of all tokens so far."""
        with self._changed:
            start, self._read = self._read, len(self.answer.tokens)
            answer = self.answer
            return replace(
                answer,
                tokens=answer.tokens[start:],
                logprobs=answer.logprobs[start:],
                top=answer.top[start:],
                spans=list(answer.spans),
            )
