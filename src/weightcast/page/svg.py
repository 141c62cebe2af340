"""SVG elements, linear scales, tick marks, and colours: one of eight slots for each series, the same on every page.

The slots are CSS classes (``style.css``) with one value for light and one for dark pages.  Both sets keep neighbours
apart for readers with colour vision deficiency.  Phases of an update have more slots, ``p1`` to ``p7``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

SLOTS = 8
# Phases of an update, in their order, each with a colour of its own.
PHASES = {
    "open": "p1",
    "wait": "faint",
    "gather": "s1",
    "fill": "p2",
    "pack": "s2",
    "send": "s3",
    "wire": "p3",
    "load": "s5",
    "verify": "s4",
    "check": "p4",
    "commit": "s8",
    "recover": "bad",
    "other": "p5",
    "pause": "s6",
    "switch": "p6",
    "resume": "s7",
    "stall": "p7",
}
MEANINGS = {
    "open": "sessions and groups",
    "wait": "waits for another process",
    "gather": "shards of all trainer ranks into a bucket",
    "fill": "weights of one trainer rank into a bucket",
    "pack": "digests of what is sent",
    "send": "waits for the transport and the engines",
    "wire": "bytes on their way",
    "load": "copies into parameters or staging",
    "verify": "digests of what arrived and of what is kept",
    "check": "digests compared",
    "commit": "all engines switch",
    "recover": "ends a failed attempt and begins another one",
    "other": "everything else",
    "pause": "waits until nothing is generated",
    "switch": "new weights go live",
    "resume": "caches, version, generation goes on",
    "stall": "nothing is generated",
}


def element(tag: str, *children: str, **attributes: object) -> str:
    """Returns an element.  ``_`` in an attribute's name becomes ``-``; ``class_`` and ``for_`` lose theirs.

    Attribute values are escaped; children are markup already (``text`` makes some).
    """
    words = [tag]
    for name, value in attributes.items():
        if value is None:
            continue
        shown = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
        words.append(f'{name.rstrip("_").replace("_", "-")}="{escape(shown)}"')
    return f"<{' '.join(words)}>{''.join(children)}</{tag}>"


def text(words: object, **attributes: object) -> str:
    """Returns a text element."""
    return element("text", escape(str(words)), **attributes)


def picture(width: float, height: float, parts: Sequence[str], label: str) -> str:
    """Returns a whole picture, which keeps its proportions at any width; ``label`` is for screen readers."""
    return element("svg", *parts, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label)


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map of values to pixels; ``end`` may be smaller than ``start``."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Returns the pixel of a value."""
        span = self.high - self.low
        return self.start + (value - self.low) / span * (self.end - self.start) if span else self.start


def ticks(high: float, count: int = 4) -> list[float]:
    """Returns round values from 0 to at least ``high``, about ``count`` steps apart."""
    if not math.isfinite(high) or high <= 0:
        return [0.0, 1.0]
    rough = high / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [step * number for number in range(math.ceil(high / step - 1e-9) + 1)]


def stride(count: int, limit: int) -> int:
    """Returns the smallest round step with which ``count`` labels become at most ``limit``."""
    return next(
        step for power in range(12) for step in (10**power, 2 * 10**power, 5 * 10**power) if count <= step * limit
    )


def bar(x: float, y: float, width: float, height: float, *, radius: float = 3.0, **attributes: object) -> str:
    """Returns a horizontal bar from a baseline at ``x``: square there and rounded at its end."""
    r = max(0.0, min(radius, width, height / 2))
    path = (
        f"M{x:.2f} {y:.2f}h{width - r:.2f}a{r:.2f} {r:.2f} 0 0 1 {r:.2f} {r:.2f}"
        f"v{height - 2 * r:.2f}a{r:.2f} {r:.2f} 0 0 1 {-r:.2f} {r:.2f}h{r - width:.2f}z"
    )
    return element("path", d=path, **attributes)


def of_phases(names: Iterable[str]) -> dict[str, str]:
    """Returns the colour of each phase; grey for one that this module does not know."""
    return {name: PHASES.get(name, "grey") for name in names}


def of_series(names: Iterable[str]) -> dict[str, str]:
    """Returns a colour for each series, in fixed order; series beyond the eighth are grey."""
    return {name: f"s{number + 1}" if number < SLOTS else "grey" for number, name in enumerate(names)}
