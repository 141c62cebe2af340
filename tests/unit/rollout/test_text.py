"""Streams yield whole characters, never part of a stop string, and add up to the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.tiny import VOCAB, tiny_tokenizer
from weightcast.errors import ConfigError
from weightcast.rollout.text import TextStream, TextTokenizer


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(folder)
    found = TextTokenizer.load(folder, max_len=64)
    assert found is not None
    return found


@given(tokens=st.lists(st.integers(0, VOCAB - 1), max_size=30))
def test_pieces_add_up_to_the_whole(text, tokens):
    stream = TextStream(text)
    assert "".join([*(stream.feed([token]) for token in tokens), stream.end()]) == text.decode(tokens)


@given(words=st.text(alphabet="ab é日🙂", max_size=20))
def test_no_half_characters(text, words):
    stream = TextStream(text)
    pieces = [stream.feed([token]) for token in text.encode(words)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.end() == words


@given(words=st.text(alphabet="abc", max_size=30), stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4)))
def test_text_is_cut_at_the_first_stop_string(text, words, stops):
    stream = TextStream(text, stops)
    given_out = ""
    for token in text.encode(words):
        given_out += stream.feed([token])
    given_out += stream.end()
    whole = [words.find(stop) for stop in stops if stop in words]
    if not whole:
        assert given_out == words
        assert not stream.stopped
    else:
        assert stream.stopped
        assert words.startswith(given_out)
        assert not any(stop in given_out for stop in stops)
        assert any(words[len(given_out) :].startswith(stop) for stop in stops)


def test_tokens_after_a_stop_string_do_not_count(text):
    ids = text.encode("one two three four")
    stream = TextStream(text, ["two"])
    assert stream.feed(ids) == "one "
    assert stream.num_tokens < len(ids)
    assert "two" in text.decode(ids[: stream.num_tokens])


def test_chat_template_and_its_refusals(text):
    ids = text.chat([{"role": "user", "content": "hi"}])
    assert text.decode(ids) == "hi"  # without its special tokens
    with pytest.raises(ConfigError, match="cannot fit"):
        text.encode("x" * 100_000)
    with pytest.raises(ConfigError, match="refuses these messages"):
        text.chat([{"role": "user", "content": "hi"}], messages=[])


def test_invalid_unicode_is_refused(text):
    with pytest.raises(ConfigError, match=r"not text.*ud800"):
        text.encode("one \ud800 two")
    with pytest.raises(ConfigError, match="refuses these messages"):
        text.chat([{"role": "user", "content": "\ud800"}])


@pytest.mark.parametrize(
    "settings",
    [
        {"return_tensors": "pt"},
        {"truncation": True, "max_length": 2},
        {"padding": "max_length", "max_length": 64},
        {"tokenizer_kwargs": {"padding": "max_length"}},
        {"chat_template": "{{ 1 }}"},
        {"tokenize": False},
        {"self": 1},
    ],
)
def test_requests_cannot_set_how_a_chat_template_is_applied(text, settings):
    with pytest.raises(ConfigError, match=rf"chat_template_kwargs: .*{max(settings)} cannot be set"):
        text.chat([{"role": "user", "content": "hi"}], **settings)


def test_template_settings_reach_the_template(text):
    messages = [{"role": "user", "content": "hi"}]
    seen = {}

    def apply(conversation, **settings):
        seen.update(settings)
        return [1]

    class Tokenizer:
        chat_template = "any"
        apply_chat_template = staticmethod(apply)

    meant = {"tools": [{"name": "add"}], "documents": [{"text": "one"}], "enable_thinking": False}
    assert TextTokenizer(Tokenizer(), max_len=64).chat(messages, **meant) == [1]
    assert {name: seen[name] for name in meant} == meant


def test_a_folder_without_tokenizer_gives_none(tmp_path):
    assert TextTokenizer.load(tmp_path, max_len=64) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        TextTokenizer.load(tmp_path, max_len=64)
