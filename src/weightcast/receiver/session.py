"""The sessions of one engine: the trainer opens one for each update, one at a time.

A message goes from here to the executor, and from there to every rank.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import assert_never

import msgspec

from weightcast.digest.definition import unequal
from weightcast.digest.table import Absent
from weightcast.errors import EngineFailure, Refused, WeightcastError, error_words
from weightcast.receiver.engine_state import EngineFacts, EngineHooks, EngineState
from weightcast.receiver.executor import Executor
from weightcast.receiver.last_commit import LastCommit
from weightcast.receiver.open_session import (
    Announced,
    OpenSession,
    check_fetch,
    check_fetched,
    check_idle,
    check_message,
    check_readable,
    owner,
    same_trainer,
)
from weightcast.receiver.rank_answers import (
    Resident,
    ResidentFold,
    cause_of,
    check_all,
    costs,
    failures,
    suspects,
    union,
)
from weightcast.receiver.session_events import SessionEvents
from weightcast.runtime.gc_pause import gc_paused
from weightcast.watch.logs import SessionLog
from weightcast.watch.sessions import SessionWatcher
from weightcast.wire.answers import Ack, Cause, RankAck, State
from weightcast.wire.bucket_sources import group_of
from weightcast.wire.engine_info import EngineInfo, EngineStatus
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
from weightcast.wire.pieces import WantedBoxes

log = logging.getLogger("weightcast.receiver")

_WATCH_S = 0.2
_REASON_CHARS = 4096  # of ``Abort.reason``
_READ_CHUNK_S = 30.0
_ALONE_S = 300.0  # for work of the ranks that belongs to no session, whose trainer sets no deadline
_UNOWNED_JOIN_S = 30.0  # a Join outside a session has no lease that could end it


class _RanksFailed(Refused):
    """Ranks failed in a message; ``cause`` is the part that failed."""

    def __init__(self, message: str, cause: Cause) -> None:
        super().__init__(message)
        self.cause: Cause = cause


# Over 350 lines: one lock guards the open session, and every step of a session changes it.
class SessionHandler:
    """Answers the trainer's messages for one engine.  Thread-safe."""

    def __init__(
        self,
        executor: Executor,
        hooks: EngineHooks,
        facts: EngineFacts,
        *,
        version: int | None = 0,
        watchers: Sequence[SessionWatcher] = (),
    ) -> None:
        self.executor = executor  # all ranks, also for work outside a session
        self._engine = EngineState(hooks, facts, version=version, tp_size=executor.tp_size)
        self._events = SessionEvents((SessionLog(), *watchers), self._engine)
        self._session: OpenSession | None = None
        self._last: LastCommit | None = None
        self._joining_unowned = False
        self._newest = ""  # session of the Open that came last, which may still wait for the lock
        self._announced = Announced(())
        self._fold = ResidentFold()
        self._unannounced = Absent()
        # One message at a time.  An abort or a lease that ends interrupts the ranks first, so that it need not wait.
        self._busy = threading.RLock()
        self._moved_on = threading.Condition(self._busy)
        self._watch = threading.Thread(target=self._watch_deadlines, name="weightcast-lease", daemon=True)
        self._stopped = threading.Event()
        self._watch.start()

    @property
    def state(self) -> State:
        """Serving, updating or quarantined."""
        return self._engine.state

    def info(self) -> EngineInfo:
        """The engine's description of itself, with its state and version."""
        session = self._session
        return self._engine.info(None if session is None else owner(session.open))

    def status(self) -> EngineStatus:
        """The engine's state and its last update, in short."""
        return self._events.status()

    def held_back(self) -> str:
        """Says why an engine with new weights answers no request; empty if it does."""
        if asleep := self._engine.asleep:
            return f"{asleep}; it has the new weights, and answers no request until all its memory is awake"
        if not self._engine.hooks.paused:
            return ""
        return "it was paused before this update and still is: it answers no request until it is resumed"

    def apply(self, message: Message) -> Ack:
        """Carries out a message.  An answer with ``ok=False`` says why it failed and which state is left."""
        heard = time.monotonic()
        if isinstance(message, Abort):
            self._interrupt_if_current(message.session, message.reason or "the trainer gave up")
        if isinstance(message, Open):
            self._end_older(message)
        try:
            self._check(message)  # before the lock: a stranger's message must not delay the session's own
        except Refused as error:
            refused = self._engine.ack(ok=False, error=error_words(error))
            self._events.refused(message, refused, heard)
            return refused
        if isinstance(message, Open):
            self._newest = message.session
            if self._joining_unowned:
                self.executor.interrupt("an update begins")
        with self._busy, gc_paused():
            try:
                ack = self._attempt(message)
            finally:
                self._moved_on.notify_all()
            return self._events.answered(message, ack, heard, self._session, self._last)

    def _attempt(self, message: Message) -> Ack:
        try:
            return self._apply(message)
        except _RanksFailed as error:
            return self._engine.ack(ok=False, error=error_words(error), cause=error.cause)
        except Refused as error:
            return self._engine.ack(ok=False, error=error_words(error))
        except Exception as error:  # the engine's hooks are other people's code
            if not isinstance(error, WeightcastError):
                log.exception("a weight message failed")
            # Without a rank the update cannot succeed, whichever message showed that it is gone.
            session = self._session if _lost_ranks(error) else self._part_of(message)
            if session is not None:
                session.failed = error_words(error)
            if _lost_ranks(error):
                self._engine.quarantine(error_words(error))
            return self._engine.ack(ok=False, error=error_words(error), failed_ranks=_lost_ranks(error))

    @contextmanager
    def between_updates(self) -> Generator[None]:
        """Keeps updates out while something else moves the weights (sleep, for one); ``Refused`` during one."""
        check_idle(self._session)
        with self._busy:
            check_idle(self._session)
            self._last = None  # the second set of weights may be freed
            yield

    def discarded(self, why: str) -> None:
        """Quarantines an engine that has dropped its weights, until the next full update.  The caller pauses it.

        Called inside ``between_updates``; ``why`` says what happened and what to do.
        """
        self._engine.discard(why)
        self._events.look(self._session, self._last)

    def ranks_lost(self, error: EngineFailure) -> None:
        """Quarantines an engine whose ranks ended between two messages, once no message is being carried out."""
        with self._busy:
            if self._engine.state == "quarantined":
                return
            if self._session is not None:
                self._session.failed = error_words(error)
            self._engine.quarantine(error_words(error))
            self._events.look(self._session, self._last)

    def replaced(self, why: str) -> None:
        """Lets an engine serve whole weights that came past this session, at no known version.

        Called inside ``between_updates``; ``why`` says how they came.
        """
        self._engine.replace(why)
        self._events.look(self._session, self._last)

    def holds(self, session: str) -> bool:
        """True while this session is open."""
        current = self._session
        return current is not None and current.open.session == session

    def read_chunk(self, message: ReadChunk) -> bytes:
        """Returns a chunk of one rank's live weights, while the engine generates.  An update waits for one chunk.

        ``Refused`` says that the engine serves another version or a rank refused, ``EngineFailure`` that one is gone.
        """
        # An update that waits for its trainer keeps the lock; the other engine must not wait as long.
        if not self._busy.acquire(timeout=_READ_CHUNK_S):
            raise Refused(f"a message of an update has kept this engine busy for {_READ_CHUNK_S:g} s", hint="try again")
        try:
            writing = self._session is not None and self._engine.facts.staging == "none"
            check_readable(message, self._engine, self.executor.tp_size, writing=writing)
            acks = self.executor.apply(message, timeout_s=_READ_CHUNK_S)
        finally:
            self._busy.release()
        check_all(acks)
        return acks[message.rank].part

    def boxes(self) -> WantedBoxes:
        """The boxes of the source tensors that ranks want; raises as ``read_chunk``."""
        with self._busy:
            acks = self.executor.apply(TellBoxes(), timeout_s=_READ_CHUNK_S)
        check_all(acks)
        return WantedBoxes(kinds=tuple(dict.fromkeys(ack.part for ack in acks)))

    def lease_lost(self, session: str) -> None:
        """Ends the session of a trainer whose connection is gone; the old version is kept or restored."""
        self._end_if_current(session, "the trainer's connection was lost")

    def close(self) -> None:
        """Stops the thread that watches the lease."""
        self._stopped.set()

    def _apply(self, message: Message) -> Ack:
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

    def _prepare(self, message: Prepare) -> Ack:
        """Works out the tables of the updates to come, on every rank and here.  No state changes."""
        check_idle(self._session)
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
        if message.session != self._newest and same_trainer(message.session, self._newest):
            # The lock is not fair, and the trainer may have ended while this Open waited for it.
            raise Refused("its trainer has begun another update since")
        self._end_older(message)  # it may have been opened since this message came
        self._check(message)
        if self._session is not None:  # it is being ended; this Open overtook its Abort
            self._abort(Abort(session=self._session.open.session, reason=self._session.ending))
        if why := self._engine.facts.no_pause.get(message.pause):
            raise Refused(f"pause {message.pause}: {why}")
        if self._engine.version is not None and message.version < self._engine.version and not message.allow_older:
            raise Refused(
                f"version {message.version} is older than {self._engine.version}, which the engine serves",
                hint="count up, or allow an older version on purpose (allow_older, --allow-older)",
            )
        last, self._last = self._last, None  # from here on ranks write into the set that a Revert needs
        acks = self.executor.apply(message, timeout_s=message.timeout_s)
        ranks, error = failures(acks)
        if all(ack.refused for ack in acks):
            self._last = last
        if ranks:
            self.executor.apply(Abort(session=message.session), timeout_s=message.timeout_s)
            raise Refused(error)
        session = OpenSession(open=message, deadline=time.monotonic() + message.lease_s)
        session.not_updated = union(ack.not_updated for ack in acks)
        self._session = session
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
        self._check(message)
        if message.session:
            current = self._session
            assert current is not None
            current.groups.add(message.group)
            return self._fan_out(message, timeout_s=message.timeout_s)
        # No lease ends this Join, so it is short, and an Open interrupts it.
        message = msgspec.structs.replace(message, timeout_s=min(message.timeout_s, _UNOWNED_JOIN_S))
        self._joining_unowned = True
        try:
            return self._fan_out(message, timeout_s=message.timeout_s)
        finally:
            self._joining_unowned = False

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
            over = self._session is not session or session.failed or session.ending
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
        last = self._last
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
        self._session = None
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
            message=self.held_back(),
            **costs(acks),
        )
        answer = self._events.with_steps(answer)
        version, digest, whole = before
        self._last = LastCommit(open=session.open, answer=answer, version=version, digest=digest, whole=whole)
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
            self._session = None
            self._engine.version = session.open.version
            self._engine.quarantine(
                f"version {session.open.version} is in, but not what depends on it: {error_words(error)}"
            )
            raise

    def _revert(self, message: Revert) -> Ack:
        last = self._last
        if last is None or last.open.session != message.session:
            raise Refused("this session is not the one that was committed last, or another has been opened since")
        return last.revert(message, self.executor, self._engine)

    def _differing(self, session: OpenSession, resident: Resident) -> str:
        """Names of tensors that are kept otherwise than they were received, in words."""
        written = {name: digest for name, digest in session.written.digests.items() if name in resident.digests}
        names = list(dict.fromkeys((*resident.broken, *unequal(written, resident.digests))))
        return shown(", ".join(names[:8])) or "its digest is not that of what the trainer sent"

    def _abort(self, message: Abort) -> Ack:
        session = self._session
        if session is None or session.open.session != message.session:
            return self._engine.ack()  # it has ended already
        self._session = None
        session.ending = reason = message.reason or session.failed or "no reason given"
        try:
            acks = self.executor.apply(message, timeout_s=session.open.timeout_s)
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
            return self._engine.ack(ok=False, error=error_words(error), failed_ranks=_lost_ranks(error))
        return self._engine.ack()

    def _fan_out(self, message: Message, *, timeout_s: float) -> Ack:
        return self._engine.ack(**costs(self._ranks(message, timeout_s=timeout_s)))

    def _ranks(self, message: Message, *, timeout_s: float) -> list[RankAck]:
        acks = self.executor.apply(message, timeout_s=timeout_s)
        ranks, error = failures(acks)
        if ranks:
            cause = cause_of(acks)
            session = self._part_of(message)
            if session is not None:
                session.failed, session.cause = error, cause
            missing = sorted({name for ack in acks for name in ack.missing})
            shown = f": {', '.join(missing[:8])}" if missing else ""
            raise _RanksFailed(error + shown, cause)
        return acks

    def _part_of(self, message: Message) -> OpenSession | None:
        """The open session if the message names it: a stranger's message must not fail the update."""
        return self._session if self.holds(getattr(message, "session", "")) else None

    def _check(self, message: Message) -> None:
        last = self._last
        check_message(message, self._session, "" if last is None else last.open.session)

    def _current(self, message: Announce | Close | Commit | Fetch) -> OpenSession:
        self._check(message)
        current = self._session
        assert current is not None
        if current.failed:
            # Two buckets in flight fail for the same reason, and get the same kind of error.
            raise _RanksFailed(f"this session has failed: {current.failed}", current.cause)
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

    def _interrupt_if_current(self, session: str, reason: str) -> None:
        current = self._session
        if current is not None and current.open.session == session:
            current.ending = reason
            self.executor.interrupt(reason)
            self._engine.hooks.stop_waiting()

    def _end_older(self, message: Open) -> None:
        """Ends the wait of a session that the same trainer has left behind; this Open ends the session itself."""
        current = self._session
        if current is None or current.ending or current.open.session == message.session:
            return
        if same_trainer(current.open.session, message.session):
            self._interrupt_if_current(current.open.session, "its trainer has begun another update")

    def _end_if_current(self, session: str, reason: str) -> None:
        self._interrupt_if_current(session, reason)
        self.apply(Abort(session=session, reason=reason))

    def _watch_deadlines(self) -> None:
        while not self._stopped.wait(_WATCH_S):
            current = self._session
            if current is None:
                continue
            try:
                if current.ending:
                    self._engine.hooks.stop_waiting()  # its pause may have begun just after the interrupt
                if time.monotonic() > current.deadline:
                    self._end_if_current(current.open.session, f"nothing was heard for {current.open.lease_s:g} s")
            except Exception:  # hooks are other people's code, and this thread must survive for the next session
                log.exception("could not end a session whose lease is over")


def _lost_ranks(error: Exception) -> tuple[int, ...]:
    return error.ranks if isinstance(error, EngineFailure) else ()
