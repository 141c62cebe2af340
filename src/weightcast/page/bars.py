"""Horizontal bars, with a whisker or in parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightcast.page.charts import HALF, WIDE, Figure, Show
from weightcast.page.svg import Scale, bar, element, picture, text

_ROW = 26.0
_LETTER = 7.4  # pixels of a letter of a label, at most


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
    show: Show,
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
    show: Show,
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
