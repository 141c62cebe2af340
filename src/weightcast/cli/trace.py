"""``weightcast trace``: saved reports as a trace for Perfetto, a page with plots, or a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from weightcast.cli.options import Json, Traceback, check_writable
from weightcast.cli.render import say, say_json, table
from weightcast.errors import ConfigError
from weightcast.page.svg import PHASES
from weightcast.page.updates import page_of
from weightcast.page.words import seconds
from weightcast.timeline import perfetto
from weightcast.timeline.perfetto import Update
from weightcast.timeline.tracks import MESSAGES


def trace(
    reports: Annotated[
        list[Path],
        typer.Argument(
            metavar="REPORT...",
            help="Files with reports: the output of `push --json`, or a line for each `report.to_json()`; - is stdin.",
            show_default=False,
            allow_dash=True,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="File to write: FILE.html is a page with plots, anything else a trace for Perfetto.",
        ),
    ] = None,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Shows what every rank did in saved updates: as a trace for https://ui.perfetto.dev, a page, or a table.

    A report's timeline has a row for each trainer rank, engine server and engine rank, all on the clock of trainer
    rank 0. Where another clock had to be aligned, the row says by how much it may be wrong.

    \b
    weightcast push ./step-7 --to http://10.0.3.7:8000 --version 7 --json > step-7.json
    weightcast trace step-7.json
    weightcast trace step-7.json -o step-7-trace.json
    weightcast trace run.jsonl -o run.html
    """
    if out is not None:
        check_writable(out)
    documents = [document for path in reports for document in read_reports(path)]
    updates = [msgspec.json.decode(document, type=Update) for document in documents]
    tracks = [track for update in updates for track in update.timeline.tracks]
    if out is not None and out.suffix == ".html":
        page_of(documents).write(out)
    elif out is not None:
        try:
            perfetto.write(out, updates)
        except ValueError as error:
            raise ConfigError(str(error), hint="save the report of trainer rank 0, after an update") from error
    if as_json:
        say_json(
            {
                "file": None if out is None else str(out),
                "updates": [update.version for update in updates],
                "rows": len(tracks),
                "spans": sum(len(track.spans) for track in tracks),
                "clock_error_us": max((track.clock_error_us for track in tracks), default=0.0),
            }
        )
    elif out is None:
        say("\n\n".join(_shown(update) for update in updates))
    else:
        spans = sum(len(track.spans) for track in tracks)
        versions = ", ".join(str(update.version) for update in updates[:8]) + (" ..." if len(updates) > 8 else "")
        opens = "" if out.suffix == ".html" else "; open it at https://ui.perfetto.dev"
        say(f"{out}: version {versions}, {spans} spans in {len(tracks)} rows{opens}")


def read_reports(path: Path) -> list[bytes]:
    """Reads the reports of a file, as JSON: one document, or one on each line; ``ConfigError`` if it has none."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}",
            hint="pass a file with report.to_json(), or with the output of `weightcast push --json`",
        ) from error
    found: list[bytes] = []
    for number, text in enumerate(_documents(data), start=1):
        try:
            document: Any = msgspec.json.decode(text)
            if isinstance(document, dict) and isinstance(document.get("error"), dict):
                document = document["error"].get("report")  # a failed `push --json`
            encoded = msgspec.json.encode(document)
            msgspec.json.decode(encoded, type=Update)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path}: document {number} is not the report of an update: {error}",
                hint="save report.to_json(), or the output of `weightcast push --json`",
            ) from error
        found.append(encoded)
    if not found:
        raise ConfigError(f"{path} is empty", hint="save report.to_json(), or the output of `weightcast push --json`")
    return found


def _documents(data: bytes) -> Sequence[bytes]:
    try:
        msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        lines = [line for line in data.splitlines() if line.strip()]
        return lines if len(lines) > 1 and lines[0].rstrip().endswith(b"}") else [data] if data.strip() else []
    return [data]


def _shown(update: Update) -> str:
    tracks = [track for track in update.timeline.tracks if not track.name.startswith(MESSAGES)]
    head = f"version {update.version}: {seconds(update.seconds)} over {update.transport}"
    if not tracks:
        return f"{head}; this report has no timeline"
    used = {span.name for track in tracks for span in track.spans}
    phases = [name for name in PHASES if name in used] + sorted(used - PHASES.keys())
    rows: list[list[str]] = []
    for track in tracks:
        sums = dict.fromkeys(phases, 0)
        for span in track.spans:
            sums[span.name] += span.us
        error = f"± {seconds(track.clock_error_us / 1e6)}" if track.clock_error_us else "same"
        rows.append(
            [track.process, track.name, error, *(seconds(sums[name] / 1e6) if sums[name] else "-" for name in phases)]
        )
    return f"{head}\n{table(['process', 'row', 'clock', *phases], rows)}"
