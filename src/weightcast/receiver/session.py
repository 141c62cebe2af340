"""The sessions of one engine: the trainer opens one for each update, one at a time.

A message goes from here to the executor, and from there to every rank.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from weightcast.errors import EngineFailure, Refused, WeightcastError, error_words
from weightcast.receiver.engine_state import EngineFacts, EngineHooks, EngineState
from weightcast.receiver.executor import Executor
from weightcast.receiver.open_session import (
    check_idle,
    check_readable,
    owner,
    same_trainer,
)
from weightcast.receiver.rank_answers import (
    check_all,
)
from weightcast.receiver.session_events import SessionEvents
from weightcast.receiver.session_steps import RanksFailed, SessionSteps, lost_ranks
from weightcast.runtime.gc_pause import gc_paused
from weightcast.watch.logs import SessionLog
from weightcast.watch.sessions import SessionWatcher
from weightcast.wire.answers import Ack, State
from weightcast.wire.engine_info import EngineInfo, EngineStatus
from weightcast.wire.messages import (
    Abort,
    Message,
    Open,
    ReadChunk,
    TellBoxes,
)
from weightcast.wire.pieces import WantedBoxes

log = logging.getLogger("weightcast.receiver")

_WATCH_S = 0.2
_READ_CHUNK_S = 30.0


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
        self._newest = ""  # session of the Open that came last, which may still wait for the lock
        # One message at a time.  An abort or a lease that ends interrupts the ranks first, so that it need not wait.
        self._busy = threading.RLock()
        self._moved_on = threading.Condition(self._busy)
        self._steps = SessionSteps(executor, self._engine, self._events, self._moved_on)
        self._watch = threading.Thread(target=self._watch_deadlines, name="weightcast-lease", daemon=True)
        self._stopped = threading.Event()
        self._watch.start()

    @property
    def state(self) -> State:
        """Serving, updating or quarantined."""
        return self._engine.state

    def info(self) -> EngineInfo:
        """The engine's description of itself, with its state and version."""
        session = self._steps.session
        return self._engine.info(None if session is None else owner(session.open))

    def status(self) -> EngineStatus:
        """The engine's state and its last update, in short."""
        return self._events.status()

    def apply(self, message: Message) -> Ack:
        """Carries out a message.  An answer with ``ok=False`` says why it failed and which state is left."""
        heard = time.monotonic()
        if isinstance(message, Abort):
            self._interrupt_if_current(message.session, message.reason or "the trainer gave up")
        if isinstance(message, Open):
            self._end_older(message)
        try:
            self._steps.check(message)  # before the lock: a stranger's message must not delay the session's own
        except Refused as error:
            refused = self._engine.ack(ok=False, error=error_words(error))
            self._events.refused(message, refused, heard)
            return refused
        if isinstance(message, Open):
            self._newest = message.session
            if self._steps.joining_unowned:
                self.executor.interrupt("an update begins")
        with self._busy, gc_paused():
            try:
                ack = self._attempt(message)
            finally:
                self._moved_on.notify_all()
            return self._events.answered(message, ack, heard, self._steps.session, self._steps.last)

    def _attempt(self, message: Message) -> Ack:
        try:
            return self._carry_out(message)
        except RanksFailed as error:
            return self._engine.ack(ok=False, error=error_words(error), cause=error.cause)
        except Refused as error:
            return self._engine.ack(ok=False, error=error_words(error))
        except Exception as error:  # the engine's hooks are other people's code
            if not isinstance(error, WeightcastError):
                log.exception("a weight message failed")
            # Without a rank the update cannot succeed, whichever message showed that it is gone.
            session = self._steps.session if lost_ranks(error) else self._steps.part_of(message)
            if session is not None:
                session.failed = error_words(error)
            if lost_ranks(error):
                self._engine.quarantine(error_words(error))
            return self._engine.ack(ok=False, error=error_words(error), failed_ranks=lost_ranks(error))

    def _carry_out(self, message: Message) -> Ack:
        if isinstance(message, Open):
            if message.session != self._newest and same_trainer(message.session, self._newest):
                # The lock is not fair, and the trainer may have ended while this Open waited for it.
                raise Refused("its trainer has begun another update since")
            self._end_older(message)  # it may have been opened since this message came
        return self._steps.apply(message)

    @contextmanager
    def between_updates(self) -> Generator[None]:
        """Keeps updates out while something else moves the weights (sleep, for one); ``Refused`` during one."""
        check_idle(self._steps.session)
        with self._busy:
            check_idle(self._steps.session)
            self._steps.last = None  # the second set of weights may be freed
            yield

    def discarded(self, why: str) -> None:
        """Quarantines an engine that has dropped its weights, until the next full update.  The caller pauses it.

        Called inside ``between_updates``; ``why`` says what happened and what to do.
        """
        self._engine.discard(why)
        self._events.look(self._steps.session, self._steps.last)

    def ranks_lost(self, error: EngineFailure) -> None:
        """Quarantines an engine whose ranks ended between two messages, once no message is being carried out."""
        with self._busy:
            if self._engine.state == "quarantined":
                return
            if self._steps.session is not None:
                self._steps.session.failed = error_words(error)
            self._engine.quarantine(error_words(error))
            self._events.look(self._steps.session, self._steps.last)

    def replaced(self, why: str) -> None:
        """Lets an engine serve whole weights that came past this session, at no known version.

        Called inside ``between_updates``; ``why`` says how they came.
        """
        self._engine.replace(why)
        self._events.look(self._steps.session, self._steps.last)

    def holds(self, session: str) -> bool:
        """True while this session is open."""
        return self._steps.holds(session)

    def read_chunk(self, message: ReadChunk) -> bytes:
        """Returns a chunk of one rank's live weights, while the engine generates.  An update waits for one chunk.

        ``Refused`` says that the engine serves another version or a rank refused, ``EngineFailure`` that one is gone.
        """
        # An update that waits for its trainer keeps the lock; the other engine must not wait as long.
        if not self._busy.acquire(timeout=_READ_CHUNK_S):
            raise Refused(f"a message of an update has kept this engine busy for {_READ_CHUNK_S:g} s", hint="try again")
        try:
            writing = self._steps.session is not None and self._engine.facts.staging == "none"
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

    def _interrupt_if_current(self, session: str, reason: str) -> None:
        current = self._steps.session
        if current is not None and current.open.session == session:
            current.ending = reason
            self.executor.interrupt(reason)
            self._engine.hooks.stop_waiting()

    def _end_older(self, message: Open) -> None:
        """Ends the wait of a session that the same trainer has left behind; this Open ends the session itself."""
        current = self._steps.session
        if current is None or current.ending or current.open.session == message.session:
            return
        if same_trainer(current.open.session, message.session):
            self._interrupt_if_current(current.open.session, "its trainer has begun another update")

    def _end_if_current(self, session: str, reason: str) -> None:
        self._interrupt_if_current(session, reason)
        self.apply(Abort(session=session, reason=reason))

    def _watch_deadlines(self) -> None:
        while not self._stopped.wait(_WATCH_S):
            current = self._steps.session
            if current is None:
                continue
            try:
                if current.ending:
                    self._engine.hooks.stop_waiting()  # its pause may have begun just after the interrupt
                if time.monotonic() > current.deadline:
                    self._end_if_current(current.open.session, f"nothing was heard for {current.open.lease_s:g} s")
            except Exception:  # hooks are other people's code, and this thread must survive for the next session
                log.exception("could not end a session whose lease is over")
