"""Converts text to token ids and back, and turns growing answers into text."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from weightcast.errors import ConfigError

_FOR_TEMPLATES = frozenset({"tools", "documents"})  # parameters of `apply_chat_template` that it passes to templates
_CHARACTERS_PER_TOKEN = 256  # no tokenizer has longer tokens; longer texts are refused before they are tokenized


class TextTokenizer:
    """The tokenizer of one model, in whose context ``max_len`` tokens fit."""

    def __init__(self, tokenizer: Any, *, max_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_len = max_len
        # Some tokenizers have a method of their own, which takes the base's parameters as keywords.
        methods: list[Any] = [PreTrainedTokenizerBase.apply_chat_template, tokenizer.apply_chat_template]
        self._not_for_templates = _parameters(methods) - _FOR_TEMPLATES

    @staticmethod
    def load(model_dir: Path, *, max_len: int) -> TextTokenizer | None:
        """Loads the tokenizer of a model folder; None if the folder has none."""
        if not any((model_dir / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            return None
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)  # pyright: ignore[reportUnknownMemberType]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"the tokenizer of {model_dir} cannot be loaded: {error}") from error
        return TextTokenizer(tokenizer, max_len=max_len)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model expects at the start.

        Raises:
            ConfigError: The text cannot fit into the context, or has half of a surrogate pair.
        """
        self._check_length(len(text))
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the prompt is not text: {error}") from error
        return list(self._tokenizer(text)["input_ids"])

    def chat(self, messages: Sequence[dict[str, Any]], /, **settings: Any) -> list[int]:
        """Token ids of a conversation, up to the start of the answer; ``settings`` are for the model's chat template.

        Raises:
            ConfigError: The model has no chat template, the template refuses these messages, they cannot fit, or a
                setting is the tokenizer's and not the template's.
        """
        taken = sorted(self._not_for_templates & settings.keys())
        if taken:
            raise ConfigError(f"chat_template_kwargs: {', '.join(taken)} cannot be set by a request")
        if self._tokenizer.chat_template is None:
            raise ConfigError("this model has no chat template", hint="use /v1/completions")
        self._check_length(sum(len(str(message.get("content") or "")) for message in messages))
        # jinja2 and templates may raise anything, and the cause is always the caller's messages.
        try:
            ids = self._tokenizer.apply_chat_template(
                list(messages), **settings, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:
            raise ConfigError(f"the model's chat template refuses these messages: {error}") from error
        return list(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def piece(self, token: int) -> str:
        """Text of one token, special or not."""
        return self._tokenizer.decode([token], clean_up_tokenization_spaces=False)

    def _check_length(self, characters: int) -> None:
        if characters > self._max_len * _CHARACTERS_PER_TOKEN:
            raise ConfigError(f"a prompt of {characters} characters cannot fit into {self._max_len} tokens")


def _parameters(methods: Sequence[Any]) -> frozenset[str]:
    return frozenset(
        name
        for method in methods
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    )


class TextStream:
    """Turns one growing answer into text: whole characters only, without a possible start of a stop string.

    ``stops`` end the answer and are not part of it.  ``DecodeStream`` of tokenizers is no replacement: it keeps the
    last half character back for ever, raises for some bytes of a tokenizer with byte fallback, and takes no slow one.
    """

    def __init__(self, text: TextTokenizer, stops: Sequence[str] = ()) -> None:
        self._text = text
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        # Tokens from _start on are decoded again with each new one, because a token's text may depend on the one
        # before it.  The text of tokens before _done has been returned.
        self._start = self._done = 0
        self._held = ""
        self.stopped = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the text, without those after a stop string."""
        return len(self._tokens)

    def feed(self, tokens: Sequence[int]) -> str:
        """Takes tokens and returns the text that is now certain; empty once `stopped`."""
        given = ""
        for token in tokens:
            if self.stopped:
                break
            self._tokens.append(token)
            given += self._settle(self._gained())
        return given

    def end(self) -> str:
        """Returns the text that was held back; call it when no more tokens come."""
        if self.stopped:
            return ""
        before = self._text.decode(self._tokens[self._start : self._done])
        after = self._text.decode(self._tokens[self._start :])
        given = self._settle(after[len(before) :])
        rest, self._held = self._held, ""
        return given + ("" if self.stopped else rest)

    def _gained(self) -> str:
        before = self._text.decode(self._tokens[self._start : self._done])
        after = self._text.decode(self._tokens[self._start :])
        if len(after) <= len(before) or after.endswith("\ufffd"):  # half a character
            return ""
        self._start, self._done = self._done, len(self._tokens)
        return after[len(before) :]

    def _settle(self, gained: str) -> str:
        text = self._held + gained
        found = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max(
            (length for stop in self._stops for length in range(1, len(stop)) if text.endswith(stop[:length])),
            default=0,
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
