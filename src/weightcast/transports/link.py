"""One target during one update: its connection, its adapter, its session.

A request that fails says which target and, after the first bucket, that it may be half updated.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from weightcast.comm.converse import converse, send_plain
from weightcast.comm.http import Client, Lease
from weightcast.comm.share import Shared
from weightcast.errors import DeadlineExceeded, TargetError, TargetRejected, WeightcastError, WireError
from weightcast.protocols import Adapter, EngineRequest, Sharing, Steps
from weightcast.wire.messages import Ack, Close, Commit, EngineInfo, Open

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
        mixed: True if its live weights may be parts of two versions and it does not know that itself.
        silent: True once it let a deadline pass.
        load_s: Seconds that its slowest rank spent copying, so far.
        verify_s: Likewise on digests.
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
    opened: Ack | None = None
    closed: Ack | None = None
    committed: Ack | None = None
    _limit_s: float = _ABORT_S
    _lease: Lease | None = field(default=None, repr=False)
    _adding: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def url(self) -> str:
        """The engine's URL."""
        return self.client.target.url

    @property
    def stages(self) -> bool:
        """True if a bucket changes nothing that is live."""
        return self.info.staging != "none"

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
        self.opened = self.closed = self.committed = None
        self._check_version(message)
        # Without a lease nothing tells the engine of the end but we, even if it went wrong half way through opening.
        self.session = "" if self.adapter.leased else message.session
        self._limit_s = message.timeout_s
        self.opened = self._timed(self.adapter.open(message), message.timeout_s)
        self.session = message.session
        return self.opened

    def ask(self, steps: Steps, *, timeout_s: float) -> Ack:
        """Send a step's requests and read the answer; its costs are added up.

        The engine keeps the deadline itself and answers; ours is a little later, for an engine that cannot.
        """
        return self._timed(steps, timeout_s + margin_s(timeout_s))

    def let_go(self, steps: Steps, *, limit_s: float = _LEAVE_S) -> Ack | None:
        """Send a step that ends something; None if the engine does not answer.

        One that has been silent before is not waited for: if it lives, it hears of it.
        """
        limit_s = min(limit_s, _SILENT_S) if self.silent else limit_s
        try:
            return self._converse(steps, limit_s)
        except WeightcastError:
            return None

    def took_over(self, ack: Ack | None = None) -> None:
        """One bucket more; with the last one an engine may have closed, which its answer says."""
        with self._adding:
            self.sent += 1
            if ack is not None and ack.closed:
                self.closed = ack

    def touch(self) -> None:
        """A bucket is on its way: from here on live weights may be parts of two versions."""
        self.mixed = not self.adapter.leased

    def close(self, *, buckets: int, timeout_s: float, by_name: bool = False) -> Ack:
        """Everything was sent.

        Args:
            buckets: So many.
            timeout_s: The deadline.
            by_name: The digest of each tensor is to be answered.
        """
        message = Close(session=self.session, buckets=buckets, by_name=by_name)
        self.closed = self.ask(self.adapter.close(message), timeout_s=timeout_s)
        return self.closed

    def commit(self, expected: Mapping[str, str], *, as_received: bool, timeout_s: float) -> Ack:
        """Make it live.

        Args:
            expected: Digest by tensor name of what it is to keep otherwise than it received it.
            as_received: It is to keep the rest as it received it; without either there is no proof.
            timeout_s: The deadline.
        """
        message = Commit(session=self.session, expected=dict(expected), as_received=as_received)
        self.committed = self.ask(self.adapter.commit(message), timeout_s=timeout_s)
        self.mixed = False
        self.end()
        return self.committed

    def abort(self, reason: str) -> Ack | None:
        """End the session if one is open; None if the engine does not answer."""
        if not self.session:
            return None
        session, self.session = self.session, ""
        try:
            # Without an answer the lease's closing tells the engine too; what became of it is asked later.
            return self.let_go(self.adapter.abort(session, reason), limit_s=min(_ABORT_S, self._limit_s))
        finally:
            self.end()

    def end(self) -> None:
        """Let the lease go."""
        self.session = ""
        if self._lease is not None:
            with suppress(WeightcastError):
                self._lease.close()
            self._lease = None

    def _check_version(self, message: Open) -> None:
        """Engines with our receiver refuse this themselves; the others take what comes."""
        served = self.info.version
        if not self.adapter.leased and served is not None and message.version < served and not message.allow_older:
            raise TargetRejected(
                f"{self.url}: version {message.version} is older than {served}, which is served",
                url=self.url,
                hint="count up, or allow an older version on purpose (allow_older, --allow-older)",
            )

    def _timed(self, steps: Steps, limit_s: float) -> Ack:
        try:
            return self._converse(steps, limit_s)
        except DeadlineExceeded:
            self.silent = True
            raise

    def _converse(self, steps: Steps, timeout_s: float) -> Ack:
        try:
            ack = converse(self.client, steps, timeout_s=timeout_s, send=self._send)
        except WireError as error:
            raise TargetError(f"{self.url}: {error}", url=self.url, half_updated=self.sent > 0) from error
        with self._adding:  # two buckets may be answered at once
            self.load_s += ack.load_s
            self.verify_s += ack.verify_s
            self.peak_extra_bytes = max(self.peak_extra_bytes, ack.peak_extra_bytes)
        return ack

    def _send(self, request: EngineRequest, limit_s: float) -> bytes:
        if not request.lease:
            return send_plain(self.client, request, limit_s)
        reply, self._lease = self.client.open_lease(request.path, request.body, timeout_s=limit_s)
        return reply


def in_flight_to(links: Sequence[Link]) -> int:
    """How many buckets all targets may be told of before they have answered the first."""
    return min((link.adapter.in_flight for link in links), default=1)
