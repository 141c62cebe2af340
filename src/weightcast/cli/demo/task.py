"""What the model is trained to do, and the reward: a program checks it, nobody judges.

"What is the capital of France?", to be answered in one short sentence.  The small model knows many capitals,
but sampled at temperature 1 it rambles.  Names no engine, no tensor and no trainer.
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


# Shown before and after training: the untrained model rarely gets it right.
SHOWN_COUNTRY = "Egypt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt and what its answer has to name."""

    country: str
    capital: str

    @property
    def text(self) -> str:
        """The question as the user asks it."""
        return f"What is the capital of {self.country}?"

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation for a chat template."""
        return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": self.text}]


def reward(question: Question, answer: str, *, finished: bool) -> float:
    """How well one answer follows the instruction, from 0 to 1.

    Half for naming the right capital, a quarter for one that ends by itself with a full stop, a quarter for
    brevity: all of it up to 8 words, none from 16 on or when it had to be cut off.

    Args:
        question: What was asked.
        answer: The completion, without special tokens.
        finished: True if the model ended it, False if it ran into the limit.
    """
    named = re.search(rf"\b{re.escape(question.capital)}\b", answer) is not None
    num_words = len(answer.split())
    ended = finished and answer.rstrip().endswith(".")
    brevity = min(1.0, max(0.0, (_LONG_WORDS - num_words) / (_LONG_WORDS - _SHORT_WORDS))) if finished else 0.0
    return 0.5 * named + 0.25 * ended + 0.25 * brevity


def questions(*, seed: int, per_step: int) -> Iterator[list[Question]]:
    """An endless stream of steps of ``per_step`` questions; every country comes once before any comes again.

    Args:
        seed: The same seed gives the same stream.
        per_step: Questions in one step.
    """
    everything = [Question(country=country, capital=capital) for country, capital in CAPITALS.items()]
    order = random.Random(seed)
    waiting: list[Question] = []
    while True:
        while len(waiting) < per_step:
            order.shuffle(everything)
            waiting += everything
        step, waiting = waiting[:per_step], waiting[per_step:]
        yield step
