"""Writes the results of the matrix as a page of tables."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from tests.faults.cases import STEPS, all_cases
from tests.faults.world import Result

_HEAD = """# Results of the fault matrix

`make faults` writes this file. [Reliability](../../docs/reliability.md#how-it-was-tested) says what the words mean and
what is checked after each update. Numbers are the seconds of the update with the fault, on the trainer rank that took
longest.
"""


def write_page(page: Path, results: Sequence[Result], *, played: str) -> None:
    """Writes the page; ``played`` is a sentence about the run."""
    page.write_text(f"{_HEAD}{_tables(results)}\n\n{played}\n")


def _tables(results: Sequence[Result]) -> str:
    """Makes a table for each kind and transport: a row for each fault, a column for each step."""
    parts: list[str] = []
    for kind, transport in dict.fromkeys((result.kind, result.transport) for result in results):
        mine = [result for result in results if (result.kind, result.transport) == (kind, transport)]
        steps = [step for step in STEPS if any(result.step == step for result in mine)]
        deadlines = "; ".join(f"{value:g}" for value in sorted({result.deadline_s for result in mine}))
        parts.append(f"\n## {kind}, {transport}, `timeout_s={deadlines}`\n")
        parts.append(f"| struck | fault | {' | '.join(steps)} |")
        parts.append("|---" * (len(steps) + 2) + "|")
        for on, fault in dict.fromkeys((result.on, result.fault) for result in mine):
            cells = {result.step: _cell(result) for result in mine if (result.on, result.fault) == (on, fault)}
            parts.append(f"| {on} | {fault} | {' | '.join(cells.get(step, '') for step in steps)} |")
    wrong = [result for result in results if result.wrong]
    worst = max((result.seconds for result in results), default=0.0)
    later = max((result.later_s for result in results), default=0.0)
    parts.append(
        f"\n{len(results)} of {len(list(all_cases()))} cases were played, {len(wrong)} came out wrong.\n"
        f"The longest update with a fault in it took {worst:.1f} s, the longest after it {later:.1f} s."
    )
    if wrong:
        parts += ["", *(_item(result.case, result.wrong) for result in wrong)]
    twice = [result for result in results if result.before and not result.wrong]
    if twice:
        parts.append(f"\nWrong when first played, and right when played again, alone: {len(twice)}.")
        parts += ["", *(_item(result.case, result.before) for result in twice)]
    return "\n".join(parts)


def _item(case: str, words: Sequence[str]) -> str:
    """A list item, at the line length of the docs."""
    text = f"- {case}: {'; '.join(words)}"
    return textwrap.fill(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _cell(result: Result) -> str:
    return f"**wrong** {result.seconds:.1f}" if result.wrong else f"{result.outcome} {result.seconds:.1f}"
