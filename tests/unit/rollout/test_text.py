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
    return TextTokenizer.load(folder, max_len=64)


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
    assert stream.num_characters == len(given_out)
    whole = [words.find(stop) for stop in stops if stop in words]
    if not whole:
        assert given_out == words
        assert not stream.stopped
    else:
        assert stream.stopped
        assert words.startswith(given_out)
        assert not any(stop in given_out for stop in stops)
        assert any(words[len(given_out) :].startswith(stop) for stop in stops)


def test_the_token_that_completes_a_stop_string_is_found(text):
    ids = text.encode("one two three four")
    stream = TextStream(text, ["two"])
    count = next(count for count, token in enumerate(ids, 1) if stream.ends_at(token))
    assert "two" in text.decode(ids[:count])
    assert "two" not in text.decode(ids[: count - 1])
    assert stream.feed(ids) + stream.end() == ""


def test_a_text_that_cannot_fit_is_refused(text):
    with pytest.raises(ConfigError, match="cannot fit"):
        text.encode("x" * 100_000)


def test_invalid_unicode_is_refused(text):
    with pytest.raises(ConfigError, match=r"not text.*ud800"):
        text.encode("one \ud800 two")


def test_a_model_without_tokenizer_takes_and_gives_token_ids_only(tmp_path):
    none = TextTokenizer.load(tmp_path, max_len=64)
    assert (none.decode([5, 6]), none.piece(5)) == ("", "token_id:5")
    for refused in (lambda: none.encode("one"), lambda: TextStream(none, ["stop"])):
        with pytest.raises(ConfigError, match="no tokenizer"):
            refused()


def test_a_broken_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        TextTokenizer.load(tmp_path, max_len=64)
