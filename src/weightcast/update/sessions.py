"""The sessions of one attempt: one on each target, and what carries the weights to all of them."""

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
from weightcast.protocols import Cell
from weightcast.transports.blame import raise_together, run_each, start_each, wait_each
from weightcast.transports.carriers import Carriers
from weightcast.transports.link import Link, in_flight_to
from weightcast.transports.outcome import Outcome
from weightcast.update.members import Members
from weightcast.wire.answers import Ack
from weightcast.wire.bucket import Bucket
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.messages import BOXES, Open, Owner
from weightcast.wire.pieces import decode_boxes, decode_wanted
from weightcast.wire.plans import UpdateTables

log = logging.getLogger("weightcast.update.sessions")

LEASE_DEADLINES = 4  # an engine ends a session after this many deadlines of one wait without a message


class Sessions:
    """Opens, feeds and ends the sessions of one attempt after the other.  The carriers outlive an attempt.

    Attributes:
        transport_failed: True if the attempt failed because a target could not be connected or given a bucket.
    """

    def __init__(self, members: Members, roster: Roster, config: UpdateConfig) -> None:
        self.links: Sequence[Link] = ()
        self.num_buckets = self.sent_bytes = 0
        self.transport_failed = False
        self._members = members
        self._roster = roster
        self._config = config
        self._carriers: Carriers | None = None
        self._signature: tuple[object, ...] = ()
        self._opening: list[Future[object]] = []
        self._ask: Callable[[], None] = lambda: None
        self._boxes: dict[str, tuple[object, tuple[bytes, ...]]] = {}  # of each target, with its incarnation

    def begin(self) -> None:
        """Starts an attempt, which has no targets yet."""
        self._end_left(self._members.links.values(), "the update before this one did not end")
        for cell in self._cells:
            cell.failure = None
        self.links = ()
        self.transport_failed = False
        self.num_buckets = self.sent_bytes = 0

    def meet_ahead(self, links: Sequence[Link]) -> None:
        """Makes the groups of the updates to come, outside of any session, with engines that can join so.

        If that fails, the first update tries again and reports it; what kept an engine from joining is logged here.
        """
        in_groups = [link for link in links if link.plan.cells]
        if not in_groups or not all(link.adapter.meeting == "weightcast" for link in in_groups):
            return
        self.links = links
        if self._members.plan.exchanges:
            return  # all trainer ranks join such a group, in step
        carriers = self._renewed()
        try:
            carriers.connect()
        except WeightcastError as error:
            log.warning("no process group could be made with the engines yet; the first update tries again: %s", error)

    def begin_open(
        self,
        links: Sequence[Link],
        version: int,
        plan: UpdateTables,
        check: Callable[[Link, Ack], None],
        began: Callable[[Open], None],
    ) -> None:
        """Asks every target for a session.  ``open`` waits for the answers; the trainer fills buckets meanwhile.

        If one of the engines has no lease, it asks in ``open``: such an engine is paused while its session is open.

        ``check`` gets each target's answer; ``began`` gets the message before it is sent.
        """
        self.links = links
        self._renewed()
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
        with self._moving() as carriers:
            if self._members.plan.exchanges:
                carriers.invite()
            else:
                carriers.connect()

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
        readers = [link for link in self.links if link.plan.reads_remotely]
        if not readers or self._config.max_extra_bytes is not None:
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
        return tuple(self._carriers.invited) if self._carriers is not None else ()

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups in which trainer ranks send to engine ranks, those that are well."""
        return tuple(self._carriers.members) if self._carriers is not None else ()

    def connect(self) -> dict[Invited, UpdateGroup]:
        """Makes the groups to which the other trainer ranks are ``invited``; returns those that came about."""
        with self._moving() as carriers:
            invited = carriers.invited
            carriers.connect()
        members = carriers.members
        return {one: members[one.group] for one in invited if one.group in members}

    def lost(self, failures: Mapping[str, str]) -> None:
        """Ends the transfers in groups, by name, in which a trainer rank's messages failed, and raises the causes."""
        errors: list[WeightcastError] = []
        with self._moving() as carriers:
            for name, text in failures.items():
                try:
                    carriers.lost(name, GroupFailed(text))
                except WeightcastError as error:
                    errors.append(error)
            raise_together(errors)

    def send(self, bucket: Bucket, shared: Sequence[Shared]) -> None:
        """Sends a bucket; ``shared`` has the handles to the buffers that hold it."""
        with self._moving() as carriers:
            carriers.send(bucket, shared)
        self.num_buckets += 1
        self.sent_bytes += bucket.layout.size_bytes

    def drain(self) -> None:
        """Waits until every target has taken every bucket."""
        with self._moving() as carriers:
            carriers.drain()

    @property
    def broken(self) -> Sequence[Cell]:
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
        now = await self._members.probe_hastily(link.url)
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
        if self._carriers is not None:
            self._carriers.abort(reason)
        self._end_left(self.links, reason)
        if self._carriers is not None:
            self._carriers.settle()

    def close(self) -> bool:
        """Closes the carriers on both sides; safe to call twice.  False if there were none."""
        self._end_left(self._members.links.values(), "the trainer closes its connections")
        carriers, self._carriers = self._carriers, None
        if carriers is not None:
            carriers.close()
        return carriers is not None

    @contextmanager
    def _moving(self) -> Generator[Carriers]:
        """Notes a failure to reach a target, as opposed to a failure of its session."""
        assert self._carriers is not None
        try:
            yield self._carriers
        except WeightcastError:
            self.transport_failed = True
            raise

    def _renewed(self) -> Carriers:
        """Makes the carriers unless there are some; others if a target came back as another member of its groups."""
        signature = self._sign()
        shown = all(link.info.shows_restart for link in self.links)
        if self._carriers is not None and shown and signature == self._signature:
            return self._carriers
        if self._carriers is not None:
            self._carriers.close()
        self._carriers = self._members.build_carriers(self.links)
        self._signature = signature
        return self._carriers

    def _sign(self) -> tuple[object, ...]:
        return self._members.plan.cell_limit, *((link.info.incarnation, link.plan) for link in self.links)

    @property
    def _cells(self) -> Sequence[Cell]:
        return self._carriers.cells if self._carriers is not None else ()

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
    config: UpdateConfig, links: Sequence[Link], version: int, plan: UpdateTables, *, trainer: str = ""
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
