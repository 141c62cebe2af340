"""Records an engine's sessions, for ``/weightcast/status`` and for those that watch them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from weightcast.receiver.engine_state import EngineState
from weightcast.receiver.last_commit import LastCommit
from weightcast.receiver.open_session import OpenSession, owner
from weightcast.watch.events import Step, short
from weightcast.watch.listeners import GuardedCalls
from weightcast.watch.sessions import Answered, SessionOutcome, SessionRecord, SessionWatcher
from weightcast.wire.answers import Ack
from weightcast.wire.engine_info import EngineStatus, UpdateStatus
from weightcast.wire.fields import shown
from weightcast.wire.messages import Announce, Message, Open


class SessionEvents:
    """Records each session, and tells watchers what changed since it looked last.

    The session's lock guards it, except ``refused`` and ``status``.
    """

    def __init__(self, watchers: Iterable[SessionWatcher], state: EngineState) -> None:
        self._watchers = tuple(watchers)
        self._guard = GuardedCalls()
        self._lock = threading.RLock()  # of the record, and of calls to watchers
        self._engine = state
        self._open: OpenSession | None = None
        self._record: SessionRecord | None = None  # of the session that was opened last
        self._reverted = ""
        self._told: tuple[str, int | None, str] = state.state, state.version, ""
        self._since = time.monotonic()  # the engine serves its version
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
            message=engine.said,
            since_s=max(time.monotonic() - self._since, 0.0),
            update=self._last_update(),
        )

    def _last_update(self) -> UpdateStatus | None:
        """The update that runs now, or the last one; None before the first."""
        now = time.monotonic()
        with self._lock:
            record = self._record
            if record is None:
                return None
            until = now if record.ended is None else record.ended
            return UpdateStatus(
                version=record.version,
                outcome="running" if record.outcome is None else record.outcome,
                owner=shown(record.owner),
                seconds=max(until - record.began, 0.0),
                ago_s=None if record.ended is None else max(now - record.ended, 0.0),
                bytes=record.bytes,
                buckets=record.buckets,
                phases=record.phases(),
                stall_s=record.stall_s,
                reason=record.reason,
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
        """Tells of a message read at ``heard`` (monotonic); returns the answer with steps and time."""
        ack = msgspec.structs.replace(self.with_steps(ack), heard=heard, answered=time.monotonic())
        opened = session is not None and session is not self._open
        if opened:
            self.look(session, last, heard=heard)
        self.refused(message, ack, heard)
        if not opened:
            self.look(session, last, ack.error)
        return ack

    def refused(self, message: Message, ack: Ack, heard: float) -> None:
        """Tells of an answer alone, for a message that has changed nothing."""
        bucket = message if isinstance(message, Announce) else None
        answered = Answered(
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
        with self._lock:
            if self._record is not None and self._record.session == answered.session:
                self._record.add(answered)
            self._tell("an answer", lambda watcher: watcher.answered(self._record, answered))

    def look(
        self, session: OpenSession | None, last: LastCommit | None, error: str = "", *, heard: float | None = None
    ) -> None:
        """Tells what has changed; ``error`` is that of the message that changed it, and ``heard`` when it was read."""
        now = time.monotonic()
        with self._lock:
            before, self._open = self._open, session
            if before is not None and before is not session:
                self._ended(before, last, error, now)
            if last is not None and last.reverted is not None and self._reverted != last.open.session:
                self._reverted = last.open.session
                self._end(last.open, "reverted", last.reason, last.reverted.stall_s, now)
            if session is not None and session is not before:
                record = self._begin(session.open, now if heard is None else heard)
                self._tell("a session's beginning", lambda watcher: watcher.opened(record))
            state, version = self._engine.state, self._engine.version
            reason = shown(self._engine.message) if state == "quarantined" else ""
            if (state, version, reason) != self._told:
                if version != self._told[1]:
                    self._since = now
                self._told = state, version, reason
                changed = self._record, state, version, reason
                self._tell("a change of state", lambda watcher: watcher.state_changed(*changed))

    def _tell(self, at: str, tell: Callable[[SessionWatcher], None]) -> None:
        for watcher in self._watchers:
            self._guard.call(watcher, at, tell, watcher)

    def _begin(self, opened: Open, at: float) -> SessionRecord:
        self._record = SessionRecord(
            session=short(opened.session),
            version=opened.version,
            owner=owner(opened),
            traceparent=opened.traceparent,
            began=at,
            began_unix_s=time.time() - (time.monotonic() - at),
        )
        return self._record

    def _ended(self, session: OpenSession, last: LastCommit | None, error: str, now: float) -> None:
        opened = session.open
        if last is not None and last.open.session == opened.session:
            self._end(opened, "committed", "", last.answer.stall_s, now)
            return
        lost = self._engine.state == "quarantined"
        reason = (self._engine.message if lost else "") or session.ending or session.failed or error
        stall_s = 0.0 if session.paused_at is None else now - session.paused_at
        self._end(opened, "quarantined" if lost else "aborted", reason, stall_s, now)

    def _end(self, opened: Open, outcome: SessionOutcome, reason: str, stall_s: float, now: float) -> None:
        record = self._record
        if record is None or record.session != short(opened.session):  # another one was opened since its commit
            record = self._begin(opened, now)
        record.outcome, record.reason, record.serves = outcome, shown(reason), self._engine.version
        record.stall_s, record.ended = stall_s, now
        self._tell("a session's end", lambda watcher: watcher.ended(record))
