"""One target during one update: its connection, its adapter, its session.

A request that fails says which target and, after the first bucket, that it may be half updated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from weightcast.comm.http import Client, Lease
from weightcast.comm.run_steps import EngineRequest, Steps, converse, send_plain
from weightcast.comm.shared_buckets import Shared
from weightcast.errors import DeadlineExceeded, TargetError, TargetLost, TargetRejected, WeightcastError, WireError
from weightcast.protocols import Adapter, Reverting, Sharing
from weightcast.runtime.deadline import Deadline
from weightcast.watch.events import Asked, Events
from weightcast.wire.messages import Ack, Close, Commit, EngineInfo, Open, Revert

_ABORT_S = 30.0
_LEAVE_S = 5.0
_SILENT_S = 0.5
_MARGIN_S = 5.0


def margin_s(timeout_s: float) -> float:
    """How much later than an engine's own deadline the sender's is, in seconds."""
    return min(_MARGIN_S, 0.5 + timeout_s / 4)


@dataclass(slots=True, kw_only=True)
class Link:
    """A target that takes part.

    Attributes:
        client: HTTP to it.
        adapter: Its language.
        info: What it said of itself when it was probed.
        group_rank: Rank of its first engine rank in the broadcast group.
        session: Id of the session that is open there; empty without one.
        sharing: How buffers are handed to it over ``ipc``.
        opens: Which of torch's handles to a buffer are this target's.
        planned: True once what is sent, and how, was checked against this target.
        sent: Buckets that it has taken over.
        digest: Model digest of what it committed last; None if nothing was committed or no digest was taken.
        mixed: True if its live weights may be parts of two versions and it does not know that itself.
        silent: True once it let a deadline pass.
        load_s: Seconds that its slowest rank spent copying, so far.
        verify_s: Likewise on digests.
        asked: The Commit of this session, from when it is sent.
        notes: What went wrong beside the update, since ``take_notes`` was called last.
        events: Told of every message.
    """

    client: Client
    adapter: Adapter
    info: EngineInfo
    group_rank: int = 1
    sharing: Sharing = "weightcast"
    opens: slice = field(default_factory=lambda: slice(0, 0))
    planned: bool = False
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
    _limit_s: float = _ABORT_S
    _lease: Lease | None = field(default=None, repr=False)
    _adding: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _answered_at: dict[int, float] = field(default_factory=dict, repr=False)  # by bucket, ``time.monotonic``

    @property
    def url(self) -> str:
        """The engine's URL."""
        return self.client.target.url

    @property
    def stages(self) -> bool:
        """True if a bucket changes nothing that is live."""
        return self.info.staging != "none"

    @property
    def can_revert(self) -> bool:
        """True if the engine can go back to what it served, after a commit."""
        return self.stages and isinstance(self.adapter, Reverting)

    def shared(self, buffers: Sequence[Shared]) -> list[Shared]:
        """The handles that are for this target."""
        if self.sharing == "ring":
            return [Shared(memory=buffer.memory, ring=buffer.ring[self.opens]) for buffer in buffers]
        return [Shared(memory=buffer.memory, torch=buffer.torch[self.opens]) for buffer in buffers]

    def open(self, message: Open) -> Ack:
        """Start a session; it ends when this process does, if the engine can tell."""
        self.load_s = self.verify_s = 0.0
        self.peak_extra_bytes = self.sent = 0
        self.silent = False
        self._answered_at.clear()
        self.opened = self.closed = self.committed = self.asked = None
        self._check_version(message)
        # Without a lease nothing tells the engine of the end but we, even if it went wrong half way through opening.
        self.session = "" if self.adapter.leased else message.session
        self._limit_s = message.timeout_s
        traceparent = self.events.traceparent(self.url)
        if traceparent:
            message = msgspec.structs.replace(message, traceparent=traceparent)
        self.opened = self._timed("open", self.adapter.open(message), message.timeout_s)
        self.session = message.session
        return self.opened

    def ask(self, kind: str, steps: Steps, *, timeout_s: float, bucket: int | None = None) -> Ack:
        """Send a step's requests and read the answer; its costs are added up.

        The engine keeps the deadline itself and answers; ours is a little later, for an engine that cannot.

        Args:
            kind: Name of the step in events: ``Asked.message``.
            steps: The requests.
            timeout_s: The engine's deadline, in seconds.
            bucket: Index of the bucket that the step is about.  An engine may hear of it while it still loads the one
                before, so the clock begins when that one has been answered.
        """
        limit_s = timeout_s + margin_s(timeout_s)
        if bucket is None:
            return self._timed(kind, steps, limit_s)
        try:
            return self._timed(kind, steps, Deadline(limit_s, begins=lambda: self._turn_began(bucket)), bucket)
        finally:
            self._answered_at[bucket] = time.monotonic()

    def _turn_began(self, bucket: int) -> float | None:
        """When the engine was through with the bucket before; None while it is not."""
        if bucket == 0 or self.silent:  # a silent engine is not waited for twice
            return 0.0
        return self._answered_at.get(bucket - 1)

    def leave(self, group: str | None) -> None:
        """Tell the engine to leave a group, or to unmap buffers if ``group`` is None.  A failure becomes a note."""
        try:
            self._let_go("leave", self.adapter.leave(group), _LEAVE_S)
        except WeightcastError as error:
            what = f"leave the group {group}" if group is not None else "let go of the trainer's buffers"
            self.notes.append(f"the engine did not {what}, and may keep its memory: {error}")

    def take_notes(self) -> tuple[str, ...]:
        """Returns the notes since the last call, each once."""
        notes, self.notes = tuple(dict.fromkeys(self.notes)), []
        return notes

    def took_over(self, ack: Ack | None = None) -> None:
        """Counts a bucket that the engine took over; the answer to the last one may say that the session closed."""
        with self._adding:
            self.sent += 1
            if ack is not None and ack.closed:
                self.closed = ack

    def touch(self) -> None:
        """A bucket is on its way: from here on live weights may be parts of two versions."""
        self.mixed = not self.adapter.leased

    def close(self, *, buckets: int, timeout_s: float, by_name: bool = False) -> Ack:
        """Tells the engine that everything was sent.

        Args:
            buckets: So many.
            timeout_s: The deadline.
            by_name: The digest of each tensor is to be answered.
        """
        message = Close(session=self.session, buckets=buckets, by_name=by_name)
        self.closed = self.ask("close", self.adapter.close(message), timeout_s=timeout_s)
        return self.closed

    def commit(self, expected: Mapping[str, str], *, as_received: bool, timeout_s: float) -> Ack:
        """Makes the new weights live.

        Args:
            expected: Digest by tensor name of what it is to keep otherwise than it received it.
            as_received: It is to keep the rest as it received it; without either there is no proof.
            timeout_s: The deadline.
        """
        self.asked = Commit(session=self.session, expected=dict(expected), as_received=as_received)
        return self._commit(self.asked, timeout_s)

    def commit_again(self, *, timeout_s: float) -> Ack:
        """Sends the Commit again whose answer was lost.

        An engine with our receiver switches once, and repeats its answer.

        Raises:
            TargetRejected: It has not committed the session, and will not.
        """
        assert self.asked is not None
        return self._commit(self.asked, timeout_s)

    def _commit(self, message: Commit, timeout_s: float) -> Ack:
        self.committed = self.ask("commit", self.adapter.commit(message), timeout_s=timeout_s)
        self.mixed = False
        self.end()
        return self.committed

    def revert(self, reason: str, *, timeout_s: float) -> Ack:
        """Go back to what the engine served before the commit.  Said again once, if its answer is lost."""
        adapter, asked = self.adapter, self.asked
        assert isinstance(adapter, Reverting)
        assert asked is not None
        message = Revert(session=asked.session, reason=reason[:4096])
        try:
            return self.ask("revert", adapter.revert(message), timeout_s=timeout_s)
        except TargetRejected:
            raise
        except WeightcastError:
            return self.ask("revert", adapter.revert(message), timeout_s=timeout_s)

    def abort(self, reason: str) -> Ack | None:
        """End the session if one is open; None if the engine does not answer."""
        if not self.session:
            return None
        session, self.session = self.session, ""
        try:
            # Without an answer the lease's closing tells the engine too; what became of it is asked later.
            return self._let_go("abort", self.adapter.abort(session, reason), min(_ABORT_S, self._limit_s))
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

    def _let_go(self, kind: str, steps: Steps, limit_s: float) -> Ack:
        """Send a step that ends something.

        An engine that has been silent is not waited for: if it lives, it hears of it.
        """
        return self._converse(kind, steps, min(limit_s, _SILENT_S) if self.silent else limit_s)

    def _check_version(self, message: Open) -> None:
        """Engines with our receiver refuse this themselves; the others take what comes."""
        served = self.info.version
        if not self.adapter.leased and served is not None and message.version < served and not message.allow_older:
            raise TargetRejected(
                f"{self.url}: version {message.version} is older than {served}, which is served",
                url=self.url,
                hint="count up, or allow an older version on purpose (allow_older, --allow-older)",
            )

    def _timed(self, kind: str, steps: Steps, limit: float | Deadline, bucket: int | None = None) -> Ack:
        try:
            return self._converse(kind, steps, limit, bucket)
        except DeadlineExceeded:
            self.silent = True
            raise

    def _converse(self, kind: str, steps: Steps, limit: float | Deadline, bucket: int | None = None) -> Ack:
        began = time.monotonic()
        try:
            ack = converse(self.client, steps, timeout_s=limit, send=self._send)
        except WireError as error:
            self._asked(kind, bucket, began, error=str(error))
            raise TargetError(f"{self.url}: {error}", url=self.url, half_updated=self.sent > 0) from error
        except WeightcastError as error:
            self._asked(kind, bucket, began, error=str(error))
            raise
        self._asked(kind, bucket, began, ack)
        with self._adding:  # two buckets may be answered at once
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

    def _send(self, request: EngineRequest, limit: Deadline) -> bytes:
        if not request.lease:
            return send_plain(self.client, request, limit)
        reply, self._lease = self.client.open_lease(request.path, request.body, timeout_s=limit)
        return reply


def in_flight_to(links: Sequence[Link]) -> int:
    """How many buckets all targets may be told of before they have answered the first."""
    return min((link.adapter.in_flight for link in links), default=1)


def tell(link: Link, steps: Steps, *, what: str, timeout_s: float, bucket: int | None = None) -> None:
    """Tells one target of new weights, a bucket or a folder, and reads its answer.

    Args:
        link: The target.
        steps: The requests.
        what: Name of the weights, for the error.
        timeout_s: Deadline of the answer, in seconds.
        bucket: Index of the bucket, if the weights are one.  Its clock begins when the target has answered to the
            bucket before.

    Raises:
        TargetRejected, TargetLost: The error names the target and the weights.  It says "half updated" if the engine
            does not stage.
    """
    half = not link.stages
    link.touch()
    try:
        link.took_over(link.ask("folder" if bucket is None else "bucket", steps, timeout_s=timeout_s, bucket=bucket))
    except DeadlineExceeded as error:
        raise TargetLost(
            f"{link.url}: no answer to {what} within {timeout_s:g} s", url=link.url, half_updated=half
        ) from error
    except TargetRejected as error:
        raise TargetRejected(
            f"{link.url} refused {what} after {link.sent} buckets: {error}",
            url=link.url,
            half_updated=half,
            hint=error.hint,
            status=error.status,
        ) from error
    except TargetError as error:
        raise TargetLost(
            f"{link.url}: lost at {what} after {link.sent} buckets: {error}", url=link.url, half_updated=half
        ) from error


def leave_all(links: Sequence[Link], group: str | None = None) -> None:
    """Asks targets to leave a group and to unmap buffers.  A failure becomes a note in the target's link."""

    def leave(link: Link) -> None:
        link.leave(group)

    with ThreadPoolExecutor(max_workers=max(1, len(links))) as pool:
        list(pool.map(leave, links))
