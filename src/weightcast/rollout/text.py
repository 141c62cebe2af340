"""Text to token ids and back: the tokenizer of a model folder, and answers that become text as they grow."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from weightcast.errors import ConfigError

_FOR_TEMPLATES = frozenset({"tools", "documents"})  # what `apply_chat_template` passes on under a name of its own
_CHARACTERS_PER_TOKEN = 256  # no tokenizer packs more into one; saves tokenizing what cannot fit anyway


class Text:
    """The tokenizer of one model.

    Args:
        tokenizer: A transformers tokenizer.
        max_len: Tokens that the context holds.
    """

    def __init__(self, tokenizer: Any, *, max_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_len = max_len
        # Some tokenizers bring their own, which takes the base's parameters as keywords.
        methods: list[Any] = [PreTrainedTokenizerBase.apply_chat_template, tokenizer.apply_chat_template]
        self._not_for_templates = _parameters(methods) - _FOR_TEMPLATES

    @staticmethod
    def load(model_dir: Path, *, max_len: int) -> Text | None:
        """The tokenizer in a model folder, or None if the folder has none."""
        if not any((model_dir / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            return None
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)  # pyright: ignore[reportUnknownMemberType]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{model_dir}: its tokenizer cannot be loaded: {error}") from error
        return Text(tokenizer, max_len=max_len)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model starts with.

        Raises:
            ConfigError: The text cannot fit into the context, or is none (half of a surrogate pair).
        """
        self._check_length(len(text))
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the prompt is not text: {error}") from error
        return list(self._tokenizer(text)["input_ids"])

    def chat(self, messages: Sequence[dict[str, Any]], /, **settings: Any) -> list[int]:
        """Token ids of a conversation, up to where the answer starts.

        Args:
            messages: ``role`` and ``content`` of each, in order.
            settings: Passed on to the model's chat template.

        Raises:
            ConfigError: The model has no chat template, it refuses these messages, they cannot fit, or a setting is not
                for templates but for how the tokenizer applies them.
        """
        taken = sorted(self._not_for_templates & settings.keys())
        if taken:
            raise ConfigError(f"chat_template_kwargs: {', '.join(taken)} cannot be set by a request")
        if self._tokenizer.chat_template is None:
            raise ConfigError("this model has no chat template", hint="use /v1/completions")
        self._check_length(sum(len(str(message.get("content") or "")) for message in messages))
        # jinja2 and the templates themselves raise what they like; it is about the caller's messages all the same.
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
        """One token by itself, special or not."""
        return self._tokenizer.decode([token], clean_up_tokenization_spaces=False)

    def _check_length(self, characters: int) -> None:
        if characters > self._max_len * _CHARACTERS_PER_TOKEN:
            raise ConfigError(f"a prompt of {characters} characters cannot fit into {self._max_len} tokens")


def _parameters(methods: Sequence[Any]) -> frozenset[str]:
    """Names that may be given as keywords, other than those that are gathered in a ``**``."""
    return frozenset(
        name
        for method in methods
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    )


class TextStream:
    """One answer becoming text: whole characters only, and nothing that may be the start of a stop string.

    Args:
        text: The tokenizer.
        stops: Strings that end the answer; they are not part of it.
    """

    def __init__(self, text: Text, stops: Sequence[str] = ()) -> None:
        self._text = text
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        # Tokens from _start on are decoded again with each new one: what a token means in letters may hang on the
        # one before it.  Tokens up to _done have been given out.
        self._start = self._done = 0
        self._held = ""
        self.stopped = False

    @property
    def num_tokens(self) -> int:
        """Tokens that the text was made from; those after a stop string do not count."""
        return len(self._tokens)

    def feed(self, tokens: Sequence[int]) -> str:
        """Text that is certain now.  Once `stopped`, nothing more comes."""
        given = ""
        for token in tokens:
            if self.stopped:
                break
            self._tokens.append(token)
            given += self._settle(self._gained())
        return given

    def end(self) -> str:
        """What was held back, when no more tokens come."""
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
