"""Aligns the clock of another process by round trips of messages, with a bound on the error.

A message left here at ``began``, arrived there at ``heard``, was answered there at ``answered``, and the answer was
here at ``ended``.  Whatever the network did, ``began <= heard + offset`` and ``answered + offset <= ended``.  So each
round trip bounds the offset from both sides, and all of them together bound it by their intersection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """One message and its answer, in seconds; ``heard`` and ``answered`` are times of the other side's clock."""

    began: float
    heard: float
    answered: float
    ended: float

    @property
    def low(self) -> float:
        return self.began - self.heard

    @property
    def high(self) -> float:
        return self.ended - self.answered


@dataclass(frozen=True, slots=True)
class Alignment:
    """A way from another clock: add ``offset_s``.  The sum may be wrong by ``error_s``, 0 if both use one clock."""

    offset_s: float = 0.0
    error_s: float = 0.0

    def after(self, other: Alignment) -> Alignment:
        """Returns the way that takes ``other`` first: from a third clock to the other one, and then this one."""
        return Alignment(self.offset_s + other.offset_s, self.error_s + other.error_s)


def align(trips: Sequence[RoundTrip]) -> Alignment | None:
    """Returns the alignment that all round trips allow; None without a round trip.

    Monotonic clocks count from the start of the host.  If an offset of zero is possible, both sides are on one host:
    two hosts do not start within the same fraction of a millisecond.
    """
    if not trips:
        return None
    low, high = max(trip.low for trip in trips), min(trip.high for trip in trips)
    if low <= 0.0 <= high:
        return Alignment()
    if low <= high:
        return Alignment((low + high) / 2, (high - low) / 2)
    # The clocks drifted apart during the update.  The shortest trip counts; the others say by how much it can be off.
    best = min(trips, key=lambda trip: trip.high - trip.low)
    middle = (best.low + best.high) / 2
    drift = max(max(trip.low - middle, middle - trip.high, 0.0) for trip in trips)
    return Alignment(middle, (best.high - best.low) / 2 + drift)
