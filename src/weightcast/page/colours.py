"""Colours of the plots: one of eight slots for each series, the same slot for the same thing on every page.

The slots are CSS classes (``style.css``) with one value for light and one for dark pages.  Both sets keep neighbours
apart for readers with colour vision deficiency.
"""

from __future__ import annotations

from collections.abc import Iterable

SLOTS = 8
# Phases of an update, in their order; open and close of a session are grey, because they are bookkeeping.
PHASES = {
    "open": "grey",
    "wait": "faint",
    "gather": "s1",
    "fill": "s1",
    "pack": "s2",
    "send": "s3",
    "wire": "s3",
    "load": "s5",
    "verify": "s4",
    "check": "s4",
    "close": "grey",
    "commit": "s8",
    "pause": "s6",
    "switch": "s8",
    "resume": "s7",
    "stall": "s6",
    "abort": "bad",
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
    "close": "everything was sent",
    "commit": "all engines switch",
    "pause": "waits until nothing is generated",
    "switch": "new weights go live",
    "resume": "caches, version, generation goes on",
    "stall": "nothing is generated",
    "abort": "ends the session without a switch",
}


def of_phases(names: Iterable[str]) -> dict[str, str]:
    """Returns the colour of each phase; grey for one that this module does not know."""
    return {name: PHASES.get(name, "grey") for name in names}


def of_series(names: Iterable[str]) -> dict[str, str]:
    """Returns a colour for each series, in fixed order; series beyond the eighth are grey."""
    return {name: f"s{number + 1}" if number < SLOTS else "grey" for number, name in enumerate(names)}
