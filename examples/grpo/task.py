"""Tasks: problems, and the program that rewards answers to them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLE = ("Zoe has 2 pens and buys 6 more. How many pens does Zoe have now?", "2 + 6 = 8\n#### 8")
ANSWER = re.compile(r"#### (-?\d+)\s*$")


@dataclass(frozen=True)
class Problem:
    """An arithmetic problem."""

    question: str
    answer: int  # the number behind "####", as in GSM8K

    def prompt(self, tokenizer: Any) -> list[int]:
        chat = [
            {"role": "system", "content": "Calculate, then write #### and the answer."},
            {"role": "user", "content": EXAMPLE[0]},
            {"role": "assistant", "content": EXAMPLE[1]},
            {"role": "user", "content": self.question},
        ]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False).input_ids


# Rewards an answer, given its text and whether it ended by itself, with a number from 0 to 1.
Judge = Callable[[Problem, str, bool], float]


def read_problems(file: Path) -> list[Problem]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [Problem(row["question"], int(row["answer"].rpartition("####")[2].replace(",", ""))) for row in rows]


def arithmetic(problem: Problem, text: str, finished: bool) -> float:
    """Rewards an answer: 0.6 if it is right, 0.2 for a calculation that gives it, 0.2 if it ends with ``#### N``."""
    said = ANSWER.search(text) if finished else None
    right = said is not None and int(said[1]) == problem.answer
    calculated = re.search(rf"= {problem.answer}\b", text) is not None
    return 0.6 * right + 0.2 * calculated + 0.2 * (said is not None)


def letters(problem: Problem, text: str, finished: bool) -> float:
    """Rewards the share of letters in an answer: something to learn for a random model, which cannot calculate."""
    return sum(letter.isalpha() for letter in text) / max(len(text), 1)


JUDGES: dict[str, Judge] = {"arithmetic": arithmetic, "letters": letters}


def split(problems: list[Problem], held_out: int) -> tuple[list[Problem], list[Problem]]:
    """Returns the problems for training, and the last ones of the file, which are never trained on."""
    if not 0 <= held_out < len(problems):
        raise SystemExit(f"--eval-problems {held_out}: the file has {len(problems)} problems")
    return problems[: len(problems) - held_out], problems[len(problems) - held_out :]
