"""Numbers with their units, as short as a plot needs them."""

from __future__ import annotations


def seconds(value: float) -> str:
    """Formats ``0.01234`` as ``"12.3 ms"`` and ``90.0`` as ``"90 s"``."""
    if value == 0:
        return "0"
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 0.9995 or unit == "µs":
            return f"{digits(value * factor)} {unit}"
    raise AssertionError("the last unit takes every value")


def digits(value: float) -> str:
    """Formats a number with three digits: ``1.84``, ``12.3``, ``640``, ``12,300``."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    shown = f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def size(value: float) -> str:
    """Formats bytes with decimal units, as rates and links have them: ``"15.3 GB"``."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor * 0.9995:
            return f"{digits(value / factor)} {unit}"
    return f"{value:.0f} B"
