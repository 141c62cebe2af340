"""The task of the demo's training run, and its reward, which a program computes.

The model answers questions such as "What is the capital of France?" in one short sentence.  The small model knows many
capitals, but at temperature 1 it rambles.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

INSTRUCTION = "Answer in one short sentence."
_SHORT_WORDS = 8  # "The capital of the United Kingdom is London."
_LONG_WORDS = 16

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Russia": "Moscow",
    "Greece": "Athens",
    "China": "Beijing",
    "England": "London",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Ireland": "Dublin",
    "Poland": "Warsaw",
    "Cuba": "Havana",
    "Peru": "Lima",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Turkey": "Ankara",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Kenya": "Nairobi",
    "Thailand": "Bangkok",
    "Hungary": "Budapest",
}


# The question shown before and after training: the untrained model rarely answers it well.
SHOWN_COUNTRY = "Egypt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A country and the capital that an answer must name."""

    country: str
    capital: str

    @property
    def text(self) -> str:
        """The question as text."""
        return f"What is the capital of {self.country}?"

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation for a chat template."""
        return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": self.text}]


def reward(question: Question, answer: str, *, finished: bool) -> float:
    """Rewards one answer, without special tokens, from 0 to 1.

    Naming the right capital earns a half.  Ending with a full stop earns a quarter.  Brevity earns a quarter: all of it
    up to 8 words, nothing from 16 words on or for an answer that was cut off.
    """
    named = re.search(rf"\b{re.escape(question.capital)}\b", answer) is not None
    num_words = len(answer.split())
    ended = finished and answer.rstrip().endswith(".")
    brevity = min(1.0, max(0.0, (_LONG_WORDS - num_words) / (_LONG_WORDS - _SHORT_WORDS))) if finished else 0.0
    return 0.5 * named + 0.25 * ended + 0.25 * brevity


def questions(*, seed: int, per_step: int) -> Iterator[list[Question]]:
    """Yields steps of ``per_step`` questions without end; every country is used once before any is used again."""
    everything = [Question(country=country, capital=capital) for country, capital in CAPITALS.items()]
    order = random.Random(seed)
    waiting: list[Question] = []
    while True:
        while len(waiting) < per_step:
            order.shuffle(everything)
            waiting += everything
        step, waiting = waiting[:per_step], waiting[per_step:]
        yield step
