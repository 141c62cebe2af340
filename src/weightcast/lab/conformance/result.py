"""Result of a conformance run: one row for each check, as JSON, as text or as a table of a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from weightcast.report import count_of

CheckOutcome = Literal["passed", "failed", "not applicable"]
_OUTCOMES: tuple[CheckOutcome, ...] = ("passed", "failed", "not applicable")


class Failed(Exception):
    """The engine does not do what the check expects; the message says what it did instead."""


class NotApplicable(Exception):
    """The check has no meaning for this engine; the message says why."""


def need(condition: object, words: str) -> None:
    """Fails the check unless the condition holds.

    Raises:
        Failed: The condition does not hold; ``words`` say what was found.
    """
    if not condition:
        raise Failed(words)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One check.

    Attributes:
        check: Name of the check, a sentence about the engine.
        outcome: Its outcome.
        words: What was seen, why it failed, or why it does not apply.
        seconds: Time that it took, in seconds.
    """

    check: str
    outcome: CheckOutcome
    words: str
    seconds: float


class ConformanceResult(msgspec.Struct, frozen=True, kw_only=True):
    """All checks of one engine.

    Attributes:
        url: URL of the engine.
        engine: Kind and version, as the engine says.
        kind: Adapter that weightcast speaks to it with.
        ranks: Number of engine ranks.
        rows: One row for each check, in the order in which they ran.
    """

    url: str
    engine: str
    kind: str
    ranks: int
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """True if no check failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[Row, ...]:
        """The checks that failed."""
        return tuple(row for row in self.rows if row.outcome == "failed")

    def summary(self) -> str:
        """Counts by outcome, in words."""
        counts = Counter(row.outcome for row in self.rows)
        return ", ".join(f"{counts[outcome]} {outcome}" for outcome in _OUTCOMES)

    def to_json(self) -> str:
        """One line of JSON."""
        return msgspec.json.encode({"ok": self.ok, **msgspec.to_builtins(self)}).decode()

    def text(self) -> str:
        """The table for a terminal."""
        head = f"{self.url}: {self.engine} ({self.kind}), {count_of(self.ranks, 'rank')}"
        width = max(len(row.check) for row in self.rows)
        lines = [f"  {row.outcome:<14}  {row.check:<{width}}  {row.words}" for row in self.rows]
        return "\n".join([head, *lines, self.summary()])

    def markdown(self) -> str:
        """The table for a page."""
        lines = ["| check | result | seen |", "|---|---|---|"]
        merged: dict[tuple[str, str], list[str]] = {}  # checks that do not apply for one reason share a line
        for row in self.rows:
            key = (row.outcome, row.words if row.outcome == "not applicable" else row.check)
            merged.setdefault(key, []).append(row.check)
        words = {row.check: (row.outcome, row.words) for row in self.rows}
        for checks in merged.values():
            outcome, seen = words[checks[0]]
            lines.append(f"| {'; '.join(checks)} | {_marked(outcome)} | {_cell(seen)} |")
        return "\n".join(lines)


def joined(words: Sequence[str]) -> str:
    """Returns ``"a, b and c"``."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def _marked(outcome: str) -> str:
    return "**failed**" if outcome == "failed" else outcome


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
