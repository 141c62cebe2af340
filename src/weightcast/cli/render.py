"""Output of the commands: tables, sizes, progress and errors.  Results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import msgspec

from weightcast.config import parse_size as parse_size
from weightcast.errors import WeightcastError, visible
from weightcast.report import format_bytes, one_line

Advance = Callable[[int, int], None]
_PLAIN_INTERVAL_S = 2.0
_LINE = 100
_INNERMOST = re.compile(r"\[\n[^\[\]{}]*\]")
_COLOURS = {"ok": "32", "warn": "33", "fail": "31"}


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a text table with columns as wide as their widest cell; no cell is cut off."""
    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def mark(level: str) -> str:
    """Pads ``ok``, ``warn`` or ``fail`` to four columns, in colour on a terminal."""
    padded = level.ljust(4)
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return padded
    return f"\x1b[{_COLOURS[level]}m{padded}\x1b[0m"


def say(text: str = "", *, lead: str = "") -> None:
    """Prints a line of the result on stdout, after ``lead``, which alone may have colours.

    What engines and files say cannot move the cursor or do anything else to a terminal.
    """
    print(lead + _fit(text, sys.stdout))


def _fit(text: str, stream: TextIO) -> str:
    """Replaces control characters, and letters of a path that the stream's encoding lacks, by escapes."""
    encoding = stream.encoding or "utf-8"
    return visible(text).encode(encoding, "backslashreplace").decode(encoding)


def note(text: str) -> None:
    """Prints a line on stderr that is not part of the result."""
    print(_fit(text, sys.stderr), file=sys.stderr, flush=True)


def say_json(document: Any) -> None:
    """Prints plain data or msgspec structs as the JSON document of a command."""
    try:
        text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
    except UnicodeEncodeError:  # a path with bytes that are no text
        text = json.dumps(msgspec.to_builtins(document), indent=2)
    plain = "utf" not in (sys.stdout.encoding or "utf-8").lower()  # JSON has escapes of its own
    unsafe = re.compile(r"[^\n -~]" if plain else r"[\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
    print(unsafe.sub(lambda found: json.dumps(found[0])[1:-1], _INNERMOST.sub(_on_one_line, text)))


def _on_one_line(array: re.Match[str]) -> str:
    """Puts a short array of numbers and words on one line; in JSON, line ends never belong to a text."""
    line = re.sub(r"\n *", " ", array[0].replace("[\n", "[", 1)).strip()
    line = re.sub(r"^\[ +", "[", re.sub(r" +\]$", "]", line))
    return line if len(line) <= _LINE else array[0]


def write_beside(path: Path, write: Callable[[Path], Path], what_to_do: str) -> bool:
    """Writes a file beside a result that is said already, so that a full disk does not lose it; False if it failed."""
    try:
        note(f"{write(path)}: {what_to_do}")
    except OSError as error:
        note(f"warning: {path} could not be written: {error.strerror or error}")
        return False
    return True


def show_error(error: BaseException, *, as_json: bool, with_stack: bool) -> None:
    """Prints ``error: ...`` and ``hint: ...`` on stderr; with ``as_json`` also ``{"error": {...}}`` on stdout."""
    hint: str | None = getattr(error, "hint", None)
    report = error.report if isinstance(error, WeightcastError) else None
    text = one_line(str(error)) or type(error).__name__
    if as_json:
        fields: dict[str, Any] = {"type": type(error).__name__, "message": text, "hint": hint}
        for name in ("url", "half_updated", "who", "waiting_for", "timeout_s", "names"):
            if hasattr(error, name):
                fields[name] = getattr(error, name)
        if report is not None:
            fields["report"] = report.to_dict()
        say_json({"error": fields})
    elif report is not None:
        say(report.text(told=str(error)))
    sys.stdout.flush()
    if with_stack:
        note("".join(traceback.format_exception(error)).rstrip())
        return
    note(f"error: {text}")
    if hint:
        note(f"\nhint: {one_line(hint)}")


@contextmanager
def progress(what: str) -> Generator[Advance]:
    """Shows transfer progress: a bar on a terminal, elsewhere a line at the end and at each quarter of a long one.

    Yields:
        Function to call with the bytes done and the total bytes, from any thread.
    """
    if not sys.stderr.isatty():
        yield _plain(what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress("{task.description}", *columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(what, total=None, visible=False)  # there is no bar before the total is known

        def advance(done_bytes: int, total_bytes: int) -> None:
            bars.update(task, completed=done_bytes, total=total_bytes, visible=True)

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
