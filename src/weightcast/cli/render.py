"""What the commands print: tables, sizes, progress, errors.

Data goes to stdout and everything else to stderr.  It knows text; what the text is about is each command's business.
"""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from weightcast.errors import ConfigError, UpdateFailed
from weightcast.report import format_bytes

Advance = Callable[[int, int], None]
_UNITS = {
    "": 1,
    "b": 1,
    **{name: 1024**power for power, letter in enumerate("kmgt", start=1) for name in (letter, f"{letter}ib")},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
}
_PLAIN_INTERVAL_S = 2.0
_COLOURS = {"ok": "32", "warn": "33", "fail": "31"}


def parse_size(text: str) -> int:
    """``"512MiB"`` as bytes.  MiB (or M) is a power of 1024, MB a power of 1000, no unit means bytes.

    Raises:
        ConfigError: It is no size, or less than one byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{text!r} is not a size", hint="write 512MiB, 1.5GiB, 64MB or a number of bytes")
    size_bytes = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if size_bytes < 1:
        raise ConfigError(f"{text!r} is less than one byte")
    return size_bytes


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; nothing is cut off, so that it can be piped on."""
    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def names(found: Sequence[str], *, limit: int = 8) -> str:
    """The first few of many names."""
    return ", ".join(found[:limit]) + (f" and {len(found) - limit} more" if len(found) > limit else "")


def mark(level: str) -> str:
    """``ok``, ``warn`` or ``fail`` in four columns, in colour on a terminal."""
    padded = level.ljust(4)
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return padded
    return f"\x1b[{_COLOURS[level]}m{padded}\x1b[0m"


def say(text: str = "") -> None:
    """A line of data."""
    print(text)


def note(text: str) -> None:
    """A line for the reader, not part of the data."""
    print(text, file=sys.stderr, flush=True)


def say_json(document: Any) -> None:
    """The one JSON document of a command: plain data or msgspec structs."""
    print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def show_error(error: BaseException, *, as_json: bool, with_stack: bool) -> None:
    """``error: ...`` and ``hint: ...`` on stderr; with ``as_json`` also ``{"error": {...}}`` on stdout."""
    hint: str | None = getattr(error, "hint", None)
    report = error.report if isinstance(error, UpdateFailed) else None
    text = one_line(str(error)) or type(error).__name__
    if as_json:
        fields: dict[str, Any] = {"type": type(error).__name__, "message": text, "hint": hint}
        for name in ("url", "half_updated", "who", "waiting_for", "timeout_s", "names"):
            if hasattr(error, name):
                fields[name] = getattr(error, name)
        if report is not None:
            fields["report"] = report
        say_json({"error": fields})
    elif report is not None:
        say(str(report))
    sys.stdout.flush()
    if with_stack:
        note("".join(traceback.format_exception(error)).rstrip())
        return
    note(f"error: {text}")
    if hint:
        note(f"\nhint: {one_line(hint)}")


def one_line(text: str) -> str:
    """Text without line breaks; some libraries answer with whole stacks."""
    return " ".join(text.split())


@contextmanager
def progress(what: str) -> Generator[Advance]:
    """Show bytes as they move.

    A bar with bytes per second on a terminal; elsewhere a line at the end, and at the quarters of what takes long.

    Yields:
        To be called with bytes done and bytes in all, from any thread.
    """
    if not sys.stderr.isatty():
        yield _plain(what)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(what, total=None)

        def advance(done_bytes: int, total_bytes: int) -> None:
            bars.update(task, completed=done_bytes, total=total_bytes)

        yield advance


def _plain(what: str) -> Advance:
    started = last = time.monotonic()
    shown = 0

    def advance(done_bytes: int, total_bytes: int) -> None:
        nonlocal shown, last
        now = time.monotonic()
        quarter = 4 if done_bytes >= total_bytes else 4 * done_bytes // total_bytes
        if quarter <= shown or (quarter < 4 and now - last < _PLAIN_INTERVAL_S):
            return
        shown, last = quarter, now
        seconds = now - started
        rate = f", {format_bytes(int(done_bytes / seconds))}/s" if seconds else ""
        note(f"{what}: {format_bytes(done_bytes)} of {format_bytes(total_bytes)}{rate}")

    return advance
