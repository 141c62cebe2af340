"""The prose checks of ``make check`` find what they look for, and leave the rest alone."""

from __future__ import annotations

import pytest

from tests.prose import headless_docstrings, headless_headings, long_lines


@pytest.mark.parametrize("first", ["What comes next.", "Who asks.", "Of all.", "Whose turn it is."])
def test_docstring_without_subject_is_found(first):
    assert list(headless_docstrings(f'def f():\n    """{first}"""\n')) == [(1, first)]


@pytest.mark.parametrize("first", ["Returns the next one.", "What is the limit?", "Often used.", "Offset in bytes."])
def test_docstring_with_subject_and_question_are_left_alone(first):
    assert not list(headless_docstrings(f'def f():\n    """{first}"""\n'))


def test_long_line_is_found_outside_of_tables_and_code():
    words = "word " * 30
    text = f"short\n{words}\n| {words} |\n```text\n{words}\n```\n"
    assert [number for number, _ in long_lines(text)] == [2]


def test_heading_without_subject_is_found():
    assert [number for number, _ in headless_headings("# What it does\n## How does it work?\n## Limits\n")] == [1]
