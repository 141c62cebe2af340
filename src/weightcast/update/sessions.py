"""The sessions of one attempt: one on each target, and the transport that reaches all of them."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from weightcast.comm.rendezvous import Invited
from weightcast.comm.shared_buckets import Shared
from weightcast.comm.update_group import GroupFailed, UpdateGroup
from weightcast.config import UpdateConfig
from weightcast.errors import TargetRejected, WeightcastError, WireError
from weightcast.fleet.roster import Roster
from weightcast.protocols import Exchanging, Transport
from weightcast.transports.blame import raise_together, run_each, start_each, wait_each
from weightcast.transports.cells import InCells
from weightcast.transports.channel import Channel
from weightcast.transports.link import Link, in_flight_to
from weightcast.transports.outcome import Outcome
from weightcast.update.choose import Plan
from weightcast.wire.answers import Ack
from weightcast.wire.bucket import Bucket
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.messages import BOXES, Open, Owner
from weightcast.wire.pieces import decode_boxes, decode_wanted
from weightcast.wire.plans import UpdatePlan

log = logging.getLogger("weightcast.update.sessions")

LEASE_DEADLINES = 4  # an engine ends a session after this many deadlines of one wait without a message


class Sessions:
    """Opens, feeds and ends the sessions of one attempt after the other.  The transport outlives an attempt.

    Attributes:
        transport_failed: True if the attempt failed because a target could not be connected or given a bucket.
    """

    def __init__(self, plan: Plan, roster: Roster, config: UpdateConfig) -> None:
        self.links: Sequence[Link] = ()
        self.num_buckets = self.sent_bytes = 0
        self.transport_failed = False
        self._plan = plan
        self._roster = roster
        self._config = config
        # The transport, and the same as what else it is; to ask for a protocol takes longer than an answer may.
        self._transport: Transport | None = None
        self._exchanging: Exchanging | None = None
        self._in_cells: InCells | None = None
        self._signature: tuple[object, ...] = ()
        self._opening: list[Future[object]] = []
        self._ask: Callable[[], None] = lambda: None
        self._boxes: dict[str, tuple[object, tuple[bytes, ...]]] = {}  # of each target, with its incarnation

    def begin(self) -> None:
        """Starts an attempt, which has no targets yet."""
        self._end_left(self._plan.links.values(), "the update before this one did not end")
        for cell in self._cells:
            cell.failure = None
        self.links = ()
        self.transport_failed = False
        self.num_buckets = self.sent_bytes = 0

    def meet_ahead(self, links: Sequence[Link]) -> None:
        """Makes the groups of the updates to come, outside of any session, with engines that can join so.

        If that fails, the first update tries again and reports it; what kept an engine from joining is logged here.
        """
        in_groups = [link for link in links if self._plan.reach.of(link.url).cells]
        if not in_groups or not all(link.adapter.meeting == "weightcast" for link in in_groups):
            return
        self.links = links
        self._renew_transport()
        if self._transport is None or self._exchanging is not None:
            return  # all trainer ranks join such a group, in step
        try:
            self._transport.connect()
        except WeightcastError as error:
            log.warning("no process group could be made with the engines yet; the first update tries again: %s", error)

    def begin_open(
        self,
        links: Sequence[Link],
        version: int,
        plan: UpdatePlan,
        check: Callable[[Link, Ack], None],
        began: Callable[[Open], None],
    ) -> None:
        """Asks every target for a session.  ``open`` waits for the answers; the trainer fills buckets meanwhile.

        If one of the engines has no lease, it asks in ``open``: such an engine is paused while its session is open.

        ``check`` gets each target's answer; ``began`` gets the message before it is sent.
        """
        self.links = links
        self._renew_transport()
        message = open_message(self._config, links, version, plan, trainer=self._roster.trainer)
        began(message)

        async def open_one(link: Link) -> None:
            check(link, await link.open(message))

        def ask() -> None:
            self._opening = start_each(open_one, links)

        self._ask = ask
        if all(link.adapter.leased for link in links):
            ask()

    def open(self) -> None:
        """Waits until every target has opened its session, and makes their group."""
        if not self._opening:
            self._ask()
        try:
            wait_each(self._opening)
        finally:
            self._tell_opened()
        with self._moving():
            if self._exchanging is not None:
                self._exchanging.invite()
            elif self._transport is not None:
                self._transport.connect()

    def _tell_opened(self) -> None:
        """Tells the roster whose sessions are open."""
        self._opening = []
        for link in self.links:
            if link.session:
                self._roster.opened(link.url)

    def wanted_boxes(self) -> tuple[bytes, ...] | None:
        """The boxes that engine ranks want which read trainer ranks' buffers through NIXL; None if no engine does.

        An engine is asked once for each of its starts.  Without an answer its ranks read each run by itself.
        """
        readers = [link for link in self.links if link.sharing == "remote" and self._config.max_extra_bytes is None]
        if not readers:
            return None

        async def ask(link: Link) -> None:
            known = self._boxes.get(link.url)
            if known is None or known[0] != link.info.incarnation:
                try:
                    answer = await link.client.get(BOXES, timeout_s=self._config.timeout_s)
                    kinds = decode_boxes(answer).kinds
                    for one in kinds:
                        decode_wanted(one)
                except (TargetRejected, WireError) as error:
                    log.info("%s does not say which boxes its ranks want: %s", link.url, error)
                    kinds = ()
                self._boxes[link.url] = link.info.incarnation, kinds

        run_each(ask, readers)
        return tuple(dict.fromkeys(one for link in readers for one in self._boxes[link.url][1]))

    @property
    def invited(self) -> tuple[Invited, ...]:
        """The groups that all trainer ranks must join before anything is sent; empty if there are none."""
        return tuple(self._exchanging.invited) if self._exchanging is not None else ()

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups in which trainer ranks send to engine ranks, those that are well."""
        return tuple(self._exchanging.members) if self._exchanging is not None else ()

    def connect(self) -> dict[Invited, UpdateGroup]:
        """Makes the groups to which the other trainer ranks are ``invited``; returns those that came about."""
        transport, exchanging = self._transport, self._exchanging
        assert transport is not None
        assert exchanging is not None
        invited = exchanging.invited
        with self._moving():
            transport.connect()
        members = exchanging.members
        return {one: members[one.group] for one in invited if one.group in members}

    def lost(self, failures: Mapping[str, str]) -> None:
        """Ends the transfers in groups, by name, in which a trainer rank's messages failed, and raises the causes."""
        transport = self._exchanging
        assert transport is not None
        errors: list[WeightcastError] = []
        with self._moving():
            for name, text in failures.items():
                try:
                    transport.lost(name, GroupFailed(text))
                except WeightcastError as error:
                    errors.append(error)
            raise_together(errors)

    def send(self, bucket: Bucket, shared: Sequence[Shared]) -> None:
        """Sends a bucket; ``shared`` has the handles to the buffers that hold it."""
        assert self._transport is not None
        with self._moving():
            self._transport.send(bucket, shared)
        self.num_buckets += 1
        self.sent_bytes += bucket.layout.size_bytes

    def drain(self) -> None:
        """Waits until every target has taken every bucket."""
        assert self._transport is not None
        with self._moving():
            self._transport.drain()

    @property
    def broken(self) -> Sequence[Channel]:
        """The cells that have failed in this attempt."""
        return [cell for cell in self._cells if cell.failure is not None]

    async def close_one(self, link: Link, *, by_name: bool = False) -> Ack:
        """Tells a target that everything was sent; ``by_name`` asks for the digest of each tensor."""
        return await link.close(buckets=self.num_buckets, timeout_s=self._config.timeout_s, by_name=by_name)

    async def commit_again(self, link: Link, outcome: Outcome, lost: WeightcastError) -> Ack:
        """Returns the answer to a Commit whose first answer was lost; TargetRejected if it has not switched.

        ``lost`` is raised if the engine cannot be asked or does not know; its outcome is in doubt then.
        """
        outcome.in_doubt = True
        if not link.adapter.leased:
            raise lost  # the engine would take a second Commit for another one
        now = await self._plan.probe_hastily(link.url)
        if not isinstance(now, EngineInfo):
            raise lost
        try:
            ack = await link.commit_again(timeout_s=self._config.timeout_s)
        except TargetRejected:
            outcome.in_doubt = False
            raise
        except WeightcastError:
            raise lost from None
        outcome.in_doubt = False
        outcome.notes.append(f"its answer to Commit was lost ({lost}); asked again, it had switched")
        return ack

    def abort(self, reason: str) -> None:
        """Ends every session that is open or asked for, and tells the roster which targets kept one whole version."""
        self._tell_opened()
        if self._transport is not None:
            self._transport.abort(reason)
        self._end_left(self.links, reason)
        if self._transport is not None:
            self._transport.settle()

    def close(self) -> bool:
        """Closes the transport on both sides; safe to call twice.  False if there was none."""
        self._end_left(self._plan.links.values(), "the trainer closes its connections")
        transport = self._transport
        self._transport = self._exchanging = self._in_cells = None
        if transport is not None:
            transport.close()
        return transport is not None

    @contextmanager
    def _moving(self) -> Generator[None]:
        """Notes a failure to reach a target, as opposed to a failure of its session."""
        try:
            yield
        except WeightcastError:
            self.transport_failed = True
            raise

    def _renew_transport(self) -> None:
        """Makes a transport unless there is one; a new one if a target came back as another member of its groups."""
        signature = self._sign()
        shown = all(link.info.shows_restart for link in self.links)
        if self._transport is not None and shown and signature == self._signature:
            return
        if self._transport is not None:
            self._transport.close()
        self._transport = made = self._plan.build_transport(self.links)
        self._exchanging = made if isinstance(made, Exchanging) else None
        self._in_cells = made if isinstance(made, InCells) else None
        self._signature = signature

    def _sign(self) -> tuple[object, ...]:
        return self._plan.cell_limit, *(
            (link.url, link.info.incarnation, spec.name, spec.primitive, link.near, link.reads)
            for link in self.links
            if (spec := self._plan.reach.of(link.url))
        )

    @property
    def _cells(self) -> Sequence[Channel]:
        return self._in_cells.cells if self._in_cells is not None else ()

    def _end_left(self, links: Iterable[Link], reason: str) -> None:
        left = [link for link in links if link.is_open]
        self._abort_each(left, {link.url: reason for link in left})

    def _abort_each(self, links: Sequence[Link], reasons: Mapping[str, str]) -> None:
        if not links:
            return
        answers: dict[str, Ack | None] = {}

        async def abort(link: Link) -> None:
            answers[link.url] = await link.abort(reasons[link.url])

        wait_each(start_each(abort, links))  # which goes on to its end, even if an interrupt ends the wait
        for link in links:
            answer, reason = answers[link.url], reasons[link.url]
            if link.silent:
                self._roster.fell_silent(link.url, reason)
            whole = answer is not None and answer.state == "serving" and not link.mixed
            if answer is not None and link.adapter.leased and answer.version != link.info.version:
                whole, reason = False, f"{reason}; by then the engine had switched to version {answer.version}"
            self._roster.broke_off(link.url, reason, whole=whole)


def this_process() -> Owner:
    """This process as the owner of sessions, and of memory that engines map."""
    return Owner(host=socket.gethostname(), pid=os.getpid())


def open_message(
    config: UpdateConfig, links: Sequence[Link], version: int, plan: UpdatePlan, *, trainer: str = ""
) -> Open:
    """Returns the message that opens a new session on these targets; ``trainer`` is ``Roster.trainer``."""
    # A receiver that knows the sizes of broadcasts may post bucket n+1's receive before it replies to n, so the sender
    # must not wait for that reply.
    plan = plan if in_flight_to(links) > 1 else plan.without_sizes
    return Open(
        session=(secrets.token_hex(16) + trainer)[-32:],
        owner=this_process(),
        version=version,
        allow_older=config.allow_older,
        timeout_s=config.timeout_s,
        lease_s=config.timeout_s * LEASE_DEADLINES,
        pause=links[0].pause or "abort",  # those with another one say so (``Link.open``)
        verify=config.verify,
        specs=plan.specs,
        bucket_sizes=plan.bucket_sizes,
        plan=plan,
    )
