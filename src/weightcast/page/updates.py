"""The page of one update, or of all updates of a run, from reports in their JSON form.

It reads the JSON form, so that saved reports of other versions can be shown; fields that they lack are empty.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from weightcast.page.bars import Bar, StatusCell, bars, served, timeline
from weightcast.page.charts import Figure, columns, lines
from weightcast.page.document import Chip, Document, Mood, Tile
from weightcast.page.svg import MEANINGS, of_phases, of_series
from weightcast.page.words import seconds, size
from weightcast.report import UpdateReport, count_of
from weightcast.timeline.tracks import Timeline

# The phases that follow one another on the head.  ``load``, ``stall`` and most of ``verify`` are times of engines,
# within ``send`` and ``commit``.
_OF_HEAD = ("open", "gather", "pack", "send", "commit", "recover", "other")
_OF_ENGINES = ("load", "verify")
_MOODS: dict[str, Mood] = {"serving": "good", "untouched": "warn", "quarantined": "bad", "unknown": "bad"}
_CELLS = {"serving": "s1", "untouched": "s3", "quarantined": "bad", "unknown": "grey", "": "faint"}
_MAX_LINES = 6


class TargetView(msgspec.Struct, kw_only=True):
    """The fields of a target's row that the page shows (``TargetReport``)."""

    url: str
    engine: str = ""
    version_before: int | None = None
    version_after: int | None = None
    digest: str | None = None
    status: str = ""
    proof: str = ""
    ranks: int = 0
    digests_matched: int = 0
    stall_s: float = 0.0
    peak_extra_bytes: int = 0
    message: str = ""
    notes: tuple[str, ...] = ()


class ReportView(msgspec.Struct, kw_only=True):
    """The fields of a report that the page shows (``UpdateReport``)."""

    version: int
    transport: str = ""
    bytes: int = 0
    buckets: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = {}
    peak_extra_bytes: int = 0
    digest: str | None = None
    targets: tuple[TargetView, ...] = ()
    timeline: Timeline | None = None

    @property
    def ok(self) -> bool:
        return all(row.status == "serving" and row.version_after == self.version for row in self.targets)

    @property
    def stall_s(self) -> float:
        return max((row.stall_s for row in self.targets), default=0.0)


def write_page(path: str | Path, *reports: UpdateReport) -> Path:
    """Writes one self-contained page with plots, and returns its path.

    Args:
        path: The file to write.
        reports: One report, or those of a run in order; the page then shows all updates by step.

    Raises:
        OSError: The file cannot be written.
    """
    return page_of([report.to_json() for report in reports]).write(path)


def page_of(documents: Sequence[bytes | str]) -> Document:
    """Returns the page of one update, or of several in order, from documents that ``UpdateReport.to_json`` writes.

    Raises:
        msgspec.MsgspecError: A document is no report.
    """
    reports = [msgspec.json.decode(document, type=ReportView) for document in documents]
    last = reports[-1]
    many = f"{len(reports)} updates, versions {reports[0].version} to {last.version}"
    title = f"Update to version {last.version}" if len(reports) == 1 else many
    ranks = sum(row.ranks for row in last.targets)
    engines = f"{count_of(len(last.targets), 'engine')}, {count_of(ranks, 'rank')}"
    buckets = count_of(last.buckets, "bucket")
    page = Document(title, f"{size(last.bytes)} to {engines} over {last.transport}, {buckets}")
    page.tiles(_tiles(reports))
    page.figures(_of_one(last) if len(reports) == 1 else _of_many(reports))
    page.heading("Engines" if len(reports) == 1 else f"Engines after version {last.version}")
    page.table(
        ("engine", "kind", "version", "state", "proof", "stall#", "peak extra#", "digest"),
        [_row(row) for row in last.targets],
    )
    for row in last.targets:
        for words in (row.message, *row.notes):
            if words:
                page.remark(f"{row.url}: {words}")
    return page


def _tiles(reports: Sequence[ReportView]) -> list[Tile]:
    last = reports[-1]
    good = sum(report.ok for report in reports)
    serving = sum(row.status == "serving" for row in last.targets)
    took = statistics.median(report.seconds for report in reports)
    rate = statistics.median(report.bytes / report.seconds if report.seconds else 0.0 for report in reports)
    median = "median of all updates" if len(reports) > 1 else ""
    proofs = {row.proof for row in last.targets}
    first = (
        Tile(
            name="engines serving",
            value=f"{serving} of {len(last.targets)}",
            below=f"version {last.version}",
            mood="good" if last.ok else "bad",
        )
        if len(reports) == 1
        else Tile(
            name="complete updates",
            value=f"{good} of {len(reports)}",
            below="every engine serves the new version",
            mood="good" if good == len(reports) else "bad",
        )
    )
    return [
        first,
        Tile(name="time of an update", value=seconds(took), below=median),
        Tile(name="rate", value=f"{size(rate)}/s", below=f"{size(last.bytes)} in {seconds(last.seconds)}"),
        Tile(
            name="longest stall",
            value=seconds(max(report.stall_s for report in reports)),
            below="in which an engine generated nothing",
        ),
        Tile(
            name="proof",
            value=proofs.pop() if len(proofs) == 1 else "differs",
            below=f"digest {last.digest}" if last.digest else "no digest was taken",
        ),
    ]


def _of_one(report: ReportView) -> list[Figure]:
    figures: list[Figure] = []
    if report.timeline is not None and report.timeline.tracks:
        caption = "Every row is a process, or the threads of its transport. Times are on the clock of trainer rank 0."
        figures.append(timeline("What every rank did", caption, report.timeline))
    known = {name: took for name, took in report.phases.items() if took}
    colours = of_phases(known)
    figures.append(
        bars(
            "Time by phase",
            f"Phases overlap; the whole update took {seconds(report.seconds)}.",
            [
                Bar(name=name, value=took, colour=colours[name], note=MEANINGS.get(name, ""))
                for name, took in known.items()
            ],
            show=seconds,
            value_title="seconds",
            tall=True,
        )
    )
    figures.append(stall_bars({row.url: row.stall_s for row in report.targets}))
    memory = {"trainer": report.peak_extra_bytes} | {row.url: row.peak_extra_bytes for row in report.targets}
    if any(memory.values()):
        figures.append(
            bars(
                "Peak extra memory",
                f"The most that a rank held beside its weights. One copy of the model has {size(report.bytes)}.",
                [Bar(name=short(name), value=float(count), colour="s5") for name, count in memory.items()],
                show=size,
                value_title="bytes",
            )
        )
    return figures


def _of_many(reports: Sequence[ReportView]) -> list[Figure]:
    figures = _by_step(reports)
    slowest = max(reports, key=lambda report: report.seconds)
    if slowest.timeline is not None and slowest.timeline.tracks:
        caption = f"What every rank did in the update to version {slowest.version}, which took longest."
        figures.append(timeline("The slowest update", caption, slowest.timeline))
    return figures


def _by_step(reports: Sequence[ReportView]) -> list[Figure]:
    steps = [report.version for report in reports]
    urls = list(dict.fromkeys(row.url for report in reports for row in report.targets))
    rows = [{row.url: row for row in report.targets} for report in reports]
    return [
        phase_columns(steps, [report.phases for report in reports], [report.seconds for report in reports]),
        versions_served(
            steps,
            {url: [(row.status, row.version_after) if (row := of.get(url)) else None for of in rows] for url in urls},
        ),
        stall_lines(steps, {url: [row.stall_s if (row := of.get(url)) else None for of in rows] for url in urls}),
        engine_lines(steps, [report.phases for report in reports]),
        lines(
            "Peak extra memory of the trainer",
            "The most that a trainer rank held beside its weights.",
            steps,
            {"bytes": [float(report.peak_extra_bytes) for report in reports]},
            colours={"bytes": "s5"},
            show=size,
        ),
        lines(
            "Bytes of one copy of the model",
            "The payload of each update.",
            steps,
            {"bytes": [float(report.bytes) for report in reports]},
            colours={"bytes": "s2"},
            show=size,
        ),
        lines(
            "Rate",
            "Payload divided by the time of the whole update.",
            steps,
            {"rate": [report.bytes / report.seconds if report.seconds else None for report in reports]},
            colours={"rate": "s3"},
            show=lambda value: f"{size(value)}/s",
        ),
    ]


def phase_columns(steps: Sequence[int], phases: Sequence[Mapping[str, float]], whole: Sequence[float]) -> Figure:
    """Plots the head's phases (``UpdateReport.phases``) of each update as a column; ``whole`` is its seconds."""
    parts = [parts_of(found, took) for found, took in zip(phases, whole, strict=True)]
    names = [name for name in (*_OF_HEAD, "check") if any(part[name] for part in parts)]
    return columns(
        "Time by phase and step",
        "The phases of trainer rank 0, one column for each update. What is left of an update is the check of digests.",
        steps,
        {name: [part[name] for part in parts] for name in names},
        colours=of_phases(names),
        show=seconds,
        marks=whole,
        mark_name="whole update",
    )


def parts_of(phases: Mapping[str, float], whole: float) -> dict[str, float]:
    """Returns the parts of an update that follow one another, in seconds; together they are the ``whole``."""
    parts = {name: phases.get(name, 0.0) for name in _OF_HEAD}
    return parts | {"check": max(whole - sum(parts.values()), 0.0)}


def engine_lines(steps: Sequence[int], phases: Sequence[Mapping[str, float]]) -> Figure:
    """Plots what the slowest engine did during each update; arguments as ``phase_columns``."""
    return lines(
        "Work in the engines",
        "Seconds of the slowest engine. Most of it runs while trainer rank 0 sends.",
        steps,
        {name: [found.get(name, 0.0) for found in phases] for name in _OF_ENGINES},
        colours=of_phases(_OF_ENGINES),
        show=seconds,
    )


def stall_lines(steps: Sequence[int], stalls: Mapping[str, Sequence[float | None]]) -> Figure:
    """Plots the stall of each engine by step; of many engines, the longest and the median one."""
    series: dict[str, Sequence[float | None]] = {short(url): values for url, values in stalls.items()}
    if len(stalls) > _MAX_LINES:
        found = [[value for values in stalls.values() if (value := values[n]) is not None] for n in range(len(steps))]
        series = {
            "longest": [max(values) if values else None for values in found],
            "median": [statistics.median(values) if values else None for values in found],
        }
    return lines(
        "Stall of each engine",
        "Time in which an engine generated nothing.",
        steps,
        series,
        colours=of_series(series),
        show=seconds,
    )


def stall_bars(stalls: Mapping[str, float]) -> Figure:
    """Plots the stall of each engine in one update, at most the longest 20."""
    longest = sorted(stalls.items(), key=lambda item: -item[1])[:20]
    more = f" The longest {len(longest)} of {len(stalls)}." if len(longest) < len(stalls) else ""
    return bars(
        "Stall of each engine",
        f"Time in which it generated nothing.{more}",
        [Bar(name=short(url), value=took, colour="p7") for url, took in longest],
        show=seconds,
        value_title="seconds",
    )


def versions_served(steps: Sequence[int], found: Mapping[str, Sequence[tuple[str, int | None] | None]]) -> Figure:
    """Plots each engine's state after each update, from its status and version; None where it took no part."""
    rows: dict[str, list[StatusCell]] = {}
    used: dict[str, None] = {}
    for url, states in found.items():
        cells: list[StatusCell] = []
        for state in states:
            status = state[0] if state is not None else ""
            version = state[1] if state is not None else None
            label = "" if state is None else "?" if version is None else str(version)
            words = "not a target" if state is None else f"{status}, version {label}"
            used[status] = None
            cells.append(StatusCell(_CELLS.get(status, "grey"), label, words))
        rows[short(url)] = cells
    meanings = {
        "serving": "serves the new version",
        "untouched": "serves the old version",
        "quarantined": "quarantined",
        "unknown": "unknown",
        "": "not a target",
    }
    return served(
        "Versions by engine",
        "A square for each engine and update, with the version that the engine serves after it.",
        steps,
        rows,
        legend=[(_CELLS[name], words) for name, words in meanings.items() if name in used],
    )


def _row(row: TargetView) -> tuple[str | Chip, ...]:
    before = "?" if row.version_before is None else str(row.version_before)
    after = "?" if row.version_after is None else str(row.version_after)
    ranks = f" on {row.digests_matched} of {count_of(row.ranks, 'rank')}" if row.digest else ""
    return (
        row.url,
        row.engine,
        f"{before} → {after}",
        Chip(row.status, _MOODS.get(row.status, "grey")),
        row.proof,
        seconds(row.stall_s),
        size(row.peak_extra_bytes),
        f"{row.digest or '-'}{ranks}",
    )


def short(url: str) -> str:
    """Returns a URL without its scheme, as a label."""
    return url.removeprefix("http://").removeprefix("https://")
