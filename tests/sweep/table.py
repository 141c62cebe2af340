"""Keeps the results of sweeps in a file, one line for each, and writes them as tables into a page."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tests.sweep.models import FAMILIES
from tests.sweep.play import Result

BEGIN, END = "<!-- the tables begin -->", "<!-- the tables end -->"
RESULTS = Path(__file__).with_name("results.jsonl")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
ENGINES = {"vllm": "vLLM 0.32.0, with our receiver", "sglang": "SGLang 0.5.23, stock"}
WORDS = 90  # characters of an engine's message
_SHORT = {"equal": "equal", "refused": "refused", "not": "not served", "no": "no result", "transformers": "not built"}

Key = tuple[str, str, int]


def read(file: Path = RESULTS) -> dict[Key, Result]:
    """Reads kept results by engine, family and number of ranks."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    found = [msgspec.json.decode(line, type=Result) for line in lines]
    return {(result.engine, result.family, result.tp): result for result in found}


def write(results: Mapping[Key, Result], file: Path = RESULTS, page: Path = PAGE) -> None:
    """Keeps results, and replaces the text between the marks of the page."""
    ordered = [results[key] for key in sorted(results, key=_order)]
    file.write_bytes(b"".join(msgspec.json.encode(result) + b"\n" for result in ordered))
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{tables(ordered)}\n{END}{after}")


def tables(results: Sequence[Result]) -> str:
    """For each engine the families that are equal, a table of the others, and the families that were not tried."""
    parts: list[str] = []
    for engine, title in ENGINES.items():
        mine = [result for result in results if result.engine == engine]
        both = {result: (result.checkpoint, result.live) for result in mine}
        unequal = {result.family for result, cells in both.items() if {_kind(cell) for cell in cells} != {"equal"}}
        equal = {result.family for result in mine} - unequal
        parts += ["", f"### {title}", ""]
        parts += [f"Families tried: {len({result.family for result in mine})}. Equal in every case: {len(equal)}."]
        plain = {result: {result.checkpoint, result.live} == {"equal"} for result in mine}
        if any(plain.values()):
            names = [f"`{result.family}`{_ranks(result.tp)}" for result in mine if plain[result]]
            parts += ["", *textwrap.wrap(f"Equal: {', '.join(names)}.", 120, break_on_hyphens=False)]
        if not all(plain.values()):
            parts += ["", "| family | TP | checkpoint | live module | words |", "|---|---|---|---|---|"]
        for result in mine:
            if plain[result]:
                continue
            words = dict.fromkeys(_words(cell) for cell in (result.checkpoint, result.live))
            cells = [f"`{result.family}`", str(result.tp), _kind(result.checkpoint), _kind(result.live)]
            parts.append(f"| {' | '.join(cells)} | {'; '.join(word for word in words if word)} |")
        absent = [family for family in FAMILIES if family not in {result.family for result in mine}]
        if absent:
            parts += ["", *textwrap.wrap(f"Not tried: {', '.join(f'`{family}`' for family in absent)}.", 120)]
    return "\n".join([*parts, ""])


def _ranks(tp: int) -> str:
    return "" if tp == 1 else f" on {tp} ranks"


def _kind(cell: str) -> str:
    return "**wrong**" if cell.startswith("WRONG") else _SHORT[cell.partition(" ")[0].rstrip(":,")]


def _words(cell: str) -> str:
    """The first words after the kind of an outcome, safe in a table."""
    words = "" if cell == "equal" else cell.partition("equal, and " if cell.startswith("equal, and ") else ": ")[2]
    words = words if len(words) <= WORDS else f"{words[:WORDS].rpartition(' ')[0]} ..."
    for mark in "|<>[]{}*_`":
        words = words.replace(mark, f"\\{mark}")
    return words


def _order(key: Key) -> tuple[str, int, int]:
    engine, family, tp = key
    names = list(FAMILIES)
    return engine, names.index(family) if family in names else len(names), tp
