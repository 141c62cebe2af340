"""The page of ``weightcast bench soak``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weightcast.page.bars import Bar, bars
from weightcast.page.document import Chip, Document, Tile
from weightcast.page.words import digits

_ZERO = ("hangs", "mixed", "failures", "leaked_processes", "leaked_segments", "leaked_buffers")


def write_soak_page(fields: Mapping[str, Any], path: Path, *, ok: bool, command: str) -> Path:
    """Writes the page of a soak; ``fields`` are those of ``lab.soak.result.Result``."""
    page = Document(
        "Soak: updates under load, with random faults",
        f"{fields['updates']} updates in {fields['seconds']:.0f} s while clients kept generating.",
    )
    page.tiles(
        [
            Tile(name="result", value="clean" if ok else "errors", mood="good" if ok else "bad"),
            Tile(
                name="complete updates",
                value=f"{fields['updates']} of {fields['attempts']}",
                below="the others were hit by a fault",
            ),
            Tile(name="answers checked", value=f"{fields['answers_checked']:,}", below=f"of {fields['answers']:,}"),
            Tile(name="faults", value=str(sum(fields["faults"].values()))),
        ]
    )
    figures = [
        bars(
            title,
            caption,
            [Bar(name=name, value=float(count)) for name, count in fields[key].items()],
            show=digits,
            tall=key == "modes",
        )
        for key, title, caption in (
            ("modes", "Pause modes", "Updates that were begun, by pause mode."),
            ("faults", "Faults", "Injected, by kind."),
            ("transports", "Transports", "Complete updates by transport."),
        )
        if fields[key]
    ]
    page.figures(figures)
    page.heading("Counts that must be zero")
    page.table(
        ("count", "found"),
        [(name.replace("_", " "), Chip(str(fields[name]), "bad" if fields[name] else "good")) for name in _ZERO]
        + [("growing processes", Chip(str(len(fields["growing"])), "bad" if fields["growing"] else "good"))],
    )
    for words in fields["details"]:
        page.remark(words)
    page.foot(command, code=True)
    return page.write(path)
