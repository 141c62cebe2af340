"""Events of one engine's sessions, told after each message, and the last update for ``/weightcast/status``."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import msgspec

from weightcast.receiver.engine_state import EngineState
from weightcast.receiver.last_commit import LastCommit
from weightcast.receiver.open_session import OpenSession, owner
from weightcast.watch.events import (
    Answered,
    EngineEvent,
    Event,
    SessionEnded,
    SessionOpened,
    SessionOutcome,
    StateChanged,
    Step,
    short,
)
from weightcast.watch.listeners import Events
from weightcast.wire.answers import Ack
from weightcast.wire.engine_info import EngineStatus, UpdateStatus
from weightcast.wire.fields import shown
from weightcast.wire.messages import Announce, Message


class SessionEvents:
    """Emits what changed since it looked last.  The session's lock guards it, except ``refused``."""

    def __init__(self, events: Events, state: EngineState) -> None:
        self._last_update = LastUpdate()
        self._events = events
        self._engine = state
        self._open: OpenSession | None = None
        self._reverted = ""
        self._told: tuple[str, int | None, str] = state.state, state.version, ""
        self._steps: list[Step] = []
        self.look(None, None)

    def status(self) -> EngineStatus:
        """The engine's state and its last update, in short."""
        engine = self._engine
        return EngineStatus(
            engine=engine.facts.engine,
            model=engine.facts.model,
            state=engine.state,
            version=engine.version,
            digest=engine.digest,
            paused=engine.hooks.paused,
            message=engine.message or engine.facts.note,
            since_s=self._last_update.since_s,
            update=self._last_update.status(),
        )

    def did(self, phase: str, began: float) -> None:
        """Notes a step of the engine's server that ends now; the next answer tells of it."""
        self._steps.append(Step(phase, None, began, time.monotonic()))

    def with_steps(self, ack: Ack) -> Ack:
        """Returns the answer with the server's own steps since the last answer."""
        if not self._steps:
            return ack
        steps, self._steps = (*ack.steps, *self._steps), []
        return msgspec.structs.replace(ack, steps=steps)

    def answered(
        self, message: Message, ack: Ack, heard: float, session: OpenSession | None, last: LastCommit | None
    ) -> Ack:
        """Emits the events of a message read at ``heard`` (monotonic); returns the answer with steps and time."""
        ack = msgspec.structs.replace(self.with_steps(ack), heard=heard, answered=time.monotonic())
        opened = session is not None and session is not self._open
        if opened:
            self.look(session, last)
        self.refused(message, ack, heard)
        if not opened:
            self.look(session, last, ack.error)
        return ack

    def refused(self, message: Message, ack: Ack, heard: float) -> None:
        """Emits ``Answered`` alone, for a message that has changed nothing."""
        bucket = message if isinstance(message, Announce) else None
        self._emit(
            Answered(
                session=short(getattr(message, "session", "")),
                message="bucket" if bucket is not None else type(message).__name__.lower(),
                bucket=bucket.layout.index if bucket is not None else None,
                transport="" if bucket is None else bucket.source.transport,
                bytes=bucket.layout.size_bytes if bucket is not None else 0,
                began=heard,
                ended=ack.answered if ack.answered is not None else time.monotonic(),
                ok=ack.ok,
                error=shown(ack.error),
                steps=ack.steps,
            )
        )

    def look(self, session: OpenSession | None, last: LastCommit | None, error: str = "") -> None:
        """Emits what has changed; ``error`` is that of the message that changed it."""
        now = time.monotonic()
        before, self._open = self._open, session
        if before is not None and before is not session:
            self._ended(before, last, error, now)
        if last is not None and last.reverted is not None and self._reverted != last.open.session:
            self._reverted = last.open.session
            self._emit_end(last.open.session, last.open.version, "reverted", last.reason, last.reverted.stall_s, now)
        if session is not None and session is not before:
            self._emit(
                SessionOpened(
                    session=short(session.open.session),
                    version=session.open.version,
                    owner=owner(session.open),
                    traceparent=session.open.traceparent,
                    at=now,
                    time_s=time.time(),
                )
            )
        state = self._engine.state
        told = state, self._engine.version, shown(self._engine.message) if state == "quarantined" else ""
        if told != self._told:
            self._told = told
            self._emit(StateChanged(state=told[0], version=told[1], reason=told[2], at=now))

    def _emit(self, event: EngineEvent) -> None:
        self._last_update(event)
        self._events.emit(event)

    def _ended(self, session: OpenSession, last: LastCommit | None, error: str, now: float) -> None:
        opened = session.open
        if last is not None and last.open.session == opened.session:
            self._emit_end(opened.session, opened.version, "committed", "", last.answer.stall_s, now)
            return
        lost = self._engine.state == "quarantined"
        reason = (self._engine.message if lost else "") or session.ending or session.failed or error
        stall_s = 0.0 if session.paused_at is None else now - session.paused_at
        self._emit_end(opened.session, opened.version, "quarantined" if lost else "aborted", reason, stall_s, now)

    def _emit_end(
        self, session: str, version: int, outcome: SessionOutcome, reason: str, stall_s: float, now: float
    ) -> None:
        self._emit(
            SessionEnded(
                session=short(session),
                version=version,
                serves=self._engine.version,
                outcome=outcome,
                reason=shown(reason),
                stall_s=stall_s,
                at=now,
            )
        )


@dataclass(slots=True, kw_only=True)
class _Update:
    session: str
    began: float
    told: UpdateStatus  # without times and phases
    ended: float | None = None
    by_rank: dict[tuple[str, int | None], float] = field(default_factory=dict[tuple[str, "int | None"], float])

    def status(self, now: float) -> UpdateStatus:
        phases: dict[str, float] = {}
        for (phase, _), seconds in self.by_rank.items():
            phases[phase] = max(phases.get(phase, 0.0), seconds)
        return msgspec.structs.replace(
            self.told,
            seconds=max((self.ended if self.ended is not None else now) - self.began, 0.0),
            ago_s=None if self.ended is None else max(now - self.ended, 0.0),
            phases=phases,
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
                    told = UpdateStatus(version=event.version, outcome="running", owner=shown(event.owner))
                    self._update = _Update(session=event.session, began=event.at, told=told)
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
            told = update.told
            update.told = msgspec.structs.replace(told, bytes=told.bytes + event.bytes, buckets=told.buckets + 1)
        for step in event.steps:
            key = step.phase, step.rank
            update.by_rank[key] = update.by_rank.get(key, 0.0) + step.seconds

    def _end(self, event: SessionEnded) -> None:
        update = self._update
        if update is not None and event.session == update.session:
            update.told = msgspec.structs.replace(
                update.told, outcome=event.outcome, reason=shown(event.reason), stall_s=event.stall_s
            )
            update.ended = event.at
