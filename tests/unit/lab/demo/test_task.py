"""The demo's questions and its reward."""

from __future__ import annotations

import itertools

import pytest

from weightcast.lab.demo.task import CAPITALS, Question, questions, reward

FRANCE = Question(country="France", capital="Paris")


@pytest.mark.parametrize(
    ("answer", "finished", "expected"),
    [
        ("The capital of France is Paris.", True, 1.0),
        ("The capital of France is Lyon.", True, 0.5),
        ("The capital of France is Paris", True, 0.75),
        ("The capital of France is Paris.", False, 0.5),
        ("The capital of France is Paris, which lies on the river Seine in the north.", True, 0.5 + 0.25 + 0.25 / 8),
        ("Parisian bread is a thing that France is known for, and also", False, 0.0),
        ("", True, 0.25),
    ],
)
def test_reward(answer, finished, expected):
    assert reward(FRANCE, answer, finished=finished) == pytest.approx(expected)


@pytest.mark.parametrize(("country", "capital"), CAPITALS.items())
def test_the_best_answer_is_worth_one(country, capital):
    question = Question(country=country, capital=capital)
    assert reward(question, f"The capital of {country} is {capital}.", finished=True) == 1.0


def test_reward_never_falls_with_fewer_words():
    answers = [" ".join(["Paris", *["really"] * extra]) + "." for extra in range(20)]
    rewards = [reward(FRANCE, answer, finished=True) for answer in answers]
    assert rewards == sorted(rewards, reverse=True)
    assert rewards[0] > rewards[-1]


def test_questions_repeat_with_the_seed_and_cover_every_country_first():
    first = list(itertools.islice(questions(seed=3, per_step=4), 6))
    assert first == list(itertools.islice(questions(seed=3, per_step=4), 6))
    assert first != list(itertools.islice(questions(seed=4, per_step=4), 6))
    assert {question.country for step in first for question in step} == set(CAPITALS)
