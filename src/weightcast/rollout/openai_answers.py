"""Responses of ``/v1/completions``: OpenAI's fields, and `weight_version`, `weight_versions` and `token_ids`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from weightcast.rollout.openai_requests import CompletionRequest
from weightcast.rollout.requests import GenerateAnswer
from weightcast.rollout.text import TextTokenizer, cut


class CompletionFormat:
    """The response to one request, whole or in events.

    Attributes:
        id: Identifier of the request, which its answer repeats.
    """

    def __init__(self, body: CompletionRequest, text: TextTokenizer, *, model: str, prompt_tokens: int) -> None:
        self.id = uuid.uuid4().hex
        self._body = body
        self._text = text
        self._prompt_tokens = prompt_tokens
        self._head = {
            "id": f"cmpl-{self.id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, answers: Sequence[GenerateAnswer]) -> dict[str, Any]:
        """A response that is not streamed."""
        texts = [cut(self._text.decode(answer.tokens), self._body.stops) for answer in answers]
        choices = [self._choice(*choice, offset=0) for choice in zip(range(len(answers)), answers, texts, strict=True)]
        prompt, answer = self._prompt_tokens, sum(len(answer.tokens) for answer in answers)
        usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
        return {**self._head, "choices": choices, "usage": usage, **_versions(answers)}

    def event(self, index: int, piece: GenerateAnswer, text: str, *, offset: int) -> dict[str, Any]:
        """One event of a stream; the last of a choice has the weight versions of all its tokens.

        Args:
            text: Text of the piece, which follows `offset` characters of the same choice.
        """
        choices = [self._choice(index, piece, text, offset=offset)]
        return {**self._head, "choices": choices, "weight_version": piece.version}

    def _choice(self, index: int, piece: GenerateAnswer, text: str, *, offset: int) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None if self._body.logprobs is None else self._logprobs(piece, offset),
            "finish_reason": piece.finish_reason,
            **({"token_ids": piece.tokens} if self._body.return_token_ids else {}),
            **(_versions([piece]) if piece.finish_reason is not None else {}),
        }

    def _logprobs(self, piece: GenerateAnswer, offset: int) -> dict[str, Any]:
        words = [self._text.piece(token) for token in piece.tokens]
        top = [{self._text.piece(token): value for token, value in others} for others in piece.top]
        return {
            "tokens": words,
            "token_logprobs": piece.logprobs,
            "top_logprobs": top if any(top) else None,
            "text_offset": list(accumulate(map(len, words), initial=offset))[:-1],
        }


def _versions(answers: Sequence[GenerateAnswer]) -> dict[str, Any]:
    """Number of tokens from each weight version: one answer's in order, several answers' summed by version."""
    spans = answers[0].spans
    if len(answers) > 1:
        totals: dict[int, int] = {}
        for version, count in (span for answer in answers for span in answer.spans):
            totals[version] = totals.get(version, 0) + count
        spans = sorted(totals.items())
    return {
        "weight_version": max(answer.version for answer in answers),
        "weight_versions": [{"version": version, "tokens": count} for version, count in spans],
    }
