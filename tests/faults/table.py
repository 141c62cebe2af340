"""Writes the results of the matrix as a page of tables."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from tests.faults.cases import STEPS, all_cases
from tests.faults.world import Result

_HEAD = """# Results of the fault matrix

`make faults` writes this file. It plays every fault at every step. A trainer of two FSDP ranks updates two engines with
`on_failure="quarantine"`: a *victim* and a bystander. A proxy between them counts the messages, so a fault comes at a
step and not after a number of milliseconds. The trainer then updates again if it lives. At last everything is repaired
and updated once more. After each update the test checks that

- all waits stayed within the limits of [reliability](../../docs/reliability.md#how-long-anybody-waits);
- the culprit was named, and the bystander was updated;
- every tensor of every engine has the digest of the version that the engine reports; a stock engine is paused, or all
  its weights are read;
- no open file, child or shared-memory segment is left.

| kind | victim |
|---|---|
| native | an engine of the tests: a few tensors and our receiver, without generation |
| sglang, lmdeploy | the reference engine in that dialect, `--staging none`, a tiny random Llama |
| vllm, sglang-plugin, lmdeploy-plugin | the real vLLM, SGLang and LMDeploy on the CPU with our receiver, that Llama |

| fault | meaning |
|---|---|
| kill, stop | SIGKILL, or SIGSTOP until the end |
| delay | a delay of 0.4 of a deadline, which must do no harm |
| drop, refuse | from here on, every byte is swallowed, or every connection is reset |
| cut | this connection is reset before the message arrives |
| lose answer | the message arrives, and its answer does not |
| flip | one bit of the message, of a bucket after its digest was taken, or by direct of a part that engines read |
| flip answer | one bit of the answer |
| tear, tear twice | the rank's switch of weights fails half way; switching back fails too |

| outcome | meaning |
|---|---|
| unharmed | all engines got the version |
| left out | the victim did not get it, and the others did |
| given up | no engine got it, and all kept the old version |
| no trainer | the trainer died, and a new one updated all engines |

Numbers are the seconds of the update with the fault, on the trainer rank that took longest.
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
