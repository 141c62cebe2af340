"""Streams give out whole characters, never part of a stop string, and in sum what was generated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiny import VOCAB, tiny_tokenizer
from weightcast.errors import ConfigError
from weightcast.rollout.text import Text, TextStream


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(folder)
    found = Text.load(folder, max_len=64)
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
def test_stop_strings_cut_where_they_first_end(text, words, stops):
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
        text.chat([{"content": "no role"}], tokenize=True)


def test_folder_without_tokenizer(tmp_path):
    assert Text.load(tmp_path, max_len=64) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Text.load(tmp_path, max_len=64)
