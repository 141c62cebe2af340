"""Converts text to token ids and back, and turns growing answers into text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from weightcast.errors import ConfigError

_CHARACTERS_PER_TOKEN = 256  # no tokenizer has longer tokens; longer texts are refused before they are tokenized


class TextTokenizer:
    """The tokenizer of one model, in whose context ``max_len`` tokens fit.

    A model without tokenizer has one that refuses text, and whose tokens have none.
    """

    def __init__(self, tokenizer: Any = None, *, max_len: int = 0) -> None:
        self._tokenizer = tokenizer
        self._max_len = max_len

    @staticmethod
    def load(model_dir: Path, *, max_len: int) -> TextTokenizer:
        """Loads the tokenizer of a model folder, if the folder has one."""
        if not any((model_dir / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            return TextTokenizer()
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)  # pyright: ignore[reportUnknownMemberType]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"the tokenizer of {model_dir} cannot be loaded: {error}") from error
        return TextTokenizer(tokenizer, max_len=max_len)

    def check(self) -> None:
        """Raises ``ConfigError`` if the model has no tokenizer."""
        if self._tokenizer is None:
            raise ConfigError("this model has no tokenizer", hint="send token ids, and stop_token_ids instead of stop")

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model expects at the start.

        Raises:
            ConfigError: There is no tokenizer, or the text cannot fit into the context or has half a surrogate pair.
        """
        self.check()
        if len(text) > self._max_len * _CHARACTERS_PER_TOKEN:
            raise ConfigError(f"a prompt of {len(text)} characters cannot fit into {self._max_len} tokens")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the prompt is not text: {error}") from error
        return list(self._tokenizer(text)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def piece(self, token: int) -> str:
        """Text of one token, special or not."""
        if self._tokenizer is None:
            return f"token_id:{token}"
        return self._tokenizer.decode([token], clean_up_tokenization_spaces=False)


def cut(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string; all of it if it has none."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


class TextStream:
    """Turns one growing answer into text: whole characters only, without a possible start of a stop string.

    ``stops`` end the answer and are not part of it.  ``DecodeStream`` of tokenizers is no replacement: it keeps the
    last half character back for ever, raises for some bytes of a tokenizer with byte fallback, and takes no slow one.

    Attributes:
        stopped: A stop string has come, and no text follows.
        num_characters: Length of the text so far.
    """

    def __init__(self, text: TextTokenizer, stops: Sequence[str] = ()) -> None:
        if stops:
            text.check()
        self._text = text
        self._stops = tuple(stops)
        # A token's text may depend on the one before it, so _old tokens are decoded again with those that have come.
        self._tokens: list[int] = []
        self._old = 0
        self._held = ""
        self.stopped = False
        self.num_characters = 0

    def feed(self, tokens: Sequence[int]) -> str:
        """Takes tokens and returns the text that is now certain; empty once `stopped`."""
        given = ""
        for token in tokens:
            self._tokens.append(token)
            gained = self._gained()
            if gained and not gained.endswith("\ufffd"):  # half a character
                self._tokens, self._old = self._tokens[self._old :], len(self._tokens) - self._old
                given += self._settle(gained)
        return given

    def ends_at(self, token: int) -> bool:
        """Takes one token, and tells whether it completes a stop string."""
        self.feed([token])
        return self.stopped

    def end(self) -> str:
        """Returns the text that was held back; call it when no more tokens come."""
        given = self._settle(self._gained())
        rest, self._held = self._held, ""
        self.num_characters += len(rest)
        return given + rest

    def _gained(self) -> str:
        before = self._text.decode(self._tokens[: self._old])
        return self._text.decode(self._tokens)[len(before) :]

    def _settle(self, gained: str) -> str:
        if self.stopped:
            return ""
        text = self._held + gained
        given = cut(text, self._stops)
        self.stopped = given != text
        if not self.stopped:
            starts = (stop[:length] for stop in self._stops for length in range(1, len(stop)))
            given = text[: len(text) - max((len(start) for start in starts if text.endswith(start)), default=0)]
        self._held = "" if self.stopped else text[len(given) :]
        self.num_characters += len(given)
        return given
