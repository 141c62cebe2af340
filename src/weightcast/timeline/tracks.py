"""A timeline as data: one track for each process that took part in an update, with its spans on the head's clock."""

from __future__ import annotations

from typing import Literal

import msgspec

TrackSide = Literal["trainer", "engine"]
MESSAGES = "messages"  # rows of whole messages begin so; the spans of the other rows lie within them


class PhaseSpan(msgspec.Struct, frozen=True, array_like=True):
    """One phase on one track.

    Attributes:
        name: Phase, such as ``"gather"`` (``docs/watching/timeline.md`` lists them).
        start_us: Start in whole microseconds after the update began; readers of traces drop spans that overlap by the
            rounding of a fraction.
        us: Duration in microseconds.
        bucket: Index of the bucket; None if the phase is about no single bucket.
        flow: Number of a message: the head's span and the engine's span of one message have the same; else None.
        error: Why it failed; empty if it did not.
    """

    name: str
    start_us: int
    us: int
    bucket: int | None = None
    flow: int | None = None
    error: str = ""

    @property
    def end_us(self) -> int:
        return self.start_us + self.us


class Track(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a timeline.

    Attributes:
        side: ``trainer`` or ``engine``.
        process: ``"trainer"`` for all trainer ranks; the URL of an engine for its rows.
        name: ``"rank 0"``; ``"rank 0, wire"`` for the transport's threads; ``"server"`` for the engine's API server;
            ``"messages"`` for messages from the head, on both sides.
        clock_error_us: The spans may be wrong by so much, because the row's clock was aligned by round trips of
            messages; 0 if it shares the head's clock.
        spans: Phases in order of their start; no two of a row overlap.
        dropped: Number of spans that were left out, because the row has too many.
    """

    side: TrackSide
    process: str
    name: str
    clock_error_us: float = 0.0
    spans: tuple[PhaseSpan, ...] = ()
    dropped: int = 0


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """All tracks of one update.

    Attributes:
        began_unix_s: Time of day at which the update began, in seconds since 1970.
        tracks: The trainer's rows, then those of each engine.
        note: Why rows are missing; empty if none are.
    """

    began_unix_s: float = 0.0
    tracks: tuple[Track, ...] = ()
    note: str = ""

    @property
    def end_us(self) -> int:
        return max((span.end_us for track in self.tracks for span in track.spans), default=0)

    @property
    def clock_error_us(self) -> float:
        return max((track.clock_error_us for track in self.tracks), default=0.0)
