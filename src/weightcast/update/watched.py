"""Events and log lines of a connect and of an update on every trainer rank, and what each rank tells the head."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self, TypeVar

import msgspec

from weightcast.comm.trainer_group import TrainerGroup
from weightcast.errors import WeightcastError
from weightcast.report import UpdateReport
from weightcast.timeline.tracks import Timeline
from weightcast.transports.health import TargetHealth
from weightcast.watch.events import TargetNow, TargetsChanged, UpdateEnded, UpdateOutcome, UpdateStarted
from weightcast.watch.listeners import Events
from weightcast.watch.recording import RankEnd, Recording

_Result = TypeVar("_Result")
Health = Callable[[], Sequence[TargetHealth]]
log = logging.getLogger("weightcast.update")
_LONG_S = 2.0


_rank_end = msgspec.json.Decoder(RankEnd)


def gather_ends(
    group: TrainerGroup, recording: Recording, extra_bytes: int, *, heard: float, asked_at: float
) -> tuple[int, Callable[[], Timeline]] | None:
    """Gathers what every rank has to tell at the end of an update.  Collective.

    Returns the most extra bytes of any rank, and a function that makes the timeline; None on ranks other than the head.

    ``heard`` is when this rank heard that the update is over, ``asked_at`` the head's time before it told them.
    """
    gathered = group.gather_bytes(msgspec.json.encode(recording.end_of_rank(extra_bytes, heard)))
    told_at = time.monotonic()
    if gathered is None:
        return None
    ends = [_rank_end.decode(end) for end in gathered]
    timeline = partial(recording.timeline, ends[1:], asked_at=asked_at, told_at=told_at)
    return max(end.extra_bytes for end in ends), timeline


class WatchedUpdate:
    """One update, as ``UpdateStarted``, ``TargetsChanged`` and ``UpdateEnded`` tell of it."""

    def __init__(
        self,
        events: Events,
        *,
        version: int,
        transport: str,
        targets: Sequence[str],
        health: Health,
        report: Callable[[], UpdateReport | None],
    ) -> None:
        """Emits ``UpdateStarted``.

        Args:
            targets: Those that are to take part; empty on ranks other than the head.
            report: Reports the update as it is now, for an error that has no report; None on other ranks.
        """
        self._events, self._health, self._report = events, health, report
        self._version, self._transport = version, transport
        events.emit(
            UpdateStarted(
                version=version,
                transport=transport,
                targets=tuple(targets),
                rank=events.rank,
                at=time.monotonic(),
                time_s=time.time(),
            )
        )

    def run(self, step: Callable[[], _Result]) -> _Result:
        """Runs a step of the update.  A report, or an error, ends it."""
        try:
            result = step()
        except BaseException as error:
            report = None
            if isinstance(error, WeightcastError):
                if error.report is None and (now := self._report()) is not None:
                    error.reported(now)
                report = error.report
            self._end("failed", report, error)
            raise
        if isinstance(result, UpdateReport):
            self._end("succeeded" if result.ok else "partial", result)
        return result

    def _end(self, outcome: UpdateOutcome, report: UpdateReport | None, error: BaseException | None = None) -> None:
        tell_targets(self._events, self._health)
        self._events.emit(
            UpdateEnded(
                version=self._version if report is None else report.version,
                transport=self._transport if report is None else report.transport,
                outcome=outcome,
                report=report,
                error="" if error is None else str(error) or repr(error),
                error_kind="" if error is None else type(error).__name__,
                rank=self._events.rank,
                at=time.monotonic(),
            )
        )


def tell_targets(events: Events, health: Health) -> None:
    """Emits ``TargetsChanged``, on the head."""
    if events.rank:
        return
    targets = tuple(
        TargetNow(url=row.url, state=row.state, active=row.active, version=row.version, reason=row.reason)
        for row in health()
    )
    events.emit(TargetsChanged(targets=targets, at=time.monotonic()))


class Connecting:
    """One call of ``connect``.  It writes a line after two seconds, and again each time that the wait has doubled."""

    def __init__(self, *, long_s: float = _LONG_S) -> None:
        self._long_s = long_s
        self._doing = "the model's tensors are looked at"
        self._done = threading.Event()

    def now(self, doing: str) -> None:
        """Says what begins, as a sentence without its full stop."""
        self._doing = doing

    def silence(self) -> None:
        """Leaves the lines to another trainer rank."""
        self._done.set()

    def __enter__(self) -> Self:
        try:
            threading.Thread(target=self._watch, name="weightcast-connecting", daemon=True).start()
        except BaseException:  # an interrupt, after which nobody would leave the block
            self._done.set()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def _watch(self) -> None:
        began, wait_s = time.monotonic(), self._long_s
        while not self._done.wait(wait_s):
            taken_s = time.monotonic() - began
            log.info("connect has taken %.0f s so far: %s", taken_s, self._doing)
            wait_s = taken_s
