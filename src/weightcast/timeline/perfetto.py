"""Timelines in the Trace Event Format, which Perfetto (ui.perfetto.dev) and ``chrome://tracing`` open.

A process of the trace is the trainer or one engine.  Its threads are the rows of the timeline.  An arrow leads from the
head's message to the engine that carried it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from weightcast.timeline.tracks import MESSAGES, Timeline, Track

_UPDATES = 1  # process id of the row of all updates
_MAX_FLOWS = 1 << 20  # messages of one update


class Update(msgspec.Struct, kw_only=True):
    """One update, ``bytes`` being the payload of one copy of the model; further fields of a report are ignored."""

    version: int
    seconds: float = 0.0
    transport: str = ""
    bytes: int = 0
    timeline: Timeline = Timeline()


def trace_of(updates: Sequence[Update]) -> dict[str, Any]:
    """Returns the trace of one update, or of several at their times of day; ValueError if none has a timeline."""
    known = [update for update in updates if update.timeline.tracks]
    if not known:
        raise ValueError(
            "no timeline was recorded: reports have one on trainer rank 0, and only of updates that reached an engine"
        )
    first = min(update.timeline.began_unix_s for update in known)
    names = dict.fromkeys(track.process for update in known for track in update.timeline.tracks)
    pids = {name: number for number, name in enumerate(names, start=_UPDATES + 1)}
    # Thread ids differ from all process ids: Perfetto takes such a thread for the main one, and moves it to the top.
    first_row = 1_000 * (1 + (_UPDATES + len(pids)) // 1_000)
    events = _process(_UPDATES, "updates", _UPDATES) + _thread(_UPDATES, first_row, "update()", 1)
    for name, pid in pids.items():
        events += _process(pid, "trainer" if name == "trainer" else f"engine {name}", pid)
    rows: dict[tuple[str, str], int] = {}
    for number, update in enumerate(known):
        start_us = (update.timeline.began_unix_s - first) * 1e6
        about = {"transport": update.transport, "bytes": update.bytes, "version": update.version}
        if update.timeline.note:
            about["note"] = update.timeline.note
        events.append(
            _slice(_UPDATES, first_row, f"version {update.version}", start_us, round(update.seconds * 1e6), about)
        )
        for track in update.timeline.tracks:
            pid = pids[track.process]
            row = rows.get((track.process, track.name))
            if row is None:
                row = rows[track.process, track.name] = first_row + 1 + len(rows)
                error = f" (clock ± {track.clock_error_us / 1e3:.3g} ms)" if track.clock_error_us else ""
                events += _thread(pid, row, track.name + error, row)
            events += _spans(track, pid, row, start_us)
        events += _arrows(update.timeline, pids, rows, start_us, number)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "clock": "microseconds of trainer rank 0; other clocks are aligned by round trips of messages",
            "largest clock error, us": round(max(update.timeline.clock_error_us for update in known), 1),
        },
    }


def write(path: str | Path, updates: Sequence[Update]) -> Path:
    """Writes ``trace_of`` as JSON and returns the path; raises as ``trace_of``, with nothing written."""
    path = Path(path)
    path.write_bytes(msgspec.json.encode(trace_of(updates)))
    return path


def _process(pid: int, name: str, order: int) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": order}},
    ]


def _thread(pid: int, tid: int, name: str, order: int) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}},
        {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": order}},
    ]


def _slice(pid: int, tid: int, name: str, start_us: float, us: int, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "weightcast",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": round(start_us),
        "dur": us,
        "args": args,
    }


def _spans(track: Track, pid: int, tid: int, start_us: float) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for span in track.spans:
        args: dict[str, Any] = {} if span.bucket is None else {"bucket": span.bucket}
        if span.error:
            args["error"] = span.error
        name = (
            f"{span.name} {span.bucket}" if track.name.startswith(MESSAGES) and span.bucket is not None else span.name
        )
        events.append(_slice(pid, tid, name, start_us + span.start_us, span.us, args))
    return events


def _arrows(
    timeline: Timeline, pids: dict[str, int], rows: dict[tuple[str, str], int], start_us: float, number: int
) -> list[dict[str, Any]]:
    """Returns an arrow from each message of the head to the engine's answer to it."""
    ends = {
        span.flow: (track, span)
        for track in timeline.tracks
        if track.side == "engine"
        for span in track.spans
        if span.flow is not None
    }
    events: list[dict[str, Any]] = []
    for track in timeline.tracks:
        for span in track.spans if track.side == "trainer" else ():
            if span.flow is None or span.flow not in ends:
                continue
            to, heard = ends[span.flow]
            for phase, row, at in (("s", track, span), ("f", to, heard)):
                events.append(
                    {
                        "ph": phase,
                        "cat": "message",
                        "name": span.name,
                        "id": number * _MAX_FLOWS + span.flow,
                        "pid": pids[row.process],
                        "tid": rows[row.process, row.name],
                        "ts": round(start_us + at.start_us),
                        **({"bp": "e"} if phase == "f" else {}),
                    }
                )
    return events
