"""One engine on the trainer's side: everything that is known of it, its session and its part in an update.

Coroutines are for the event loop.  An error of a request names the target and, after the first bucket, says that the
target may be half updated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec

from weightcast.comm import event_loop
from weightcast.comm.http import Client
from weightcast.comm.run_steps import EngineRequest, Steps, converse_on_loop, send_plain
from weightcast.config import PauseMode
from weightcast.errors import (
    DeadlineExceeded,
    TargetError,
    TargetLost,
    TargetRejected,
    TargetUnreachable,
    WeightcastError,
    WireError,
)
from weightcast.protocols import Adapter
from weightcast.report import LegReport, TargetReport, count_of
from weightcast.runtime.deadline import Deadline
from weightcast.transports.health import LinkHealth
from weightcast.transports.plan import TargetPlan
from weightcast.transports.session import UNPLANNED, LinkSession, Outcome
from weightcast.transports.usual_rates import UsualRates
from weightcast.watch.events import Asked
from weightcast.watch.listeners import Events
from weightcast.wire.answers import Ack
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.messages import Close, Commit, Open, Revert

_ABORT_S = 30.0
_LEAVE_S = 5.0
_SILENT_S = 0.5
_SENT_S = 0.05  # enough to hand a message to the engine's host
_MARGIN_S = 5.0
# Engines may answer these only when others have them too, or at the end of the update.
_AT_ONCE = frozenset(("join", "bucket", "handles"))


def margin_s(timeout_s: float) -> float:
    """Returns how much later than the engine's own deadline the sender's deadline is, in seconds."""
    return min(_MARGIN_S, 0.5 + timeout_s / 4)


def is_silence(error: BaseException) -> bool:
    """True for an error after which the engine may still be running: it passed a deadline."""
    return isinstance(error, TargetUnreachable) and isinstance(error.__cause__, DeadlineExceeded | None)


def _has_ended(error: WeightcastError) -> bool:
    """True if nothing listens there any more: an engine that has ended keeps no memory."""
    return error.__cause__ is not None and isinstance(error.__cause__.__cause__, ConnectionRefusedError)


@dataclass(slots=True, kw_only=True)
class Start:
    """The facts about one start of an engine, beside its adapter.

    Attributes:
        pause: Pause of the target's updates; None until it was chosen.
        short: What was last said about a proof that the target cannot give.
        mixed: True if the live weights may be parts of two versions and the engine does not know that itself.
        digest: Model digest of the last commit; None if there was none, or no digest was taken.
        boxes: The boxes that its ranks want, as ``decode_boxes`` reads them; None until the engine was asked.
    """

    pause: PauseMode | None = None
    short: str = ""
    mixed: bool = False
    digest: str | None = None
    boxes: tuple[bytes, ...] | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Link:
    """One target, from the moment at which it becomes a member.

    Attributes:
        events: Told of every message.
        answer: The description or the error of the last probe; None before the first.
        health: State of the target.
        silent: True if it has passed a deadline, and has not answered a probe since.
        is_one: True once new connections were seen to reach one engine.
        group_rank: Group rank of the target's first engine rank that joins.
        plan: How the target gets the weights.
        start: The present start of the engine.
        session: The last attempt at an update.
        outcome: The target in the last update.
        notes: Failures that did not fail the update, since ``take_notes`` was last called.
        rates: The rates of its updates.
    """

    client: Client
    events: Events = field(default_factory=Events, repr=False)
    answer: EngineInfo | WeightcastError | None = None
    health: LinkHealth = field(default_factory=LinkHealth)
    silent: bool = False
    is_one: bool = False
    group_rank: int = 1
    plan: TargetPlan = UNPLANNED
    start: Start = field(default_factory=Start)
    session: LinkSession = field(default_factory=LinkSession)
    outcome: Outcome = field(default_factory=Outcome)
    notes: list[str] = field(default_factory=list[str])
    rates: UsualRates = field(default_factory=UsualRates, repr=False)
    _info: EngineInfo | None = None
    _adapter: Adapter | None = None

    @property
    def url(self) -> str:
        return self.client.target.url

    @property
    def info(self) -> EngineInfo:
        """The target's description, as ``meet`` took it."""
        assert self._info is not None, f"{self.url} has not answered yet"
        return self._info

    @property
    def adapter(self) -> Adapter:
        assert self._adapter is not None, f"{self.url} has not answered yet"
        return self._adapter

    @property
    def planned(self) -> bool:
        """True if the weights and the transport were checked against this start of the target."""
        return bool(self.plan.transport)

    @property
    def stages(self) -> bool:
        """True if the target stages: buckets leave its live weights as they are."""
        return self.info.staging != "none"

    @property
    def can_revert(self) -> bool:
        """True if the engine can restore the old weights after a commit."""
        return self.stages and self.adapter.reverts

    @property
    def members(self) -> tuple[int, ...]:
        """The engine ranks that join a group: those that read no memory of their own host."""
        return tuple(rank for rank in range(self.info.tp_size) if rank not in self.plan.near)

    # -- what is known of it

    def meet(self, info: EngineInfo, adapter_for: Callable[[EngineInfo], Adapter]) -> None:
        """Takes a description for the updates to come.

        Another engine than before, and one that has restarted, gets a new adapter, and no plan fits it yet.
        """
        if self._adapter is None or not self._is_start(info):
            self._adapter, self.plan, self.start = adapter_for(info), UNPLANNED, Start()
        self._info = info
        self.adapter.renew(info)

    def answered(self, answer: EngineInfo | WeightcastError, *, waited: bool) -> None:
        """Records the result of a probe, which ``waited`` a whole deadline for a target that was not silent."""
        self.answer = answer
        if isinstance(answer, EngineInfo):
            self.silent = False
            self.health = self.health.answered(answer)
            if self._info is not None and self._is_start(answer) and self.start.mixed:
                self.answer = msgspec.structs.replace(  # a stock engine does not know it
                    answer,
                    state="quarantined",
                    message="an update of it broke off: it may hold parts of two versions; send it a full update",
                )
        elif isinstance(answer, TargetUnreachable):
            silent = is_silence(answer)
            self.silent = self.silent or waited or not silent
            self.health = self.health.silent(str(answer)) if silent else self.health.lost(str(answer))
        else:
            self.health = self.health.broken(str(answer))

    def _is_start(self, info: EngineInfo) -> bool:
        """True if this describes the same start of the same engine, as far as the engine can tell."""
        seen = self.info
        return (seen.incarnation, seen.tp_size, seen.engine) == (info.incarnation, info.tp_size, info.engine)

    def broke_off(self, reason: str, *, whole: bool) -> None:
        """Records that an update failed; ``whole`` if the target has confirmed that it serves its old version."""
        if self.health.state == "updating":
            self.health = self.health.kept() if whole else self.health.broken(reason)

    def ended(self, row: TargetReport, *, moved_on: bool, version: int) -> None:
        """Records the end of an update.

        If the update ``moved_on``, it succeeded on some target; a target with the old version is then left behind.
        """
        health, ack = self.health, self.session.committed
        if row.status == "serving":
            if health.state == "updating":  # otherwise the target has restarted meanwhile
                self.health = health.committed(version, (ack.digest or None) if ack is not None else None)
        elif row.status in ("quarantined", "unknown") and health.state not in ("quarantined", "gone"):
            self.health = health.broken(row.message)
        elif row.status == "untouched" and moved_on:
            self.health = health.broken(f"left behind: {row.message}" if row.message else "left behind")
        else:
            self.health = health.kept()

    @property
    def is_unsure(self) -> bool:
        """True if the target must be probed once more before its row is made: it has not committed, or has failed."""
        outcome = self.outcome
        return (self.session.committed is None or outcome.failed is not None) and outcome.reverted is None

    def row(self, legs: tuple[LegReport, ...] = ()) -> TargetReport:
        """Returns the target's row in the report; its notes go there."""
        self.outcome.notes += self.take_notes()
        return self.outcome.row(self.url, self.session, self.answer if self.is_unsure else None, legs)

    def take_notes(self) -> tuple[str, ...]:
        """Returns the notes since the last call, each once."""
        notes, self.notes = tuple(dict.fromkeys(self.notes)), []
        return notes

    # -- its session

    async def open(self, message: Open) -> Ack:
        """Starts a session.  A leased engine ends it by itself when this process ends."""
        session = self.session = LinkSession()
        self._check_version(message)
        # An engine without a lease hears of the session's end from this process alone, also if opening fails half way.
        session.id, session.limit_s = message.session, message.timeout_s
        if self.start.pause is not None and self.start.pause != message.pause:
            message = msgspec.structs.replace(message, pause=self.start.pause)
        traceparent = self.events.traceparent(self.url)
        if traceparent:
            message = msgspec.structs.replace(message, traceparent=traceparent)
        session.opening = asyncio.current_task()
        try:
            session.opened = await self._converse("open", self.adapter.open(message), message.timeout_s)
        except WeightcastError:
            if self.adapter.leased:
                session.id = ""
            raise
        finally:
            session.opening = None
            if session.id and self.health.state not in ("updating", "gone"):
                self.health = self.health.opened()
        return session.opened

    @property
    def is_open(self) -> bool:
        """True if the target has an open session, or was asked for one."""
        return bool(self.session.id) or self.session.lease is not None

    async def ask(self, kind: str, steps: Steps, *, timeout_s: float, buckets: range | None = None) -> Ack:
        """Sends a step's requests, reads the answer and adds up its costs.

        The engine keeps the deadline itself and answers.  The deadline here is a little later, for an engine that
        cannot answer.

        Args:
            kind: Name of the step in events: ``Asked.message``.
            timeout_s: The engine's deadline, in seconds.
            buckets: Indices of the buckets that the step announces; None for another step.  An engine may get the
                announcement while it still loads the buckets before, so the deadline counts from the answer to those.
        """
        limit_s, session = timeout_s + margin_s(timeout_s), self.session
        if buckets is None:
            return await self._converse(kind, steps, limit_s)
        first, last = buckets[0], buckets[-1]
        deadline = session.awaited[last] = Deadline(limit_s, begins=lambda: session.turn_began(first))
        try:
            return await self._converse(kind, steps, deadline, first)
        finally:
            session.answered_at[last] = time.monotonic()
            session.awaited.pop(last, None)

    async def leave(self, group: str | None) -> None:
        """Asks the engine to leave a group, or to unmap buffers if ``group`` is None.  A failure becomes a note."""
        if self.client.closed or self._adapter is None:
            return  # this process has no connection to it
        try:
            await self._send_end("leave", self.adapter.leave(group), _LEAVE_S)
        except WeightcastError as error:
            what = f"leave the group {group}" if group is not None else "unmap the trainer's buffers"
            if not _has_ended(error):
                self.notes.append(f"the engine did not {what}, and may keep its memory: {error}")

    def touch(self) -> None:
        """Records that a bucket is being sent: the live weights may be parts of two versions from now on."""
        self.start.mixed = not self.adapter.leased

    async def close(self, *, buckets: int, timeout_s: float, by_name: bool = False) -> Ack:
        """Tells the engine that everything was sent; ``by_name`` asks for the digest of each tensor."""
        message = Close(session=self.session.id, buckets=buckets, by_name=by_name)
        self.session.closed = await self.ask("close", self.adapter.close(message), timeout_s=timeout_s)
        return self.session.closed

    async def commit(self, digest: str, *, timeout_s: float) -> Ack:
        """Makes the new weights live; ``digest`` is as ``Commit.digest``."""
        self.session.asked = Commit(session=self.session.id, digest=digest)
        return await self.commit_again(timeout_s=timeout_s)

    async def commit_again(self, *, timeout_s: float) -> Ack:
        """Sends a Commit again, because its answer was lost.

        An engine with our receiver switches once and repeats its answer.

        Raises:
            TargetRejected: The engine has not committed the session and will not.
        """
        session = self.session
        assert session.asked is not None
        session.committed = await self.ask("commit", self.adapter.commit(session.asked), timeout_s=timeout_s)
        self.start.mixed = False
        self.end()
        return session.committed

    async def revert(self, reason: str, *, timeout_s: float) -> Ack:
        """Restores the weights that the engine served before the commit.  Repeated once if the answer is lost."""
        adapter, asked = self.adapter, self.session.asked
        assert asked is not None
        message = Revert(session=asked.session, reason=reason[:4096])
        try:
            return await self.ask("revert", adapter.revert(message), timeout_s=timeout_s)
        except TargetRejected:
            raise
        except WeightcastError:
            return await self.ask("revert", adapter.revert(message), timeout_s=timeout_s)

    async def abort(self, reason: str) -> None:
        """Ends the session, if one is open or asked for, and records what the engine keeps."""
        session, answer = self.session, None
        if session.opening is not None:
            if self.adapter.leased:
                session.opening.cancel()  # its connection closes, which ends a session that the engine opens after all
            await asyncio.wait([session.opening])
        try:
            if session.id and not self.client.closed:
                steps, session.id = self.adapter.abort(session.id, reason), ""
                # Without an answer, the end of the lease ends the session too.  A later probe asks for the state.
                with suppress(WeightcastError):
                    answer = await self._send_end("abort", steps, min(_ABORT_S, session.limit_s))
        finally:
            self.end()
        if session.overdue:
            self.silent = True
            self.health = self.health.silent(reason)
        whole = answer is not None and answer.state == "serving" and not self.start.mixed
        if answer is not None and self.adapter.leased and answer.version != self.info.version:
            whole, reason = False, f"{reason}; by then the engine had switched to version {answer.version}"
        self.broke_off(reason, whole=whole)

    def end(self) -> None:
        """Closes the lease."""
        session = self.session
        session.id = ""
        if session.lease is not None:
            with suppress(WeightcastError):
                session.lease.close()
            session.lease = None

    async def _send_end(self, kind: str, steps: Steps, limit_s: float) -> Ack:
        """Sends a step that ends a session or a membership.

        A silent engine gets the request, and its answer is hardly waited for: half a second once, then no more.
        """
        session = self.session
        if overdue := session.overdue or self.silent:
            limit_s = min(limit_s, _SENT_S if session.deaf else _SILENT_S)
        try:
            return await self._converse(kind, steps, limit_s, ends=True)
        except DeadlineExceeded:
            session.deaf = overdue
            raise

    def _check_version(self, message: Open) -> None:
        """Refuses an older version in the place of a stock engine, which would accept any version."""
        served = self.info.version
        if not self.adapter.leased and served is not None and message.version < served and not message.allow_older:
            raise TargetRejected(
                f"{self.url}: version {message.version} is older than {served}, which the engine serves",
                url=self.url,
                hint="count up, or allow an older version on purpose (allow_older, --allow-older)",
            )

    async def _converse(
        self, kind: str, steps: Steps, limit: float | Deadline, bucket: int | None = None, *, ends: bool = False
    ) -> Ack:
        began, session = time.monotonic(), self.session
        send = partial(self._send, at_once=kind in _AT_ONCE)
        try:
            ack = await converse_on_loop(self.client, steps, timeout_s=limit, send=send)
        except WireError as error:
            self._asked(kind, bucket, began, error=str(error))
            raise TargetError(f"{self.url}: {error}", url=self.url, half_updated=session.sent > 0) from error
        except WeightcastError as error:
            self._asked(kind, bucket, began, error=str(error))
            session.overdue |= isinstance(error, DeadlineExceeded) and not ends
            raise
        self._asked(kind, bucket, began, ack)
        session.add_costs(ack)
        return ack

    def _asked(self, kind: str, bucket: int | None, began: float, ack: Ack | None = None, error: str = "") -> None:
        """Emits that a message was answered, or was not."""
        self.events.emit(
            Asked(
                target=self.url,
                message=kind,
                bucket=bucket,
                began=began,
                ended=time.monotonic(),
                ok=ack is not None,
                error=error,
                heard=None if ack is None else ack.heard,
                answered=None if ack is None else ack.answered,
                steps=() if ack is None else ack.steps,
            )
        )

    async def _send(self, request: EngineRequest, limit: Deadline, *, at_once: bool) -> bytes:
        if not request.lease:
            return await send_plain(self.client, request, limit, at_once=at_once)
        reply, self.session.lease = await self.client.lease(request.path, request.body, timeout_s=limit)
        return reply


def in_flight_to(links: Sequence[Link]) -> int:
    """Returns how many buckets may be announced to all targets before they have answered the first: 1 or 2."""
    return min((link.adapter.in_flight for link in links), default=1)


def words_for(buckets: range) -> str:
    """Names buckets in an error: ``bucket 3`` or ``buckets 3 to 6``."""
    return f"bucket {buckets[0]}" if len(buckets) == 1 else f"buckets {buckets[0]} to {buckets[-1]}"


async def tell(link: Link, steps: Steps, *, what: str | range, timeout_s: float) -> None:
    """Announces new weights, buckets or a folder, to one target and reads the answer.

    Args:
        what: Name of the folder, for the error; or the indices of the buckets.  The deadline of buckets counts from the
            answer to the one before them.

    Raises:
        TargetRejected, TargetLost: The error names the target and the weights, and is ``half_updated`` if the engine
            does not stage.
    """
    half = not link.stages
    buckets = what if isinstance(what, range) else None
    name = what if isinstance(what, str) else words_for(what)
    link.touch()
    try:
        with link.session.moves():
            ack = await link.ask("folder" if buckets is None else "bucket", steps, timeout_s=timeout_s, buckets=buckets)
        link.session.took_over(ack, 1 if buckets is None else len(buckets))
    except DeadlineExceeded as error:
        raise TargetLost(
            f"{link.url}: no answer to {name} within {timeout_s:g} s", url=link.url, half_updated=half
        ) from error
    except TargetRejected as error:
        raise TargetRejected(
            f"{link.url} refused {name} after {count_of(link.session.sent, 'bucket')}: {error}",
            url=link.url,
            half_updated=half,
            hint=error.hint,
            status=error.status,
        ) from error
    except TargetError as error:
        raise TargetLost(
            f"{link.url}: lost at {name} after {count_of(link.session.sent, 'bucket')}: {error}",
            url=link.url,
            half_updated=half,
        ) from error


def leave_all(links: Sequence[Link], group: str | None = None) -> None:
    """Asks targets to leave a group and to unmap buffers.  A failure becomes a note in the target's link."""
    for error in event_loop.run_each([link.leave(group) for link in links]):
        if error is not None:
            raise error
