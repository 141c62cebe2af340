"""One update of an engine, message by message: what each changes in the ranks, the engine and the open session."""

from __future__ import annotations

import logging
import threading
import time
from typing import assert_never

import msgspec

from weightcast.digest.definition import unequal
from weightcast.digest.table import Absent
from weightcast.errors import EngineFailure, Refused, error_words
from weightcast.receiver.engine_state import EngineState
from weightcast.receiver.executor import Executor
from weightcast.receiver.last_commit import LastCommit
from weightcast.receiver.open_session import (
    Announced,
    OpenSession,
    check_fetch,
    check_fetched,
    check_idle,
    check_message,
)
from weightcast.receiver.rank_answers import (
    Resident,
    ResidentFold,
    cause_of,
    costs,
    failures,
    suspects,
    union,
)
from weightcast.receiver.session_events import SessionEvents
from weightcast.wire.answers import Ack, Cause, RankAck
from weightcast.wire.bucket_sources import group_of
from weightcast.wire.fields import shown
from weightcast.wire.messages import (
    MAX_RUN,
    Abort,
    Announce,
    Close,
    Commit,
    Fetch,
    Join,
    Leave,
    Message,
    Open,
    Prepare,
    Readback,
    ReadChunk,
    Revert,
    TellBoxes,
)

log = logging.getLogger("weightcast.receiver")

_REASON_CHARS = 4096  # of ``Abort.reason``
_ALONE_S = 300.0  # for work of the ranks that belongs to no session, whose trainer sets no deadline
_UNOWNED_JOIN_S = 30.0  # a Join outside a session has no lease that could end it


class RanksFailed(Refused):
    """Ranks failed in a message; ``cause`` is the part that failed."""

    def __init__(self, message: str, cause: Cause) -> None:
        super().__init__(message)
        self.cause: Cause = cause


class SessionSteps:
    """Carries out messages, one at a time: the caller has the lock.

    Others look without the lock at the open ``session``, the update that was committed ``last`` until another begins,
    and whether ranks join a group for no session (``joining_unowned``).
    """

    def __init__(
        self, executor: Executor, engine: EngineState, events: SessionEvents, moved_on: threading.Condition
    ) -> None:
        """``moved_on`` is notified after each message, and has the caller's lock."""
        self.session: OpenSession | None = None
        self.last: LastCommit | None = None
        self.joining_unowned = False
        self._executor = executor
        self._engine = engine
        self._events = events
        self._moved_on = moved_on
        self._announced = Announced(())
        self._fold = ResidentFold()
        self._unannounced = Absent()

    def apply(self, message: Message) -> Ack:
        """Carries out a message of the trainer; raises what makes it fail."""
        match message:
            case Open():
                return self._begin(message)
            case Prepare():
                return self._prepare(message)
            case Join():
                return self._join(message)
            case Leave():
                return self._fan_out(message, timeout_s=30.0)
            case Announce():
                return self._take(message)
            case Close():
                return self._close(message)
            case Commit():
                return self._commit(message)
            case Revert():
                return self._revert(message)
            case Abort():
                return self._abort(message)
            case Readback():
                acks = self._ranks(message, timeout_s=_ALONE_S)
                resident = self._fold.fold(acks)
                return self._engine.ack(resident=resident.digests, mismatched=resident.broken)
            case Fetch():
                return self._fetch(message)
            case ReadChunk():
                raise Refused("chunks are read from /weightcast/chunk")
            case TellBoxes():
                raise Refused("boxes are read from /weightcast/boxes")
            case _:
                assert_never(message)

    def check(self, message: Message) -> None:
        """Refuses a message that does not belong to the open session, or the one that was committed last."""
        last = self.last
        check_message(message, self.session, "" if last is None else last.open.session)

    def holds(self, session: str) -> bool:
        """True while this session is open."""
        current = self.session
        return current is not None and current.open.session == session

    def part_of(self, message: Message) -> OpenSession | None:
        """The open session if the message names it: a stranger's message must not fail the update."""
        return self.session if self.holds(getattr(message, "session", "")) else None

    def _prepare(self, message: Prepare) -> Ack:
        """Works out the tables of the updates to come, on every rank and here.  No state changes."""
        check_idle(self.session)
        acks = self._ranks(message, timeout_s=_ALONE_S)
        specs, plan = self._engine.facts.specs, message.plan
        if self._announced.specs is not plan.specs:
            self._announced = Announced(plan.specs)
        for layout in plan.layouts:
            self._announced.check(layout)
        self._unannounced.names(specs, plan.specs)
        self._fold.fold(acks).digest_of(specs)
        return self._engine.ack(**costs(acks))

    def _begin(self, message: Open) -> Ack:
        self.check(message)
        if self.session is not None:  # it is being ended; this Open overtook its Abort
            self._abort(Abort(session=self.session.open.session, reason=self.session.ending))
        if why := self._engine.facts.no_pause.get(message.pause):
            raise Refused(f"pause {message.pause}: {why}")
        if self._engine.version is not None and message.version < self._engine.version and not message.allow_older:
            raise Refused(
                f"version {message.version} is older than {self._engine.version}, which the engine serves",
                hint="count up, or allow an older version on purpose (allow_older, --allow-older)",
            )
        last, self.last = self.last, None  # from here on ranks write into the set that a Revert needs
        acks = self._executor.apply(message, timeout_s=message.timeout_s)
        ranks, error = failures(acks)
        if all(ack.refused for ack in acks):
            self.last = last
        if ranks:
            self._executor.apply(Abort(session=message.session), timeout_s=message.timeout_s)
            raise Refused(error)
        session = OpenSession(open=message, deadline=time.monotonic() + message.lease_s)
        session.not_updated = union(ack.not_updated for ack in acks)
        self.session = session
        if self._engine.state == "serving":
            self._engine.state = "updating"
        if self._engine.facts.staging == "none":
            try:
                self._pause(session)
            except BaseException as error:
                self._abort(Abort(session=message.session, reason=f"could not pause: {error}"[:_REASON_CHARS]))
                raise
        return self._engine.ack(not_updated=session.not_updated)

    def _join(self, message: Join) -> Ack:
        self.check(message)
        if message.session:
            current = self.session
            assert current is not None
            current.groups.add(message.group)
            return self._fan_out(message, timeout_s=message.timeout_s)
        # No lease ends this Join, so it is short, and an Open interrupts it.
        message = msgspec.structs.replace(message, timeout_s=min(message.timeout_s, _UNOWNED_JOIN_S))
        self.joining_unowned = True
        try:
            return self._fan_out(message, timeout_s=message.timeout_s)
        finally:
            self.joining_unowned = False

    def _take(self, message: Announce) -> Ack:
        session = self._current(message)
        if session.buckets < message.layout.index <= session.buckets + MAX_RUN:
            session = self._await_turn(message)
        if session.fetched is not None:
            raise Refused(f"this session copies from {session.fetched.peer.url}, so no bucket may come")
        if session.closed or message.layout.index != session.buckets:
            raise Refused(f"bucket {message.layout.index} came where bucket {session.buckets} was due")
        if self._announced.specs is not session.open.specs:
            self._announced = Announced(session.open.specs)
        for layout in message.layouts:
            self._announced.check(layout)
        if (group := group_of(message.source)) is not None:
            session.groups.add(group)
        ack = self._fan_out(message, timeout_s=session.open.timeout_s)
        session.buckets += len(message.layouts)
        if session.buckets != len(session.open.bucket_sizes):
            return ack
        # After the last bucket the sender's next message would be Close: this saves it.
        closed = self._close(Close(session=message.session, buckets=session.buckets))
        return msgspec.structs.replace(
            closed,
            closed=True,
            load_s=ack.load_s + closed.load_s,
            verify_s=ack.verify_s + closed.verify_s,
            peak_extra_bytes=max(ack.peak_extra_bytes, closed.peak_extra_bytes),
            steps=(*ack.steps, *closed.steps),
        )

    def _fetch(self, message: Fetch) -> Ack:
        session = self._current(message)
        check_fetch(message, session)
        session.fetched = message
        acks = self._ranks(message, timeout_s=session.open.timeout_s)
        session.buckets += 1
        if session.buckets < max(ack.chunks for ack in acks):
            return self._engine.ack(**costs(acks))
        closed = self._close(Close(session=message.session, buckets=session.buckets))
        return msgspec.structs.replace(closed, closed=True)

    def _await_turn(self, message: Announce) -> OpenSession:
        """Waits for the buckets before these: a sender may have two runs on the way, and the later may come first."""
        session = self._current(message)

        def is_due() -> bool:
            over = self.session is not session or session.failed or session.ending
            return bool(over) or session.buckets >= message.layout.index

        self._moved_on.wait_for(is_due, session.open.timeout_s)
        return self._current(message)

    def _close(self, message: Close) -> Ack:
        session = self._current(message)
        if message.buckets != session.buckets:
            raise Refused(f"{session.buckets} buckets arrived, the trainer sent {message.buckets}")
        acks = self._ranks(message, timeout_s=session.open.timeout_s)
        session.closed = True
        written, specs = self._fold.fold(acks), self._engine.facts.specs
        session.written = written
        proves = session.open.verify != "none"
        return self._engine.ack(
            digest=written.digest_of(specs, self._unannounced.names(specs, session.open.specs)) if proves else "",
            received=written.digests if message.by_name else {},
            suspects=suspects(acks) if message.by_name else {},
            taken=tuple(ack.taken for ack in acks) if any(any(ack.taken) for ack in acks) else (),
            mismatched=written.broken,
            not_updated=session.not_updated,
            **costs(acks),
        )

    def _commit(self, message: Commit) -> Ack:
        last = self.last
        if last is not None and last.open.session == message.session:
            return last.answer_again(self._engine)
        session = self._current(message)
        if not session.closed:
            raise Refused("the session was not closed: send Close first, which says whether everything arrived")
        check_fetched(session, message.digest, self._engine.facts.specs)
        self._pause(session)
        try:
            acks = self._ranks(Commit(session=message.session), timeout_s=session.open.timeout_s)
        except Refused as error:
            # Some ranks may have switched, or one half way.  They go back now: the trainer may never send an Abort.
            self._abort(Abort(session=message.session, reason=error_words(error)[:_REASON_CHARS]))
            raise
        resident = self._fold.fold(acks)
        kept = resident.digest_of(self._engine.facts.specs) if message.digest else ""
        if kept != message.digest:
            text = f"what is kept differs from what was sent: {self._differing(session, resident)}"
            # With a second set of weights this brings the old version back.
            self._abort(Abort(session=message.session, reason=text[:_REASON_CHARS]))
            raise Refused(text)
        self.session = None
        before = self._engine.version, self._engine.digest, self._engine.state != "quarantined"
        self._engine.version = session.open.version
        self._engine.digest = None
        self._engine.message = ""
        self._engine.state = "serving"
        stall_s = self._go_on(session)
        self._engine.digest = kept or None
        answer = self._engine.ack(
            digest=kept,
            resident_ranks=len(acks),
            not_updated=session.not_updated,
            stall_s=stall_s,
            message=self._engine.held_back(),
            **costs(acks),
        )
        answer = self._events.with_steps(answer)
        version, digest, whole = before
        self.last = LastCommit(open=session.open, answer=answer, version=version, digest=digest, whole=whole)
        return answer

    def _go_on(self, session: OpenSession) -> float:
        """Drops caches and resumes with the new weights; returns the seconds of the pause.

        If the hooks fail, it raises their error, and the engine is quarantined with the new version.
        """
        try:
            self._engine.hooks.drop_caches()
            self._engine.hooks.set_version(session.open.version)
            return self._resume(session)
        except Exception as error:  # the engine's hooks are other people's code
            self.session = None
            self._engine.version = session.open.version
            self._engine.quarantine(
                f"version {session.open.version} is in, but not what depends on it: {error_words(error)}"
            )
            raise

    def _revert(self, message: Revert) -> Ack:
        last = self.last
        if last is None or last.open.session != message.session:
            raise Refused("this session is not the one that was committed last, or another has been opened since")
        return last.revert(message, self._executor, self._engine)

    def _differing(self, session: OpenSession, resident: Resident) -> str:
        """Names of tensors that are kept otherwise than they were received, in words."""
        written = {name: digest for name, digest in session.written.digests.items() if name in resident.digests}
        names = list(dict.fromkeys((*resident.broken, *unequal(written, resident.digests))))
        return shown(", ".join(names[:8])) or "its digest is not that of what the trainer sent"

    def _abort(self, message: Abort) -> Ack:
        session = self.session
        if session is None or session.open.session != message.session:
            return self._engine.ack()  # it has ended already
        self.session = None
        session.ending = reason = message.reason or session.failed or "no reason given"
        try:
            acks = self._executor.apply(message, timeout_s=session.open.timeout_s)
            ranks, words = failures(acks)
            if ranks or any(ack.touched for ack in acks):
                half = f"an update to version {session.open.version} ended half way: {reason}. {words}"
                self._engine.quarantine(half.strip())
                return self._engine.ack()
            if self._engine.state == "updating":
                self._engine.state = "serving"
            if self._engine.state == "serving":
                self._resume(session)
        except Exception as error:  # no session is open whose end would end the pause
            log.exception("the end of an update failed")
            self._engine.quarantine(error_words(error))
            return self._engine.ack(ok=False, error=error_words(error), failed_ranks=lost_ranks(error))
        return self._engine.ack()

    def _fan_out(self, message: Message, *, timeout_s: float) -> Ack:
        return self._engine.ack(**costs(self._ranks(message, timeout_s=timeout_s)))

    def _ranks(self, message: Message, *, timeout_s: float) -> list[RankAck]:
        acks = self._executor.apply(message, timeout_s=timeout_s)
        ranks, error = failures(acks)
        if ranks:
            cause = cause_of(acks)
            session = self.part_of(message)
            if session is not None:
                session.failed, session.cause = error, cause
            missing = sorted({name for ack in acks for name in ack.missing})
            shown = f": {', '.join(missing[:8])}" if missing else ""
            raise RanksFailed(error + shown, cause)
        return acks

    def _current(self, message: Announce | Close | Commit | Fetch) -> OpenSession:
        self.check(message)
        current = self.session
        assert current is not None
        if current.failed:
            # Two buckets in flight fail for the same reason, and get the same kind of error.
            raise RanksFailed(f"this session has failed: {current.failed}", current.cause)
        current.deadline = time.monotonic() + current.open.lease_s
        return current

    def _pause(self, session: OpenSession) -> None:
        if session.ending:
            raise Refused(f"this session is being ended: {session.ending}")
        if session.paused_at is None:
            session.paused_at = time.monotonic()  # before the call: a pause that fails half way must be resumed too
            try:
                self._engine.hooks.pause(session.open.pause, session.open.timeout_s)
                self._events.did("pause", session.paused_at)
            except Exception as error:
                session.failed = (
                    f"the engine did not pause: {error_words(error)}"  # or a second Commit would switch while it runs
                )
                raise

    def _resume(self, session: OpenSession) -> float:
        """Ends the session's pause; returns its seconds."""
        if session.paused_at is None:
            return 0.0
        began = time.monotonic()
        self._engine.hooks.resume()
        self._events.did("resume", began)
        return time.monotonic() - session.paused_at


def lost_ranks(error: Exception) -> tuple[int, ...]:
    """The ranks that an error says are gone."""
    return error.ranks if isinstance(error, EngineFailure) else ()
