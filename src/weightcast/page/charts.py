"""Plots over steps: lines and stacked columns.  A ``Figure`` has its values as a table too, for readers of text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from weightcast.page.svg import Scale, element, picture, stride, text, ticks

FormatValue = Callable[[float], str]

WIDE, HALF = 1080.0, 520.0
_HEIGHT = 253.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 14.0, 12.0, 37.0
_MAX_COLUMNS = 120
_MIN_PART = 1.5  # thinner parts of a column have no gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot with its words.

    Attributes:
        caption: How to read it, in one or two sentences.
        legend: Colour class and name of each series; empty where one series needs none.
        headers, rows: The plotted values as a table.
        wide: True if the figure takes the whole width of the page.
        tall: True if two other figures stand beside it, one above the other.
    """

    title: str
    caption: str
    svg: str
    legend: Sequence[tuple[str, str]] = ()
    headers: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    wide: bool = False
    tall: bool = False


@dataclass(kw_only=True)
class _Plot:
    """The axes that lines and columns share."""

    width: float
    high: float
    show: FormatValue
    parts: list[str] = field(default_factory=list[str])

    @functools.cached_property
    def marks(self) -> list[float]:
        return ticks(self.high)

    @functools.cached_property
    def left(self) -> float:
        """Where the plot begins: right of the longest label of the grid."""
        return max(_LEFT, max(len(self.show(mark)) for mark in self.marks) * 7.4 + 14)

    @property
    def right(self) -> float:
        return self.width - _RIGHT

    @property
    def bottom(self) -> float:
        return _HEIGHT - _BOTTOM

    def vertical(self) -> Scale:
        scale = Scale(0.0, self.marks[-1], self.bottom, _TOP)
        for mark in self.marks:
            y = scale(mark)
            kind = "axis" if mark == 0 else "grid"
            self.parts.append(element("line", x1=self.left, x2=self.right, y1=y, y2=y, class_=kind))
            self.parts.append(text(self.show(mark), x=self.left - 8, y=y + 4, class_="tick end"))
        return scale

    def under(self, at: Callable[[int], float], labels: Sequence[str], title: str) -> None:
        """Draws the labels under the plot, as many as fit."""
        room = max((len(label) for label in labels), default=0) * 7.5 + 14
        step = stride(len(labels), max(1, int((self.right - self.left) / room)))
        for number in range(0, len(labels), step):
            self.parts.append(text(labels[number], x=at(number), y=self.bottom + 17, class_="tick mid"))
        self.parts.append(text(title, x=self.right, y=_HEIGHT - 5, class_="tick end"))

    def picture(self, label: str) -> str:
        return picture(self.width, _HEIGHT, self.parts, label)


def lines(
    title: str,
    caption: str,
    steps: Sequence[int],
    series: Mapping[str, Sequence[float | None]],
    *,
    colours: Mapping[str, str],
    show: FormatValue,
    x_title: str = "version",
    high: float = 0.0,
    wide: bool = False,
) -> Figure:
    """Plots a line for each series.

    Args:
        series: Values of each series, one for each step; None where it has none.
        high: Least upper end of the vertical axis.
    """
    known = [value for values in series.values() for value in values if value is not None]
    plot = _Plot(width=WIDE if wide else HALF, high=max([high, *known], default=0.0), show=show)
    scale = plot.vertical()
    ends = Scale(0.0, max(1.0, len(steps) - 1.0), plot.left + 12, plot.right - 12)
    plot.under(ends, [str(step) for step in steps], x_title)
    later = [list(values) for values in series.values()]
    for name, values in series.items():
        later.pop(0)
        points = [(ends(n), scale(value)) for n, value in enumerate(values) if value is not None]
        plot.parts += _line(points, colours[name], covered=list(values) in later)
    gap = (ends(1) - ends(0)) if len(steps) > 1 else plot.right - plot.left
    for number, step in enumerate(steps):
        said = [f"{name}: {show(value)}" for name, values in series.items() if (value := values[number]) is not None]
        plot.parts.append(_hover(ends(number), gap, plot, f"{x_title} {step}", said))
    return Figure(
        title=title,
        caption=caption,
        svg=plot.picture(title),
        legend=[(colours[name], name) for name in series] if len(series) > 1 else (),
        headers=(x_title, *series),
        rows=[
            (str(step), *("" if (value := values[number]) is None else show(value) for values in series.values()))
            for number, step in enumerate(steps)
        ],
        wide=wide,
    )


def _line(points: Sequence[tuple[float, float]], colour: str, *, covered: bool) -> list[str]:
    """Returns a line with its dots; one that another line covers is drawn wide, so that both are seen."""
    if not points:
        return []
    path = "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in points)
    if covered:
        return [element("path", d=path, class_=f"line wide {colour}")]
    marked = points if len(points) <= 20 else points[-1:]
    return [
        element("path", d=path, class_=f"line {colour}"),
        *(element("circle", cx=x, cy=y, r=4, class_=f"dot {colour}") for x, y in marked),
    ]


def _hover(x: float, width: float, plot: _Plot, head: str, said: Sequence[str]) -> str:
    """Returns an invisible column that shows a guide line, and the values as a tooltip."""
    return element(
        "g",
        element("rect", x=x - width / 2, y=_TOP, width=width, height=plot.bottom - _TOP, class_="hit"),
        element("line", x1=x, x2=x, y1=_TOP, y2=plot.bottom, class_="guide"),
        class_="hover",
        data_tip="\n".join([head, *said]),
    )


def columns(
    title: str,
    caption: str,
    steps: Sequence[int],
    parts: Mapping[str, Sequence[float]],
    *,
    colours: Mapping[str, str],
    show: FormatValue,
    marks: Sequence[float] = (),
    mark_name: str = "",
    x_title: str = "version",
    wide: bool = True,
) -> Figure:
    """Plots a stacked column for each step; more than 120 steps are averaged in groups.

    Args:
        parts: Values of each part from the bottom to the top, one for each step.
        marks: A further value of each step, drawn as a line across its column; empty for none.
    """
    size = stride(len(steps), _MAX_COLUMNS)
    groups = [range(first, min(first + size, len(steps))) for first in range(0, len(steps), size)]
    labels = [str(steps[group[0]]) for group in groups]
    means = {name: _means(values, groups) for name, values in parts.items()}
    marked = _means(marks, groups) if marks else []
    totals = [sum(values[number] for values in means.values()) for number in range(len(groups))]
    plot = _Plot(width=WIDE if wide else HALF, high=max([*totals, *marked], default=0.0), show=show)
    scale = plot.vertical()
    pitch = (plot.right - plot.left) / max(1, len(groups))
    width = min(36.0, pitch * 0.72)

    def at(number: int) -> float:
        return plot.left + (number + 0.5) * pitch

    plot.under(at, labels, x_title)
    for number, group in enumerate(groups):
        below = 0.0
        for name, values in means.items():
            top, bottom = scale(below + values[number]), scale(below)
            below += values[number]
            gap = 1.0 if bottom - top > _MIN_PART + 1 else 0.0
            if bottom - top > 0.05:
                x, height = at(number) - width / 2, bottom - top - gap
                plot.parts.append(
                    element("rect", x=x, y=top, width=width, height=height, class_=f"fill {colours[name]}")
                )
        last = f" to {steps[group[-1]]}, mean" if len(group) > 1 else ""
        said = [f"{name}: {show(values[number])}" for name, values in reversed(means.items()) if values[number]]
        if marked:
            y, half = scale(marked[number]), width / 2 + 3
            plot.parts.append(element("line", x1=at(number) - half, x2=at(number) + half, y1=y, y2=y, class_="mark"))
            said.append(f"{mark_name}: {show(marked[number])}")
        plot.parts.append(_hover(at(number), pitch, plot, f"{x_title} {labels[number]}{last}", said))
    averaged = f" Each column is the mean of {size} steps." if size > 1 else ""
    return Figure(
        title=title,
        caption=caption + averaged,
        svg=plot.picture(title),
        legend=[*((colours[name], name) for name in parts), *([("ink", mark_name)] if marked else [])],
        headers=(x_title, *parts, *([mark_name] if marked else [])),
        rows=[
            (label, *(show(values[n]) for values in means.values()), *([show(marked[n])] if marked else []))
            for n, label in enumerate(labels)
        ],
        wide=wide,
    )


def _means(values: Sequence[float], groups: Sequence[range]) -> list[float]:
    return [sum(values[number] for number in group) / len(group) for group in groups]
