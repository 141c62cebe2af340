"""The link to one target: its connection, its adapter and its session.  Its coroutines are for the event loop.

An error of a request names the target and, after the first bucket, says that the target may be half updated.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from weightcast.comm import event_loop
from weightcast.comm.http import Client, Lease
from weightcast.comm.ipc import host_id
from weightcast.comm.run_steps import EngineRequest, Steps, converse_on_loop, send_plain
from weightcast.comm.shared_buckets import Shared
from weightcast.config import PauseMode
from weightcast.errors import DeadlineExceeded, TargetError, TargetLost, TargetRejected, WeightcastError, WireError
from weightcast.protocols import Adapter
from weightcast.report import count_of
from weightcast.runtime.deadline import Deadline
from weightcast.transports.plan import TargetPlan
from weightcast.watch.events import Asked
from weightcast.watch.listeners import Events
from weightcast.wire.answers import Ack
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.messages import Close, Commit, Open, Revert

_UNPLANNED = TargetPlan()
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


def _has_ended(error: WeightcastError) -> bool:
    """True if nothing listens there any more: an engine that has ended keeps no memory."""
    return error.__cause__ is not None and isinstance(error.__cause__.__cause__, ConnectionRefusedError)


# Over 350 lines: each message of a session reads and changes what the answers before have left.
@dataclass(slots=True, kw_only=True)
class Link:
    """A target that takes part in updates.

    Attributes:
        info: The target's description, from the last probe.
        group_rank: Group rank of the target's first engine rank that joins.
        plan: How the target gets the weights.
        pause: Pause of the target's updates; None until it was chosen.
        unproven: What was last said about tensors of the target that cannot be proven.
        session: Id of the target's open session; empty without one.
        load_s: Seconds that the target's slowest rank spent on copies in this session.
        verify_s: Seconds that the target's slowest rank spent on digests in this session.
        peak_extra_bytes: Most extra memory of any rank in this session, in bytes.
        sent: Number of buckets that the target has loaded in this session.
        silent: True once the target has missed a deadline.
        mixed: True if the live weights may be parts of two versions and the engine does not know that itself.
        digest: Model digest of the last commit; None if there was none, or no digest was taken.
        opened, committed: Answers to this session's Open and Commit; None before them.
        closed: Answer to Close, or to the last bucket if that answers Close too; None before it.
        asked: The Commit of this session; None before it is sent.
        notes: Failures that did not fail the update, since ``take_notes`` was last called.
        events: Told of every message.
    """

    client: Client
    adapter: Adapter
    info: EngineInfo
    group_rank: int = 1
    plan: TargetPlan = _UNPLANNED
    pause: PauseMode | None = None
    unproven: str = ""
    session: str = ""
    load_s: float = 0.0
    verify_s: float = 0.0
    peak_extra_bytes: int = 0
    sent: int = 0
    silent: bool = False
    mixed: bool = False
    digest: str | None = None
    opened: Ack | None = None
    closed: Ack | None = None
    committed: Ack | None = None
    asked: Commit | None = None
    notes: list[str] = field(default_factory=list[str])
    events: Events = field(default_factory=Events, repr=False)
    _opening: asyncio.Task[Any] | None = field(default=None, repr=False)  # waits for the answer to ``open``
    _limit_s: float = _ABORT_S
    _deaf: bool = False  # it is silent, and has not answered a message that ends something either
    _lease: Lease | None = field(default=None, repr=False)
    _adding: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _answered_at: dict[int, float] = field(default_factory=dict, repr=False)  # by bucket, ``time.monotonic``
    _awaited: dict[int, Deadline] = field(default_factory=dict, repr=False)  # by bucket

    @property
    def url(self) -> str:
        return self.client.target.url

    @property
    def planned(self) -> bool:
        """True once the weights and the transport were checked against this target."""
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

    def shared(self, buffers: Sequence[Shared]) -> list[Shared]:
        """Returns the handles that this target gets."""
        if self.plan.reads:
            return self._shared_by_leg(buffers)
        if self.plan.near:
            return self._shared_by_host(buffers)
        opens = slice(*self.plan.opens)
        buffers = [buffer for buffer in buffers if buffer.host in ("", self.info.host_id)]
        if self.plan.sharing == "ring":
            return [Shared(memory=buffer.memory, ring=buffer.ring[opens]) for buffer in buffers]
        # What is nobody's alone stays the same object: sources are made and encoded once for each.
        return [
            msgspec.structs.replace(buffer, torch=buffer.torch[opens], ring=())
            if buffer.torch or buffer.ring
            else buffer
            for buffer in buffers
        ]

    def _shared_by_host(self, buffers: Sequence[Shared]) -> list[Shared]:
        """The handles of each host, with the ranks that are there; trainer ranks on one host do not name it."""
        found: list[Shared] = []
        for buffer in buffers:
            host = buffer.host or host_id()
            if ranks := tuple(rank for rank in self.plan.near if self.info.hosts[rank] == host):
                found.append(Shared(memory=buffer.memory, ranks=ranks))
        return found

    def _shared_by_leg(self, buffers: Sequence[Shared]) -> list[Shared]:
        """Returns the legs from each trainer rank to the ranks that read memory of one host, or of none."""
        ranks: dict[str, list[int]] = {}
        for rank, host in enumerate(self.plan.reads):
            ranks.setdefault(host, []).append(rank)
        return [
            Shared(
                memory=buffer.memory if buffer.host == host else None,
                parts=buffer.legs.get(host, ()),
                ranks=tuple(some),
                leg=True,
            )
            for host, some in ranks.items()
            for buffer in buffers
        ]

    async def open(self, message: Open) -> Ack:
        """Starts a session.  A leased engine ends it by itself when this process ends."""
        self.load_s = self.verify_s = 0.0
        self.peak_extra_bytes = self.sent = 0
        self.silent = self._deaf = False
        self._answered_at.clear()
        self.opened = self.closed = self.committed = self.asked = None
        self._check_version(message)
        # An engine without a lease hears of the session's end from this process alone, also if opening fails half way.
        self.session = message.session
        self._limit_s = message.timeout_s
        if self.pause is not None and self.pause != message.pause:
            message = msgspec.structs.replace(message, pause=self.pause)
        traceparent = self.events.traceparent(self.url)
        if traceparent:
            message = msgspec.structs.replace(message, traceparent=traceparent)
        self._opening = asyncio.current_task()
        try:
            self.opened = await self._timed("open", self.adapter.open(message), message.timeout_s)
        except WeightcastError:
            if self.adapter.leased:
                self.session = ""
            raise
        finally:
            self._opening = None
        return self.opened

    @property
    def is_open(self) -> bool:
        """True if the target has an open session, or was asked for one."""
        return bool(self.session) or self._lease is not None

    async def prepare(self, steps: Steps, *, timeout_s: float) -> Ack:
        """Hands over the plan of the updates to come, outside of any session."""
        return await converse_on_loop(self.client, steps, timeout_s=timeout_s)

    async def ask(self, kind: str, steps: Steps, *, timeout_s: float, bucket: int | None = None) -> Ack:
        """Sends a step's requests, reads the answer and adds up its costs.

        The engine keeps the deadline itself and answers.  The deadline here is a little later, for an engine that
        cannot answer.

        Args:
            kind: Name of the step in events: ``Asked.message``.
            timeout_s: The engine's deadline, in seconds.
            bucket: Index of the bucket that the step announces; None for another step.  An engine may get the
                announcement while it still loads the bucket before, so the deadline counts from the answer to that one.
        """
        limit_s = timeout_s + margin_s(timeout_s)
        if bucket is None:
            return await self._timed(kind, steps, limit_s)
        deadline = self._awaited[bucket] = Deadline(limit_s, begins=lambda: self._turn_began(bucket))
        try:
            return await self._timed(kind, steps, deadline, bucket)
        finally:
            self._answered_at[bucket] = time.monotonic()
            self._awaited.pop(bucket, None)

    def _turn_began(self, bucket: int) -> float | Deadline | None:
        """Returns the time at which the bucket before was answered (``time.monotonic``).

        Until then it returns that bucket's deadline.  The deadlines of two buckets may pass in either order, and a
        silent engine is not waited for twice.  None if the bucket before was not announced yet.
        """
        if bucket == 0 or self.silent:
            return 0.0
        answered_at = self._answered_at.get(bucket - 1)
        return self._awaited.get(bucket - 1) if answered_at is None else answered_at

    async def leave(self, group: str | None) -> None:
        """Asks the engine to leave a group, or to unmap buffers if ``group`` is None.  A failure becomes a note."""
        if self.client.closed:
            return  # this process has no connection to it any more
        try:
            await self._send_end("leave", self.adapter.leave(group), _LEAVE_S)
        except WeightcastError as error:
            what = f"leave the group {group}" if group is not None else "unmap the trainer's buffers"
            if not _has_ended(error):
                self.notes.append(f"the engine did not {what}, and may keep its memory: {error}")

    def take_notes(self) -> tuple[str, ...]:
        """Returns the notes since the last call, each once."""
        notes, self.notes = tuple(dict.fromkeys(self.notes)), []
        return notes

    def took_over(self, ack: Ack | None = None) -> None:
        """Counts a bucket that the engine has loaded.  The answer to the last bucket may answer Close too."""
        with self._adding:
            self.sent += 1
            if ack is not None and ack.closed:
                self.closed = ack

    def touch(self) -> None:
        """Records that a bucket is being sent: the live weights may be parts of two versions from now on."""
        self.mixed = not self.adapter.leased

    async def close(self, *, buckets: int, timeout_s: float, by_name: bool = False) -> Ack:
        """Tells the engine that everything was sent."""
        message = Close(session=self.session, buckets=buckets, by_name=by_name)
        self.closed = await self.ask("close", self.adapter.close(message), timeout_s=timeout_s)
        return self.closed

    async def commit(self, digest: str, *, timeout_s: float) -> Ack:
        """Makes the new weights live; ``digest`` is as ``Commit.digest``."""
        self.asked = Commit(session=self.session, digest=digest)
        return await self._commit(self.asked, timeout_s)

    async def commit_again(self, *, timeout_s: float) -> Ack:
        """Sends a Commit again, because its answer was lost.

        An engine with our receiver switches once and repeats its answer.

        Raises:
            TargetRejected: The engine has not committed the session and will not.
        """
        assert self.asked is not None
        return await self._commit(self.asked, timeout_s)

    async def _commit(self, message: Commit, timeout_s: float) -> Ack:
        self.committed = await self.ask("commit", self.adapter.commit(message), timeout_s=timeout_s)
        self.mixed = False
        self.end()
        return self.committed

    async def revert(self, reason: str, *, timeout_s: float) -> Ack:
        """Restores the weights that the engine served before the commit.  Repeated once if the answer is lost."""
        adapter, asked = self.adapter, self.asked
        assert asked is not None
        message = Revert(session=asked.session, reason=reason[:4096])
        try:
            return await self.ask("revert", adapter.revert(message), timeout_s=timeout_s)
        except TargetRejected:
            raise
        except WeightcastError:
            return await self.ask("revert", adapter.revert(message), timeout_s=timeout_s)

    async def abort(self, reason: str) -> Ack | None:
        """Ends the session, if one is open or asked for.  Returns None if the engine does not answer."""
        opening = self._opening
        if opening is not None:
            if self.adapter.leased:
                opening.cancel()  # its connection closes, which ends a session that the engine opens after all
            await asyncio.wait([opening])
        if not self.session or self.client.closed:
            self.end()
            return None
        session, self.session = self.session, ""
        try:
            # Without an answer, the end of the lease ends the session too.  A later probe asks for the engine's state.
            return await self._send_end("abort", self.adapter.abort(session, reason), min(_ABORT_S, self._limit_s))
        except WeightcastError:
            return None
        finally:
            self.end()

    def end(self) -> None:
        """Closes the lease."""
        self.session = ""
        if self._lease is not None:
            with suppress(WeightcastError):
                self._lease.close()
            self._lease = None

    async def _send_end(self, kind: str, steps: Steps, limit_s: float) -> Ack:
        """Sends a step that ends a session or a membership.

        A silent engine gets the request, and its answer is hardly waited for: half a second once, then no more.
        """
        if self.silent:
            limit_s = min(limit_s, _SENT_S if self._deaf else _SILENT_S)
        try:
            return await self._converse(kind, steps, limit_s)
        except DeadlineExceeded:
            self._deaf = self.silent
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

    async def _timed(self, kind: str, steps: Steps, limit: float | Deadline, bucket: int | None = None) -> Ack:
        try:
            return await self._converse(kind, steps, limit, bucket)
        except DeadlineExceeded:
            self.silent = True
            raise

    async def _converse(self, kind: str, steps: Steps, limit: float | Deadline, bucket: int | None = None) -> Ack:
        began = time.monotonic()
        send = partial(self._send, at_once=kind in _AT_ONCE)
        try:
            ack = await converse_on_loop(self.client, steps, timeout_s=limit, send=send)
        except WireError as error:
            self._asked(kind, bucket, began, error=str(error))
            raise TargetError(f"{self.url}: {error}", url=self.url, half_updated=self.sent > 0) from error
        except WeightcastError as error:
            self._asked(kind, bucket, began, error=str(error))
            raise
        self._asked(kind, bucket, began, ack)
        with self._adding:  # answers to two buckets may arrive at once
            self.load_s += ack.load_s
            self.verify_s += ack.verify_s
            self.peak_extra_bytes = max(self.peak_extra_bytes, ack.peak_extra_bytes)
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
        reply, self._lease = await self.client.lease(request.path, request.body, timeout_s=limit)
        return reply


def in_flight_to(links: Sequence[Link]) -> int:
    """Returns how many buckets may be announced to all targets before they have answered the first: 1 or 2."""
    return min((link.adapter.in_flight for link in links), default=1)


async def tell(link: Link, steps: Steps, *, what: str, timeout_s: float, bucket: int | None = None) -> None:
    """Announces new weights, a bucket or a folder, to one target and reads the answer.

    Args:
        what: Name of the weights, for the error.
        bucket: Index of the bucket; None for a folder.  The deadline counts from the answer to the bucket before.

    Raises:
        TargetRejected, TargetLost: The error names the target and the weights, and is ``half_updated`` if the engine
            does not stage.
    """
    half = not link.stages
    link.touch()
    try:
        link.took_over(
            await link.ask("folder" if bucket is None else "bucket", steps, timeout_s=timeout_s, bucket=bucket)
        )
    except DeadlineExceeded as error:
        raise TargetLost(
            f"{link.url}: no answer to {what} within {timeout_s:g} s", url=link.url, half_updated=half
        ) from error
    except TargetRejected as error:
        raise TargetRejected(
            f"{link.url} refused {what} after {count_of(link.sent, 'bucket')}: {error}",
            url=link.url,
            half_updated=half,
            hint=error.hint,
            status=error.status,
        ) from error
    except TargetError as error:
        raise TargetLost(
            f"{link.url}: lost at {what} after {count_of(link.sent, 'bucket')}: {error}",
            url=link.url,
            half_updated=half,
        ) from error


def leave_all(links: Sequence[Link], group: str | None = None) -> None:
    """Asks targets to leave a group and to unmap buffers.  A failure becomes a note in the target's link."""
    for error in event_loop.run_each([link.leave(group) for link in links]):
        if error is not None:
            raise error
