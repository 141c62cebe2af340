"""The HTML document around the plots: one file that asks the network for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Literal

from weightcast.page.charts import Figure

Mood = Literal["", "good", "warn", "bad", "grey"]

# A browser refuses every request of the page, whatever a label in it might contain.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One figure that is worth a glance: its name, its value and a line below."""

    name: str
    value: str
    below: str = ""
    mood: Mood = ""


@dataclass(frozen=True, slots=True)
class Chip:
    """A word of a table with a colour."""

    word: str
    mood: Mood


TableCell = str | Chip


class Document:
    """A page that grows from the top to the bottom; ``about`` is the line below its title."""

    def __init__(self, title: str, about: str) -> None:
        self._title = title
        self._parts = [
            f"<header><div><h1>{escape(title)}</h1><p>{escape(about)}</p></div>"
            '<button id="theme" type="button">Dark</button></header>'
        ]
        self._foot: list[str] = []

    def heading(self, words: str) -> None:
        """Adds the heading of a section."""
        self._parts.append(f"<h2>{escape(words)}</h2>")

    def tiles(self, tiles: Sequence[Tile]) -> None:
        """Adds a row of tiles."""
        shown = (
            f'<div class="tile {each.mood}"><span>{escape(each.name)}</span><b>{escape(each.value)}</b>'
            f"<small>{escape(each.below)}</small></div>"
            for each in tiles
        )
        self._parts.append(f'<div class="tiles">{"".join(shown)}</div>')

    def figures(self, figures: Sequence[Figure]) -> None:
        """Adds plots, two beside each other unless they are wide."""
        self._parts.append(f'<div class="figures">{"".join(map(_figure, figures))}</div>')

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[TableCell]]) -> None:
        """Adds a table; columns whose header ends with ``#`` hold numbers and are right-aligned."""
        self._parts.append(f'<div class="sheet">{_table(headers, rows)}</div>')

    def remark(self, words: str) -> None:
        """Adds a paragraph."""
        self._parts.append(f'<p class="remark">{escape(words)}</p>')

    def foot(self, words: str, *, code: bool = False) -> None:
        """Adds a line at the end of the page."""
        self._foot.append(f"<p><code>{escape(words)}</code></p>" if code else f"<p>{escape(words)}</p>")

    def html(self) -> str:
        """Returns the whole page."""
        files = resources.files("weightcast.page")
        style, script = (files.joinpath(name).read_text("utf-8") for name in ("style.css", "script.js"))
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self._title)}</title>\n<style>\n{style}</style></head>\n<body><main>\n"
            + "\n".join(self._parts)
            + f'\n<footer>{"".join(self._foot)}</footer></main>\n<div id="tip"></div>\n'
            + f"<script>\n{script}</script></body></html>\n"
        )

    def write(self, path: str | Path) -> Path:
        """Writes the page and returns its path."""
        path = Path(path)
        path.write_text(self.html(), encoding="utf-8")
        return path


def _figure(figure: Figure) -> str:
    legend = "".join(f'<span><i class="{escape(colour)}"></i>{escape(name)}</span>' for colour, name in figure.legend)
    values = ""
    if figure.rows:
        table = _table(figure.headers, figure.rows)
        values = f'<details><summary>values</summary><div class="scroll">{table}</div></details>'
    kind = "wide" if figure.wide else "tall" if figure.tall else ""
    return (
        f'<figure class="{kind}"><figcaption><h3>{escape(figure.title)}</h3>'
        f"<p>{escape(figure.caption)}</p></figcaption>"
        + (f'<div class="legend">{legend}</div>' if legend else "")
        + f'<div class="plot">{figure.svg}</div>{values}</figure>'
    )


def _table(headers: Sequence[str], rows: Sequence[Sequence[TableCell]]) -> str:
    kinds = [" class=num" if header.endswith("#") else "" for header in headers]
    head = "".join(f"<th{kind}>{escape(name.rstrip('#'))}</th>" for name, kind in zip(headers, kinds, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{_cell(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))}</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(cell: TableCell) -> str:
    return escape(cell) if isinstance(cell, str) else f'<span class="chip {cell.mood}">{escape(cell.word)}</span>'
