"""OpenAI's responses, with fields for reinforcement learning: `weight_version`, `weight_versions` and `token_ids`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from weightcast.rollout.engine import RolloutEngine
from weightcast.rollout.openai_requests import ChatRequest, CompletionRequest, Sampled
from weightcast.rollout.requests import Answer
from weightcast.rollout.text import Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One complete answer, as text and as tokens.

    Attributes:
        text: The text, or None for a model without a tokenizer.
        answer: Tokens, log-probabilities and versions of the text, without tokens after a stop string.
    """

    index: int
    text: str | None
    answer: Answer
    finish_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Part of a streamed answer."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    offset: int
    finish_reason: str | None
    answer: Answer


class Shape:
    """The response format of one of the two endpoints."""

    prefix = ""
    kind = ""
    chunk_kind = ""

    def __init__(self, engine: RolloutEngine, body: Sampled) -> None:
        self._engine = engine
        self._ids = body.return_token_ids
        self._created = int(time.time())

    def whole(self, call: str, choices: Sequence[Choice], counts: dict[str, int]) -> dict[str, Any]:
        """A response that is not streamed."""
        entries: list[dict[str, Any]] = []
        for choice in choices:
            entry = {"index": choice.index, **self.content(choice), "finish_reason": choice.finish_reason}
            if self._ids:
                entry["token_ids"] = choice.answer.tokens
            entries.append({**entry, **_versions([choice.answer])})
        head = self._head(call, self.kind)
        return {**head, "choices": entries, "usage": counts, **_versions([choice.answer for choice in choices])}

    def piece(self, call: str, piece: Piece) -> dict[str, Any]:
        """One event of a stream; the last of a choice has the weight versions of its tokens."""
        entry = {"index": piece.index, **self.delta(piece), "finish_reason": piece.finish_reason}
        if self._ids:
            entry["token_ids"] = piece.tokens
        known = _versions([piece.answer])
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

    def content(self, choice: Choice) -> dict[str, Any]:
        """Text and log-probabilities of a whole choice."""
        raise AssertionError("each endpoint has its own")

    def delta(self, piece: Piece) -> dict[str, Any]:
        """Text and log-probabilities of a part of a choice."""
        raise AssertionError("each endpoint has its own")

    def _head(self, call: str, kind: str) -> dict[str, Any]:
        return {"id": f"{self.prefix}-{call}", "object": kind, "created": self._created, "model": self._engine.model}


class CompletionShape(Shape):
    """The response format of ``/v1/completions``."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, engine: RolloutEngine, body: CompletionRequest) -> None:
        super().__init__(engine, body)
        self._logprobs = body.logprobs is not None

    def content(self, choice: Choice) -> dict[str, Any]:
        """Text and log-probabilities."""
        answer = choice.answer
        return {
            "text": choice.text or "",
            "logprobs": self._numbers(answer.tokens, answer.logprobs, answer.top, 0),
        }

    def delta(self, piece: Piece) -> dict[str, Any]:
        """New text and log-probabilities."""
        return {
            "text": piece.text,
            "logprobs": self._numbers(piece.tokens, piece.logprobs, piece.top, piece.offset),
        }

    def _numbers(
        self, tokens: list[int], logprobs: list[float], top: list[list[tuple[int, float]]], start: int
    ) -> dict[str, Any] | None:
        return _completion_logprobs(self._engine.text, tokens, logprobs, top, start) if self._logprobs else None


class ChatShape(Shape):
    """The response format of ``/v1/chat/completions``."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, engine: RolloutEngine, body: ChatRequest) -> None:
        super().__init__(engine, body)
        self._logprobs = bool(body.logprobs)

    def content(self, choice: Choice) -> dict[str, Any]:
        """A message and log-probabilities."""
        answer = choice.answer
        return {
            "message": {"role": "assistant", "content": choice.text or ""},
            "logprobs": self._numbers(answer.tokens, answer.logprobs, answer.top),
        }

    def delta(self, piece: Piece) -> dict[str, Any]:
        """New text and log-probabilities; the role with the first."""
        first = {"role": "assistant"} if len(piece.tokens) == len(piece.answer.tokens) else {}
        return {
            "delta": {**first, "content": piece.text},
            "logprobs": self._numbers(piece.tokens, piece.logprobs, piece.top),
        }

    def _numbers(
        self, tokens: list[int], logprobs: list[float], top: list[list[tuple[int, float]]]
    ) -> dict[str, Any] | None:
        return _chat_logprobs(self._engine.text, tokens, logprobs, top) if self._logprobs else None


def usage(prompt_tokens: int, answers: Iterable[Answer]) -> dict[str, int]:
    """Token counts of a response."""
    completion = sum(len(answer.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
    }


def _spans(answers: Iterable[Answer]) -> list[dict[str, int]]:
    """Number of tokens from each weight version: one answer's in order, several answers' summed by version."""
    listed = list(answers)
    if len(listed) == 1:
        return [{"version": version, "tokens": count} for version, count in listed[0].spans]
    totals: dict[int, int] = {}
    for answer in listed:
        for version, count in answer.spans:
            totals[version] = totals.get(version, 0) + count
    return [{"version": version, "tokens": count} for version, count in sorted(totals.items())]


def _versions(answers: Sequence[Answer]) -> dict[str, Any]:
    """The response fields with the weight versions."""
    return {"weight_version": max(answer.version for answer in answers), "weight_versions": _spans(answers)}


def _completion_logprobs(
    text: Text | None,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[list[tuple[int, float]]],
    start: int,
) -> dict[str, Any]:
    """The ``logprobs`` of a completion's choice, for tokens whose text starts at character `start`."""
    pieces = [_piece(text, token) for token in tokens]
    offsets: list[int] = []
    for piece in pieces:
        offsets.append(start)
        start += len(piece)
    return {
        "tokens": pieces,
        "token_logprobs": list(logprobs),
        "top_logprobs": [{_piece(text, token): value for token, value in entry} for entry in top] if any(top) else None,
        "text_offset": offsets,
    }


def _chat_logprobs(
    text: Text | None, tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[list[tuple[int, float]]]
) -> dict[str, Any]:
    """The ``logprobs`` of a chat choice."""
    return {
        "content": [
            {**_entry(text, token, value), "top_logprobs": [_entry(text, *other) for other in others]}
            for token, value, others in zip(tokens, logprobs, top, strict=True)
        ]
    }


def _entry(text: Text | None, token: int, value: float) -> dict[str, Any]:
    piece = _piece(text, token)
    return {"token": piece, "logprob": value, "bytes": list(piece.encode())}


def _piece(text: Text | None, token: int) -> str:
    return text.piece(token) if text is not None else f"token_id:{token}"
