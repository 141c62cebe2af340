"""The update that runs now, or the last one, for ``/weightcast/status``."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from weightcast.watch.events import Answered, Event, SessionEnded, SessionOpened, StateChanged
from weightcast.wire.engine_info import Outcome, UpdateStatus
from weightcast.wire.fields import shown


@dataclass(slots=True, kw_only=True)
class _Update:
    session: str
    version: int
    owner: str
    began: float
    ended: float | None = None
    outcome: Outcome = "running"
    reason: str = ""
    bytes: int = 0
    buckets: int = 0
    stall_s: float = 0.0
    by_rank: dict[tuple[str, int | None], float] = field(default_factory=dict[tuple[str, "int | None"], float])

    def status(self, now: float) -> UpdateStatus:
        phases: dict[str, float] = {}
        for (phase, _), seconds in self.by_rank.items():
            phases[phase] = max(phases.get(phase, 0.0), seconds)
        return UpdateStatus(
            version=self.version,
            outcome=self.outcome,
            owner=self.owner,
            seconds=max((self.ended if self.ended is not None else now) - self.began, 0.0),
            ago_s=None if self.ended is None else max(now - self.ended, 0.0),
            bytes=self.bytes,
            buckets=self.buckets,
            phases=phases,
            stall_s=self.stall_s,
            reason=self.reason,
        )


class LastUpdate:
    """A listener that remembers one update.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._update: _Update | None = None
        self._since = time.monotonic()
        self._version: int | None = None

    def __call__(self, event: Event) -> None:
        """Takes an event of this engine."""
        with self._lock:
            match event:
                case SessionOpened():
                    self._update = _Update(
                        session=event.session, version=event.version, owner=shown(event.owner), began=event.at
                    )
                case Answered():
                    self._add(event)
                case SessionEnded():
                    self._end(event)
                case StateChanged():
                    if event.version != self._version:
                        self._version, self._since = event.version, event.at
                case _:
                    pass

    @property
    def since_s(self) -> float:
        """Seconds since the engine began to serve its version."""
        with self._lock:
            return max(time.monotonic() - self._since, 0.0)

    def status(self) -> UpdateStatus | None:
        """The update that runs now, or the last one; None before the first."""
        with self._lock:
            return None if self._update is None else self._update.status(time.monotonic())

    def _add(self, event: Answered) -> None:
        update = self._update
        if update is None or event.session != update.session:
            return
        if event.ok and event.bucket is not None:
            update.bytes += event.bytes
            update.buckets += 1
        for step in event.steps:
            key = step.phase, step.rank
            update.by_rank[key] = update.by_rank.get(key, 0.0) + step.seconds

    def _end(self, event: SessionEnded) -> None:
        update = self._update
        if update is not None and event.session == update.session:
            update.outcome, update.reason, update.stall_s = event.outcome, shown(event.reason), event.stall_s
            update.ended = event.at
