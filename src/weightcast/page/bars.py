"""Horizontal bars, with a whisker or in parts; the timeline of an update; what each engine served at each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightcast.page.charts import HALF, WIDE, Figure, FormatValue
from weightcast.page.svg import PHASES, Scale, bar, element, of_phases, picture, stride, text, ticks
from weightcast.page.words import seconds
from weightcast.timeline.tracks import MESSAGES, Timeline, Track

_ROW = 26.0
_LETTER = 7.4  # pixels of a letter of a label, at most
_MAX_TRACKS = 40
_MAX_SPANS = 600  # of one row; a picture of 1,000 pixels cannot show more
_LANE, _GAP, _HEAD = 20.0, 4.0, 24.0
_LEFT, _RIGHT = 112.0, 14.0
_INSIDE = 46.0  # narrower spans have no room for a word


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar.

    Attributes:
        low, high: Ends of a whisker; None for none.
        note: Further words for the tooltip.
    """

    name: str
    value: float
    colour: str = "s1"
    low: float | None = None
    high: float | None = None
    note: str = ""


def bars(
    title: str,
    caption: str,
    found: Sequence[Bar],
    *,
    show: FormatValue,
    legend: Sequence[tuple[str, str]] = (),
    value_title: str = "value",
    wide: bool = False,
    tall: bool = False,
) -> Figure:
    """Plots a horizontal bar for each row, from top to bottom, with its value at its end.

    Args:
        legend: Colour class and meaning, if colours have one.
        value_title: Head of the table's column of values.
    """
    width = WIDE if wide else HALF
    left = _gutter([each.name for each in found], width)
    room = max((len(show(each.value)) for each in found), default=0) * _LETTER + 14
    high = max((max(each.value, each.high or 0.0) for each in found), default=0.0)
    scale = Scale(0.0, high or 1.0, left, width - room)
    parts = [element("line", x1=left, x2=left, y1=4, y2=len(found) * _ROW + 4, class_="axis")]
    for number, each in enumerate(found):
        middle = 4 + (number + 0.5) * _ROW
        end = scale(each.value)
        group = [
            element("rect", x=0, y=middle - _ROW / 2, width=width, height=_ROW, class_="hit"),
            text(_clip(each.name, left), x=left - 8, y=middle + 4, class_="name end"),
            bar(left, middle - 8, max(end - left, 1.0), 16, class_=f"fill {each.colour}"),
        ]
        if each.low is not None and each.high is not None:
            group.append(
                element("line", x1=scale(each.low), x2=scale(each.high), y1=middle, y2=middle, class_="whisker")
            )
            end = max(end, scale(each.high))
        group.append(text(show(each.value), x=end + 6, y=middle + 4, class_="value"))
        spread = f"\n{show(each.low)} to {show(each.high)}" if each.low is not None and each.high is not None else ""
        tip = f"{each.name}\n{show(each.value)}{spread}" + (f"\n{each.note}" if each.note else "")
        parts.append(element("g", *group, class_="hover", data_tip=tip))
    return Figure(
        title=title,
        caption=caption,
        svg=picture(width, len(found) * _ROW + 8, parts, title),
        legend=legend,
        headers=("", value_title),
        rows=[(each.name, show(each.value)) for each in found],
        wide=wide,
        tall=tall,
    )


def stacks(
    title: str,
    caption: str,
    rows: Mapping[str, Mapping[str, float]],
    *,
    colours: Mapping[str, str],
    show: FormatValue,
    wide: bool = False,
    tall: bool = False,
) -> Figure:
    """Plots a horizontal bar of parts for each row, from left to right; every row has the same parts."""
    width = WIDE if wide else HALF
    names = list(next(iter(rows.values()), {}))
    left = _gutter(rows, width)
    high = max((sum(parts.values()) for parts in rows.values()), default=0.0)
    room = len(show(high)) * _LETTER + 14
    scale = Scale(0.0, high or 1.0, left, width - room)
    drawn = [element("line", x1=left, x2=left, y1=4, y2=len(rows) * _ROW + 4, class_="axis")]
    for number, (name, parts) in enumerate(rows.items()):
        top = 4 + number * _ROW + 5
        group = [element("rect", x=0, y=top - 5, width=width, height=_ROW, class_="hit")]
        group.append(text(_clip(name, left), x=left - 8, y=top + 12, class_="name end"))
        before = 0.0
        for part in names:
            start, end = scale(before), scale(before + parts[part])
            before += parts[part]
            size = max(end - start - (1.0 if end - start > 2 else 0.0), 0.0)
            group.append(element("rect", x=start, y=top, width=size, height=16, class_=f"fill {colours[part]}"))
        group.append(text(show(before), x=scale(before) + 6, y=top + 12, class_="value"))
        said = [f"{part}: {show(parts[part])}" for part in names if parts[part]]
        drawn.append(element("g", *group, class_="hover", data_tip="\n".join([name, *said])))
    return Figure(
        title=title,
        caption=caption,
        svg=picture(width, len(rows) * _ROW + 8, drawn, title),
        legend=[(colours[name], name) for name in names],
        headers=("", *names),
        rows=[(name, *(show(parts[part]) for part in names)) for name, parts in rows.items()],
        wide=wide,
        tall=tall,
    )


def _gutter(names: Iterable[str], width: float) -> float:
    return min(width * 0.42, max((len(name) for name in names), default=0) * _LETTER + 18)


def _clip(name: str, width: float) -> str:
    fits = max(4, int((width - 8) / 7.2))
    return name if len(name) <= fits else "…" + name[1 - fits :]


def timeline(title: str, caption: str, found: Timeline) -> Figure:
    """Plots every track of an update; of very many, the busiest ones of each process."""
    shown = _choose([track for track in found.tracks if not track.name.startswith(MESSAGES)])
    high = ticks(found.end_us, 8)[-1]
    scale = Scale(0.0, high, _LEFT, WIDE - _RIGHT)
    parts: list[str] = []
    y = 4.0
    process = ""
    for track in shown:
        if track.process != process:
            process = track.process
            words = "trainer" if track.side == "trainer" else f"engine {process}"
            error = max(each.clock_error_us for each in shown if each.process == process)
            parts.append(text(words, x=2, y=y + 16, class_="head"))
            if error:
                parts.append(text(f"clock ± {seconds(error / 1e6)}", x=WIDE - _RIGHT, y=y + 16, class_="tick end"))
            y += _HEAD
        parts.append(text(track.name, x=_LEFT - 8, y=y + 14, class_="name end"))
        parts.append(element("rect", x=_LEFT, y=y, width=WIDE - _RIGHT - _LEFT, height=_LANE, class_="lane"))
        parts += _spans(track, scale, y)
        y += _LANE + _GAP
    for mark in ticks(found.end_us, 8):
        x = scale(mark)
        parts.insert(0, element("line", x1=x, x2=x, y1=4, y2=y, class_="grid"))
        parts.append(text(seconds(mark / 1e6), x=x, y=y + 16, class_=f"tick {'mid' if mark < high else 'end'}"))
    used = dict.fromkeys(span.name for track in shown for span in track.spans)
    names = [name for name in PHASES if name in used] + [name for name in used if name not in PHASES]
    left_out = sum(not track.name.startswith(MESSAGES) for track in found.tracks) - len(shown)
    more = f" {left_out} more rows are in the trace file." if left_out else ""
    return Figure(
        title=title,
        caption=caption + more + (f" {found.note}" if found.note else ""),
        svg=picture(WIDE, y + 24, parts, title),
        legend=[(colour, name) for name, colour in of_phases(names).items()],
        headers=("process", "row", *names),
        rows=[(track.process, track.name, *_sums(track, names)) for track in shown],
        wide=True,
    )


def _choose(tracks: Sequence[Track]) -> list[Track]:
    """Returns the first rows, which are the trainer's, and those that ended last."""
    if len(tracks) <= _MAX_TRACKS:
        return list(tracks)
    busy = sorted(tracks, key=lambda track: -max((span.end_us for span in track.spans), default=0.0))
    kept = set(list(dict.fromkeys(id(track) for track in [*tracks[:4], *busy]))[:_MAX_TRACKS])
    return [track for track in tracks if id(track) in kept]


def _spans(track: Track, scale: Scale, y: float) -> list[str]:
    parts: list[str] = []
    colours = of_phases(span.name for span in track.spans)
    longest = sorted(track.spans, key=lambda span: -span.us)[:_MAX_SPANS]
    for span in sorted(longest, key=lambda span: (span.start_us, -span.us)):
        x, width = scale(span.start_us), max(scale(span.end_us) - scale(span.start_us), 0.8)
        about = f"\nbucket {span.bucket}" if span.bucket is not None else ""
        tip = f"{span.name}: {seconds(span.us / 1e6)}\nfrom {seconds(span.start_us / 1e6)}{about}"
        kind = f"fill span {colours[span.name]}"
        # A hairline of the page's colour keeps neighbours apart.
        drawn = max(width - 0.8, 0.8)
        parts.append(element("rect", x=x, y=y + 1, width=drawn, height=_LANE - 2, rx=2, class_=kind, data_tip=tip))
        if width > _INSIDE + 6 * len(span.name) - 24:
            parts.append(text(span.name, x=x + 6, y=y + 14, class_=f"inside {colours[span.name]}"))
    return parts


def _sums(track: Track, names: Sequence[str]) -> list[str]:
    sums = dict.fromkeys(names, 0.0)
    for span in track.spans:
        sums[span.name] += span.us / 1e6
    return [seconds(sums[name]) if sums[name] else "" for name in names]


@dataclass(frozen=True, slots=True)
class StatusCell:
    """One engine after one update: the colour class of its cell, a word that fits into it, and the whole story."""

    colour: str
    label: str
    words: str


def served(
    title: str,
    caption: str,
    steps: Sequence[int],
    rows: Mapping[str, Sequence[StatusCell]],
    *,
    legend: Sequence[tuple[str, str]],
    wide: bool = False,
) -> Figure:
    """Plots a cell for each engine and step; ``steps`` are the versions that were sent, ascending."""
    width = WIDE if wide else HALF
    longest = max((len(name) for name in rows), default=0)
    left = min(width * 0.45, longest * 7.3 + 16)
    pitch = (width - left - 8) / max(1, len(steps))
    gap = min(3.0, pitch * 0.15)
    parts: list[str] = []
    for number, (name, cells) in enumerate(rows.items()):
        y = 4 + number * 28.0
        parts.append(text(name, x=left - 10, y=y + 16, class_="name end"))
        for place, state in enumerate(cells):
            x = left + place * pitch
            tip = f"{name}\nstep {steps[place]}: {state.words}"
            kind = f"fill span {state.colour}"
            size = max(pitch - gap, 0.5)
            parts.append(
                element("rect", x=x, y=y, width=size, height=22, rx=min(3, size / 3), class_=kind, data_tip=tip)
            )
            if len(state.label) * 8 + 6 < size:
                middle = x + size / 2
                parts.append(text(state.label, x=middle, y=y + 15, class_=f"inside mid {state.colour}"))
    bottom = 4 + len(rows) * 28.0
    step = stride(len(steps), max(1, int((width - left) / 36)))
    for place in range(0, len(steps), step):
        parts.append(text(steps[place], x=left + (place + 0.5) * pitch - gap / 2, y=bottom + 14, class_="tick mid"))
    return Figure(
        title=title,
        caption=caption,
        svg=picture(width, bottom + 22, parts, title),
        legend=legend,
        headers=("engine", *map(str, steps)),
        rows=[(name, *(state.words for state in cells)) for name, cells in rows.items()],
        wide=wide,
    )
