"""Bodies of OpenAI's requests, with fields for reinforcement learning.

Fields beyond OpenAI's: `top_k`, `min_p`, `repetition_penalty`, `allowed_token_ids`, `stop_token_ids`, `ignore_eos`,
`return_token_ids`.  Other fields are
refused, unless they ask for nothing, because clients and frameworks send defaults: an engine that ignores a parameter
samples from another distribution than its caller believes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StringConstraints, field_validator, model_validator

# Values that change no answer here, besides null.  They are OpenAI's, vLLM's and SGLang's names.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "documents": ([],),
    "ebnf": (),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_path": (),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "parallel_tool_calls": (True, False),  # without tools there are no calls
    "prediction": (),
    "priority": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "regex": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),  # about a join of texts that fast tokenizers never make
    "stop_regex": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
# Notes for the operator, which no engine answers differently for.
_NOTES = frozenset({"metadata", "prompt_cache_key", "request_id", "safety_identifier", "service_tier", "store", "user"})
MAX_PROMPTS = 1024
_MOST = (1 << 31) - 1  # largest count of tokens and largest token id; the ranks' commands have 64-bit integers
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
RequestTokenId = Annotated[int, Field(ge=0, le=_MOST)]
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


def without_neutral(body: Mapping[str, Any]) -> dict[str, Any]:
    """A request's fields, without those of this engine's missing parameters that ask for nothing."""
    return {name: value for name, value in body.items() if name not in _NOTES and not _asks_nothing(name, value)}


def refusal(unknown: Sequence[str], known: Iterable[str]) -> str:
    """Says which parameters are refused, and why."""
    missing = [name for name in unknown if name in _NEUTRAL]
    words = [f"this engine does not support {', '.join(missing)}"] if missing else []
    names = list(known)
    for name in unknown:
        if name not in _NEUTRAL:
            near = difflib.get_close_matches(name, names, n=1)
            words.append(f"there is no parameter {name}" + (f"; did you mean {near[0]}?" if near else ""))
    return "; ".join(words)


def _asks_nothing(name: str, value: object) -> bool:
    if name not in _NEUTRAL:
        return False
    # True equals 1 in Python, and is another value in JSON.
    return value is None or any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in _NEUTRAL[name]
    )


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class Sampled(BaseModel):
    """The fields that both kinds of request have."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    n: int = Field(default=1, ge=1, le=128)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, ge=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1, le=_MOST)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100.0)
    logit_bias: (
        Annotated[dict[RequestTokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=4096)] | None
    ) = None
    allowed_token_ids: Annotated[list[RequestTokenId], Field(min_length=1, max_length=1 << 20)] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[Stop], Field(max_length=16)] | Stop | None = None
    stop_token_ids: Annotated[list[RequestTokenId], Field(max_length=256)] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_nothing(cls, body: object) -> object:
        return without_neutral(cast("dict[str, Any]", body)) if isinstance(body, dict) else body

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @field_validator("*", mode="before")
    @classmethod
    def _null_is_default(cls, value: object, info: Any) -> object:
        field = cls.model_fields[info.field_name]
        takes_null = field.is_required() or NoneType in get_args(field.annotation)
        return value if value is not None or takes_null else field.default

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings; a request may give one string or a list."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """True if a stream should end with its token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Sampled):
    """Body of POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[StrictInt], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Annotated[list[StrictInt], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: int | None = Field(default=16, ge=1, le=1 << 24)  # the default is cut where the context ends
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = False

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt: text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        return [entry for entry in prompt if not isinstance(entry, int)]


class ChatMessage(BaseModel):
    """One message of a conversation; the chat template gets unknown fields too."""

    model_config = ConfigDict(extra="allow")

    role: Role
    content: str | list[dict[str, Any]] | None = None

    def plain(self) -> dict[str, Any]:
        """Joins the message's text parts; refuses parts of another type."""
        message = self.model_dump()
        if isinstance(self.content, list):
            if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in self.content):
                raise ValueError("content parts must be of type text")
            message["content"] = "".join(part["text"] for part in self.content)
        return message


class ChatRequest(Sampled):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(default=None, ge=1, le=1 << 24)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1 << 24)
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self
