"""OpenAI's responses, with fields for reinforcement learning: `weight_version`, `weight_versions` and `token_ids`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from weightcast.rollout.engine import RolloutEngine
from weightcast.rollout.openai_requests import ChatRequest, CompletionRequest, Sampled
from weightcast.rollout.requests import GenerateAnswer
from weightcast.rollout.text import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerChunk:
    """One complete answer, or the part of one that an event of a stream has.

    Attributes:
        text: Text of the piece; empty for a model without a tokenizer.
        answer: Tokens, log-probabilities and versions up to the piece's end, without tokens after a stop string.
        start: Number of the answer's tokens before the piece.
        offset: Number of the answer's characters before it.
    """

    index: int
    text: str
    answer: GenerateAnswer
    finish_reason: str | None
    start: int = 0
    offset: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.answer.tokens[self.start :]

    @property
    def scored(self) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
        answer, start = self.answer, self.start
        return zip(answer.tokens[start:], answer.logprobs[start:], answer.top[start:], strict=True)


class AnswerShape:
    """The response format of one of the two endpoints."""

    prefix = ""
    kind = ""
    chunk_kind = ""

    def __init__(self, engine: RolloutEngine, body: Sampled) -> None:
        self._engine = engine
        self._ids = body.return_token_ids
        self._created = int(time.time())

    def whole(self, call: str, choices: Sequence[AnswerChunk], counts: dict[str, int]) -> dict[str, Any]:
        """A response that is not streamed."""
        entries = [{**self._entry(choice, "message"), **_versions([choice.answer])} for choice in choices]
        head = self._head(call, self.kind)
        return {**head, "choices": entries, "usage": counts, **_versions([choice.answer for choice in choices])}

    def piece(self, call: str, piece: AnswerChunk) -> dict[str, Any]:
        """One event of a stream; the last of a choice has the weight versions of its tokens."""
        entry, known = self._entry(piece, "delta"), _versions([piece.answer])
        if piece.finish_reason is not None:
            entry |= known
        return {
            **self._head(call, self.chunk_kind),
            "choices": [entry],
            "weight_version": known["weight_version"],
        }

    def last(self, call: str, counts: dict[str, int]) -> dict[str, Any]:
        """The event with the token counts."""
        return {**self._head(call, self.chunk_kind), "choices": [], "usage": counts}

    def content(self, piece: AnswerChunk, key: str) -> dict[str, Any]:
        """Text and log-probabilities; ``key`` is where a chat has its text."""
        raise AssertionError("each endpoint has its own")

    def _entry(self, piece: AnswerChunk, key: str) -> dict[str, Any]:
        entry = {"index": piece.index, **self.content(piece, key), "finish_reason": piece.finish_reason}
        return {**entry, "token_ids": piece.tokens} if self._ids else entry

    def _head(self, call: str, kind: str) -> dict[str, Any]:
        return {"id": f"{self.prefix}-{call}", "object": kind, "created": self._created, "model": self._engine.model}


class CompletionShape(AnswerShape):
    """The response format of ``/v1/completions``."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, engine: RolloutEngine, body: CompletionRequest) -> None:
        super().__init__(engine, body)
        self._logprobs = body.logprobs is not None

    def content(self, piece: AnswerChunk, key: str) -> dict[str, Any]:
        """As ``AnswerShape.content``."""
        numbers = _completion_logprobs(self._engine.text, piece) if self._logprobs else None
        return {"text": piece.text, "logprobs": numbers}


class ChatShape(AnswerShape):
    """The response format of ``/v1/chat/completions``."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, engine: RolloutEngine, body: ChatRequest) -> None:
        super().__init__(engine, body)
        self._logprobs = bool(body.logprobs)

    def content(self, piece: AnswerChunk, key: str) -> dict[str, Any]:
        """As ``AnswerShape.content``; the role comes with an answer's first tokens."""
        role = {} if piece.start else {"role": "assistant"}
        numbers = _chat_logprobs(self._engine.text, piece) if self._logprobs else None
        return {key: {**role, "content": piece.text}, "logprobs": numbers}


def usage(prompt_tokens: int, answers: Iterable[GenerateAnswer]) -> dict[str, int]:
    """Token counts of a response."""
    completion = sum(len(answer.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
    }


def _spans(answers: Iterable[GenerateAnswer]) -> list[dict[str, int]]:
    """Number of tokens from each weight version: one answer's in order, several answers' summed by version."""
    listed = list(answers)
    if len(listed) == 1:
        return [{"version": version, "tokens": count} for version, count in listed[0].spans]
    totals: dict[int, int] = {}
    for answer in listed:
        for version, count in answer.spans:
            totals[version] = totals.get(version, 0) + count
    return [{"version": version, "tokens": count} for version, count in sorted(totals.items())]


def _versions(answers: Sequence[GenerateAnswer]) -> dict[str, Any]:
    return {"weight_version": max(answer.version for answer in answers), "weight_versions": _spans(answers)}


def _completion_logprobs(text: TextTokenizer | None, piece: AnswerChunk) -> dict[str, Any]:
    scored = list(piece.scored)
    words = [_piece(text, token) for token, _, _ in scored]
    top = [{_piece(text, token): value for token, value in others} for _, _, others in scored]
    return {
        "tokens": words,
        "token_logprobs": [value for _, value, _ in scored],
        "top_logprobs": top if any(top) else None,
        "text_offset": list(accumulate(map(len, words), initial=piece.offset))[:-1],
    }


def _chat_logprobs(text: TextTokenizer | None, piece: AnswerChunk) -> dict[str, Any]:
    return {
        "content": [
            {**_entry(text, token, value), "top_logprobs": [_entry(text, *other) for other in others]}
            for token, value, others in piece.scored
        ]
    }


def _entry(text: TextTokenizer | None, token: int, value: float) -> dict[str, Any]:
    piece = _piece(text, token)
    return {"token": piece, "logprob": value, "bytes": list(piece.encode())}


def _piece(text: TextTokenizer | None, token: int) -> str:
    return text.piece(token) if text is not None else f"token_id:{token}"
