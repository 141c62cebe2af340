"""The engine's floor: one update at a time; serving, updating or quarantined.

It knows the state, the session's owner and lease, and when the engine must hold still.  What a message does to a
model is the agent's business, how it gets there the executor's, and what "hold still" means the engine's own
(``EngineHooks``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, assert_never

import msgspec

from weightcast.comm.collector import collector_still
from weightcast.config import PauseMode
from weightcast.errors import EngineFailure, Refused, WeightcastError
from weightcast.receiver.executor import Executor
from weightcast.receiver.fold import failures, fold_received, fold_resident, group_failed
from weightcast.receiver.staging import Place
from weightcast.wire.digest import model_digest
from weightcast.wire.layout import BucketLayout, TensorSpec
from weightcast.wire.messages import (
    PROTOCOL,
    Abort,
    Ack,
    Announce,
    BroadcastSource,
    Close,
    Commit,
    EngineInfo,
    Join,
    Leave,
    Message,
    Open,
    RankAck,
    RankInfo,
    Readback,
    State,
    shown,
)

log = logging.getLogger("weightcast.receiver")

_WATCH_S = 0.2
_UNOWNED_JOIN_S = 30.0  # a meeting outside a session has no lease that could end it


class EngineHooks(Protocol):
    """What the receiver asks of the engine that it lives in."""

    @property
    def paused(self) -> bool:
        """True while nothing runs, whoever asked for it."""
        ...

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Return when nothing runs; nothing runs until ``resume``."""
        ...

    def stop_waiting(self) -> None:
        """A ``pause`` that still waits for running requests raises now; one that was reached stays."""
        ...

    def resume(self) -> None:
        """Go on."""
        ...

    def drop_caches(self) -> None:
        """Forget what was computed with the old weights and is not part of a request that keeps it."""
        ...

    def set_version(self, version: int) -> None:
        """What is generated from now on comes from this version."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What does not change while the engine runs; see ``EngineInfo``."""

    engine: str
    model: str
    host_id: str
    ranks: tuple[RankInfo, ...]
    staging: Place
    transports: tuple[str, ...]
    specs: tuple[TensorSpec, ...]


@dataclass(slots=True)
class _Session:
    open: Open
    deadline: float
    buckets: int = 0
    closed: bool = False
    failed: str = ""
    group_failed: bool = False
    ending: str = ""
    paused_at: float | None = None
    not_updated: tuple[str, ...] = ()
    unproven: frozenset[str] = frozenset()
    groups: set[str] = field(default_factory=set[str])


class _Announced:
    """What was announced at Open, and the layouts that are known to carry nothing else: the same in every update."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.specs = specs
        self._by_name = {spec.name: spec for spec in specs}
        self._good: dict[int, BucketLayout] = {}

    def check(self, layout: BucketLayout) -> None:
        """Refuse a layout of other tensors."""
        if self._good.get(layout.index) is layout:
            return
        for slot in layout.slots:
            if self._by_name.get(slot.spec.name) != slot.spec:
                raise Refused(f"bucket {layout.index}: {slot.spec.name} is not what was announced at Open")
        self._good[layout.index] = layout


class _GroupBroken(Refused):
    """The ranks failed because their process group did."""


class ReceiverEngine:
    """Answers the trainer's messages for one engine.  Thread-safe."""

    def __init__(self, executor: Executor, hooks: EngineHooks, facts: EngineFacts, *, version: int | None = 0) -> None:
        self._executor = executor
        self._hooks = hooks
        self._facts = facts
        self._state: State = "serving"
        self._version = version
        self._digest: str | None = None
        self._message = ""
        self._session: _Session | None = None
        self._idle_meeting = False
        self._announced = _Announced(())
        # One message at a time.  Whoever must not wait for it (abort, lease, deadline) interrupts the ranks first.
        self._busy = threading.RLock()
        self._moved_on = threading.Condition(self._busy)
        self._watch = threading.Thread(target=self._watch_deadlines, name="weightcast-lease", daemon=True)
        self._stopped = threading.Event()
        self._watch.start()

    @property
    def executor(self) -> Executor:
        """All ranks, for what goes past the session (the dialects of the reference engine)."""
        return self._executor

    @property
    def state(self) -> State:
        """Serving, updating or quarantined."""
        return self._state

    def info(self) -> EngineInfo:
        """What this engine is and serves."""
        session = self._session
        facts = self._facts
        return EngineInfo(
            protocol=PROTOCOL,
            engine=facts.engine,
            model=facts.model,
            state=self._state,
            version=self._version,
            digest=self._digest,
            tp_size=self._executor.tp_size,
            host_id=facts.host_id,
            ranks=facts.ranks,
            staging=facts.staging,
            transports=facts.transports,
            specs=facts.specs,
            session_owner=None if session is None else _owner(session.open),
            message=self._message,
            paused=self._hooks.paused,
        )

    def apply(self, message: Message) -> Ack:
        """Do what the message asks.  ``ok=False`` in the answer: refused or failed; it says which state is left."""
        if isinstance(message, Abort):
            self._interrupt_if_current(message.session, message.reason or "the trainer gave up")
        try:
            self._check_session(message)  # before waiting: who has no session must not stand in a session's way
        except Refused as error:
            return self._ack(ok=False, error=_words(error))
        if isinstance(message, Open) and self._idle_meeting:
            self._executor.interrupt("an update begins")
        with self._busy, collector_still():
            try:
                return self._apply(message)
            except _GroupBroken as error:
                return self._ack(ok=False, error=_words(error), group_failed=True)
            except Refused as error:
                return self._ack(ok=False, error=_words(error))
            except WeightcastError as error:
                # Without a rank no update can end well, whoever found out.
                session = self._session if _ranks_of(error) else self._part_of(message)
                if session is not None:
                    session.failed = _words(error)
                if _ranks_of(error):
                    self._quarantine(_words(error))
                return self._ack(ok=False, error=_words(error), failed_ranks=_ranks_of(error))
            except Exception as error:  # the engine's hooks are other people's code
                log.exception("a weight message failed")
                session = self._part_of(message)
                if session is not None:
                    session.failed = _words(error)
                return self._ack(ok=False, error=_words(error))
            finally:
                self._moved_on.notify_all()

    @contextmanager
    def between_updates(self) -> Generator[None]:
        """Keep updates out while something else moves the weights (sleep, say); new ones wait.

        Raises:
            Refused: An update is under way.
        """
        self._check_idle()
        with self._busy:
            self._check_idle()
            yield

    def holds(self, session: str) -> bool:
        """True while this session is the one under way."""
        current = self._session
        return current is not None and current.open.session == session

    def lease_lost(self, session: str) -> None:
        """The trainer's connection is gone: end its session, keep or restore the old version."""
        self._end_if_current(session, "the trainer's connection was lost")

    def close(self) -> None:
        """Stop watching deadlines."""
        self._stopped.set()

    def _apply(self, message: Message) -> Ack:
        match message:
            case Open():
                return self._begin(message)
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
            case Abort():
                return self._abort(message)
            case Readback():
                resident = fold_resident(self._ranks(message, timeout_s=300.0))
                return self._ack(resident=resident.digests, mismatched=resident.broken)
            case _:
                assert_never(message)

    def _begin(self, message: Open) -> Ack:
        self._check_session(message)
        if self._session is not None:  # its end is on the way; this message was quicker
            self._abort(Abort(session=self._session.open.session, reason=self._session.ending))
        if self._version is not None and message.version < self._version and not message.allow_older:
            raise Refused(
                f"version {message.version} is older than {self._version}, which is served",
                hint="count up, or allow an older version on purpose (allow_older, --allow-older)",
            )
        acks = self._executor.apply(message, timeout_s=message.timeout_s)
        ranks, error = failures(acks)
        if ranks:
            self._executor.apply(Abort(session=message.session), timeout_s=message.timeout_s)
            raise Refused(error)
        session = _Session(open=message, deadline=time.monotonic() + message.lease_s)
        session.not_updated = _union(ack.not_updated for ack in acks)
        self._session = session
        if self._state == "serving":
            self._state = "updating"
        if self._facts.staging == "none":
            try:
                self._hold_still(session)
            except BaseException as error:
                self._abort(Abort(session=message.session, reason=f"could not hold still: {error}"[:4096]))
                raise
        return self._ack(not_updated=session.not_updated)

    def _join(self, message: Join) -> Ack:
        self._check_session(message)
        if message.session:
            current = self._session
            assert current is not None
            current.groups.add(message.group)
            return self._fan_out(message, timeout_s=message.timeout_s)
        # No lease ends this one, so neither may it last nor stand in an update's way.
        message = msgspec.structs.replace(message, timeout_s=min(message.timeout_s, _UNOWNED_JOIN_S))
        self._idle_meeting = True
        try:
            return self._fan_out(message, timeout_s=message.timeout_s)
        finally:
            self._idle_meeting = False

    def _take(self, message: Announce) -> Ack:
        session = self._current(message)
        if message.layout.index == session.buckets + 1:
            session = self._await_turn(message)
        if session.closed or message.layout.index != session.buckets:
            raise Refused(f"bucket {message.layout.index} came where bucket {session.buckets} was due")
        if self._announced.specs is not session.open.specs:
            self._announced = _Announced(session.open.specs)
        self._announced.check(message.layout)
        if isinstance(message.source, BroadcastSource):
            session.groups.add(message.source.group)
        ack = self._fan_out(message, timeout_s=session.open.timeout_s)
        session.buckets += 1
        if session.buckets != len(session.open.bucket_runs):
            return ack
        # The last of them: who sent it would only ask for the rest of the answer next.
        closed = self._close(Close(session=message.session, buckets=session.buckets))
        return msgspec.structs.replace(
            closed,
            closed=True,
            load_s=ack.load_s + closed.load_s,
            verify_s=ack.verify_s + closed.verify_s,
            peak_extra_bytes=max(ack.peak_extra_bytes, closed.peak_extra_bytes),
        )

    def _await_turn(self, message: Announce) -> _Session:
        """A bucket may be announced before the one before it was answered, and its message overtake that one's."""
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
        agreeing, differing = fold_received(acks)
        unproven = _union(ack.unproven for ack in acks)
        session.unproven = frozenset(unproven)
        return self._ack(
            received_all=acks[0].received_all,
            received=acks[0].received,
            received_ranks=agreeing,
            mismatched=differing,
            not_updated=session.not_updated,
            unproven=unproven,
            **_costs(acks),
        )

    def _commit(self, message: Commit) -> Ack:
        session = self._current(message)
        if not session.closed:
            raise Refused("the session was not closed: nobody knows whether everything has arrived")
        self._hold_still(session)
        # Without the digests, which may be tens of thousands: ranks say what they keep, and it is compared here.
        told = Commit(session=message.session, as_received=message.as_received)
        acks = self._ranks(told, timeout_s=session.open.timeout_s)
        resident = fold_resident(acks)
        expected = self._expected(message, session, acks[0].received)
        wrong = list(dict.fromkeys((*resident.broken, *resident.unmatched(expected))))
        if expected and wrong:
            text = f"what is kept differs from what was sent: {shown(', '.join(wrong[:8]))}"
            # Flips back where a second set of weights is kept, now: nobody may ever ask for it.
            self._abort(Abort(session=message.session, reason=text))
            raise Refused(text)
        self._session = None
        self._version = session.open.version
        self._digest = None
        self._message = ""
        self._state = "serving"
        try:
            self._hooks.drop_caches()
            self._hooks.set_version(session.open.version)
            stall_s = self._go_on(session)
        except Exception as error:  # the engine's hooks are other people's code
            self._quarantine(f"version {session.open.version} is in, but not what depends on it: {_words(error)}")
            raise
        if expected:
            self._digest = model_digest(resident.digests)  # after the engine goes on: nothing waits for it
        return self._ack(
            resident=resident.digests,
            resident_ranks=len(acks),
            not_updated=session.not_updated,
            unproven=_union(ack.unproven for ack in acks),
            stall_s=stall_s,
            **_costs(acks),
        )

    def _expected(self, message: Commit, session: _Session, received: Mapping[str, str]) -> Mapping[str, str]:
        """The digest of each tensor that is to be kept; one that did not come has none, which no digest equals."""
        if not message.as_received:
            return message.expected
        if not session.unproven and len(received) == len(self._facts.specs):  # of the same names, as Open was checked
            return {**received, **message.expected} if message.expected else received
        kept = (spec.name for spec in self._facts.specs if spec.name not in session.unproven)
        return {name: received.get(name, "") for name in kept} | message.expected

    def _abort(self, message: Abort) -> Ack:
        session = self._session
        if session is None or session.open.session != message.session:
            return self._ack()  # nothing of it is left
        self._session = None
        reason = message.reason or session.failed or "no reason given"
        try:
            acks = self._executor.apply(message, timeout_s=session.open.timeout_s)
            ranks, words = failures(acks)
            if ranks or any(ack.touched for ack in acks):
                half = f"an update to version {session.open.version} ended half way: {reason}. {words}"
                self._quarantine(half.strip())
                return self._ack()
            log.warning(
                "update to version %s ended: %s; version %s stays", session.open.version, shown(reason), self._version
            )
            if self._state == "updating":
                self._state = "serving"
            if self._state == "serving":
                self._go_on(session)
        except Exception as error:  # there is no session any more whose end or lease would end the pause
            log.exception("the end of an update failed")
            self._quarantine(_words(error))
            return self._ack(ok=False, error=_words(error), failed_ranks=_ranks_of(error))
        return self._ack()

    def _fan_out(self, message: Message, *, timeout_s: float) -> Ack:
        return self._ack(**_costs(self._ranks(message, timeout_s=timeout_s)))

    def _ranks(self, message: Message, *, timeout_s: float) -> list[RankAck]:
        acks = self._executor.apply(message, timeout_s=timeout_s)
        ranks, error = failures(acks)
        if ranks:
            broken = group_failed(acks)
            session = self._part_of(message)
            if session is not None:
                session.failed, session.group_failed = error, broken
            missing = sorted({name for ack in acks for name in ack.missing})
            shown = f": {', '.join(missing[:8])}" if missing else ""
            raise (_GroupBroken if broken else Refused)(error + shown)
        return acks

    def _part_of(self, message: Message) -> _Session | None:
        """The open session, if the message names it: what strangers ask for must not end somebody's update."""
        return self._session if self.holds(getattr(message, "session", "")) else None

    def _check_session(self, message: Message) -> None:
        """Does the message fit the session that is open, or that none is?"""
        current = self._session
        if isinstance(message, Open) and current is not None and not current.ending:
            if current.open.session == message.session:
                raise Refused("this session is open already")
            raise Refused(f"already being updated by {_owner(current.open)}", hint="wait for it to finish, or end it")
        if current is not None and not current.ending:
            # Who does not know the session's id must not move the groups that its buckets come by.
            if isinstance(message, Join) and not message.session:
                raise Refused(f"being updated by {_owner(current.open)}", hint="meet when it has finished")
            if isinstance(message, Leave) and message.group in current.groups:
                raise Refused(f"{_owner(current.open)} uses the group {message.group}", hint="end its update first")
        # A Join that names no session is a meeting without an update.
        named = message.session if isinstance(message, Join | Announce | Close | Commit) else ""
        if named and (current is None or current.open.session != named):
            raise Refused("no such session: it was never opened, it was ended, or another trainer's is open")

    def _check_idle(self) -> None:
        current = self._session
        if current is not None:
            raise Refused(f"being updated by {_owner(current.open)}", hint="wait for it to finish, or end it")

    def _current(self, message: Announce | Close | Commit) -> _Session:
        self._check_session(message)
        current = self._session
        assert current is not None
        if current.failed:
            # Of two buckets in flight both fail, and because of the same.
            kind = _GroupBroken if current.group_failed else Refused
            raise kind(f"this session has failed: {current.failed}")
        current.deadline = time.monotonic() + current.open.lease_s
        return current

    def _hold_still(self, session: _Session) -> None:
        if session.ending:
            raise Refused(f"this session is being ended: {session.ending}")
        if session.paused_at is None:
            session.paused_at = time.monotonic()  # also of a pause that fails half way: the end has to resume
            try:
                self._hooks.pause(session.open.pause, session.open.timeout_s)
            except Exception as error:
                session.failed = f"the engine did not hold still: {_words(error)}"  # a second Commit finds it running
                raise

    def _go_on(self, session: _Session) -> float:
        if session.paused_at is None:
            return 0.0
        self._hooks.resume()
        return time.monotonic() - session.paused_at

    def _quarantine(self, why: str) -> None:
        log.error("quarantined: %s", shown(why))
        self._state = "quarantined"
        self._message = why
        self._digest = None  # what is kept now was never proven
        try:
            self._hooks.pause("abort", 30.0)
        except Exception:  # the engine's hooks are other people's code; why it is quarantined must still be told
            log.exception("could not pause")

    def _interrupt_if_current(self, session: str, reason: str) -> None:
        current = self._session
        if current is not None and current.open.session == session:
            current.ending = reason
            self._executor.interrupt(reason)
            self._hooks.stop_waiting()

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
                    self._hooks.stop_waiting()  # it may have begun to wait a moment after it was told to end
                if time.monotonic() > current.deadline:
                    self._end_if_current(current.open.session, f"nothing was heard for {current.open.lease_s:g} s")
            except Exception:  # the engine's hooks are other people's code; this thread serves the next session too
                log.exception("could not end a session whose lease is over")

    def _ack(self, *, ok: bool = True, **fields: Any) -> Ack:
        return Ack(ok=ok, state=self._state, version=self._version, ranks=self._executor.tp_size, **fields)


def _owner(message: Open) -> str:
    return f"process {message.owner.pid} on {shown(message.owner.host)} (to version {message.version})"


def _words(error: Exception) -> str:
    if not isinstance(error, WeightcastError):
        return f"{type(error).__name__}: {error}"
    return f"{error} ({error.hint})" if error.hint else str(error)


def _ranks_of(error: Exception) -> tuple[int, ...]:
    return error.ranks if isinstance(error, EngineFailure) else ()


def _union(names_of_ranks: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in names_of_ranks for name in names))


def _costs(acks: Sequence[RankAck]) -> dict[str, Any]:
    return {
        "load_s": max(ack.load_s for ack in acks),
        "verify_s": max(ack.verify_s for ack in acks),
        "peak_extra_bytes": max(ack.peak_extra_bytes for ack in acks),
    }
