"""The body of a request for completions: OpenAI's fields, and fields for reinforcement learning.

Fields beyond OpenAI's: `top_k`, `min_p`, `stop_token_ids`, `ignore_eos` and `return_token_ids`.  Every other field is
refused: an engine that ignores a parameter samples from another distribution than its caller believes.
"""

from __future__ import annotations

from types import NoneType
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StringConstraints, field_validator

MAX_PROMPTS = 1024
_MOST = (1 << 31) - 1  # largest count of tokens and largest token id; the ranks' commands have 64-bit integers
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
RequestTokenId = Annotated[int, Field(ge=0, le=_MOST)]


class CompletionRequest(BaseModel):
    """Body of POST /v1/completions."""

    model_config = ConfigDict(extra="forbid")

    prompt: (
        str
        | Annotated[list[StrictInt], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Annotated[list[StrictInt], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    model: str | None = None
    n: int = Field(default=1, ge=1, le=128)
    max_tokens: int | None = Field(default=16, ge=1, le=1 << 24)  # the default is cut where the context ends
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, ge=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1, le=_MOST)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[Stop], Field(max_length=16)] | Stop | None = None
    stop_token_ids: Annotated[list[RequestTokenId], Field(max_length=256)] | None = None
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool = False
    return_token_ids: bool = False

    @field_validator("*", mode="before")
    @classmethod
    def _null_is_default(cls, value: object, info: Any) -> object:
        field = cls.model_fields[info.field_name]
        takes_null = field.is_required() or NoneType in get_args(field.annotation)
        return value if value is not None or takes_null else field.default

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt: text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        return [entry for entry in prompt if not isinstance(entry, int)]

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings; a request may give one string or a list."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
