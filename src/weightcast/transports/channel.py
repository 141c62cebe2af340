"""One cell: a process group that joins the trainer's head, or all trainer ranks, and the engine ranks.

Rank 0 of the group is the head; the engine ranks follow the trainer's, target by target.  For each bucket, the head
posts to every target, enters the collective, and reads the replies last, because engines answer after they have
received.  A target that refuses never enters the collective, so the head aborts the group and does not wait.  If the
engines allow it, the head posts the next bucket while this one is in flight.  Where trainer ranks send by themselves,
there is no collective to enter (``update/exchange.py``), and one post announces several buckets.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, as_completed, wait
from typing import Any, cast

import torch

from weightcast.comm import event_loop
from weightcast.comm.nccl import NcclGroup, nccl_binding, new_unique_id
from weightcast.comm.rendezvous import Invited, Rendezvous
from weightcast.comm.shared_buckets import Shared
from weightcast.comm.update_group import GroupFailed, UpdateGroup, backend_for
from weightcast.errors import DeadlineExceeded, TargetError, TargetLost, TargetRejected, WeightcastError
from weightcast.protocols import Invitation, Meeting
from weightcast.transports.blame import find_culprit, together
from weightcast.transports.handles import handles_for
from weightcast.transports.in_flight import InFlight
from weightcast.transports.link import Link, leave_all, tell, words_for
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout
from weightcast.wire.messages import Join

log = logging.getLogger("weightcast.transports.channel")

_COME_S = 1.0  # for engines on their way to the rendezvous to reach it
_OTHERS_S = 1.0  # for other stock engines to refuse, once one has


class Channel:
    """The group of some targets that share one way of rendezvous.

    ``failure`` is the reason why this cell has failed in this attempt; None if it is well.

    Thread rule: one thread at a time calls ``connect`` or ``close``, as many as buckets may be in flight ``send``;
    ``abort`` may come from any other.
    """

    def __init__(
        self,
        links: Sequence[Link],
        *,
        meeting: Meeting,
        device: torch.device,
        host: str,
        bucket_bytes: int,
        timeout_s: float,
        in_flight: int = 1,
        trainers: int | None = None,
        chains: bool = False,
    ) -> None:
        """Nothing is created yet; ConfigError if NCCL's id needs a binding that is not installed.

        ``trainers`` is the number of trainer ranks, all of which are members and send to engine ranks by themselves;
        None for a group in which the head broadcasts.  With ``chains``, engine ranks pass on what trainer ranks send.
        """
        if meeting == "nccl-id":
            nccl_binding()  # here, not in ``connect``, because no engine is paused yet
        self.links = list(links)
        self._meeting: Meeting = meeting
        self._device = device
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._in_flight = in_flight
        self._sent = InFlight()
        self._failing = threading.Lock()
        self._group: UpdateGroup | NcclGroup | None = None
        self._store: Rendezvous | None = None
        self._trainers = trainers
        self._chains = chains
        self._invited: Invited | None = None
        self.failure: WeightcastError | None = None

    @property
    def urls(self) -> Sequence[str]:
        """As ``Cell.urls``."""
        return [link.url for link in self.links]

    def begin(self) -> None:
        """Starts an attempt, in which no bucket was sent yet.  Called before ``invite`` and ``connect``."""
        self.settle()
        self._sent.begin()
        self.failure = self._invited = None

    def fail(self, error: WeightcastError) -> None:
        """Keeps an error as the reason why this cell has failed in this attempt, beside those that came before."""
        with self._failing:  # two buckets may fail at once
            found = together((self.failure, error))
            assert isinstance(found, WeightcastError)
            self.failure = found

    def member(self) -> UpdateGroup | None:
        """The head's end of a group of all trainer ranks; None before ``connect`` and after a failure."""
        assert not isinstance(self._group, NcclGroup)
        return self._group if self.failure is None and self._invited is None else None

    @property
    def name(self) -> str:
        """Name of the group, or of the one that comes next; empty if there is none."""
        if self._invited is not None:
            return self._invited.group
        return "" if self._group is None else self._group.name

    @property
    def invited(self) -> Invited | None:
        """The group that ``connect`` makes; None if it lives, or was not yet ``invite``d."""
        return self._invited if self.failure is None else None

    def lose(self, error: WeightcastError) -> None:
        """Ends the transfers because messages of a trainer rank failed; raises the error of the cause."""
        self._invited = None
        self.abort(str(error))
        self.drain()
        raise error

    def invite(self) -> Invited | None:
        """Opens the rendezvous of a new group; None if there is a group that lives."""
        if self._group is not None:
            if self._group.alive:
                return None
            self.close()
        self._store = Rendezvous(host=self._host, timeout_s=self._timeout_s)
        rank = self._trainers or 1
        for link in self.links:
            link.group_rank = rank
            rank += len(link.members)
        self._invited = Invited(
            group=f"weightcast-{secrets.token_hex(4)}",
            host=self._host,
            port=self._store.port,
            token=secrets.token_hex(16),
            world_size=rank,
            reads=tuple(link.plan.reads[one] for link in self.links for one in link.members if link.plan.reads),
        )
        return self._invited

    def connect(self) -> None:
        """Makes the group if there is none.

        TargetError names and quotes targets that could not join or did not come, DeadlineExceeded those not known.
        """
        invited = self._invited or self.invite()
        if invited is None:
            return
        self._invited = None
        meeting, name, token, rank = self._store, invited.group, invited.token, invited.world_size
        assert meeting is not None
        unique_id = new_unique_id() if self._meeting == "nccl-id" else b""
        for link in self.links:
            for key, value in link.adapter.stored(unique_id).items() if unique_id else ():
                cast(Any, meeting.store).set(key, value)  # it takes bytes, although its annotations say text
        refused, on_gpu = threading.Event(), self._device.type == "cuda"
        deadline = time.monotonic() + self._timeout_s  # engines start later, so their deadlines end later
        joining = [link for link in self.links if link.members]
        joins = event_loop.submit(
            [
                _join(
                    link,
                    Invitation(
                        join=Join(
                            session=link.session.id,
                            group=name,
                            host=self._host,
                            port=meeting.port,
                            token=token,
                            first_rank=link.group_rank,
                            world_size=rank,
                            backend=backend_for(self._device),
                            timeout_s=self._timeout_s,
                            wants=self._trainers is not None,
                            relays=self._chains,
                            members=link.members if link.plan.near else (),
                        ),
                        bucket_bytes=self._bucket_bytes,
                        unique_id=unique_id,
                    ),
                )
                for link in joining
            ]
        )
        for join in joins:
            join.add_done_callback(lambda done: refused.set() if done.exception() is not None else None)
        try:
            if unique_id:
                self._group = NcclGroup(
                    unique_id=unique_id,
                    name=name,
                    rank=0,
                    world_size=rank,
                    device=self._device,
                    timeout_s=self._timeout_s,
                    cancelled=refused,
                )
            else:
                self._group = UpdateGroup(
                    # Gloo waits for the others inside torch and holds its store, so it needs another one than ours.
                    # A store that is asked again later must not be the one that listens.
                    store=(lambda: meeting.store) if on_gpu and self._meeting == "torch" else meeting.visit,
                    name=name,
                    token=token,
                    rank=0,
                    world_size=rank,
                    device=self._device,
                    address=self._host,
                    timeout_s=self._timeout_s,
                    cancelled=refused,  # a target that refuses will never come
                    meeting="torch" if self._meeting == "torch" else "weightcast",
                    tells=None if self._trainers is None else b"",
                )
                if self._chains:
                    self._group.set_relays(self._trainers or 1)
            for join in joins:
                join.result()
        except BaseException as error:
            self._await_refusals(error, joins)
            self.abort("not all could join")
            answered = _answered(joins)  # later answers follow from the abort
            suspects = joining
            if time.monotonic() < deadline:  # targets without an answer may be on their way
                suspects = [link for link, join in zip(joining, joins, strict=True) if join in answered]
            absent = _absent(suspects if self._meeting == "weightcast" else (), meeting, token, rank)
            if self._meeting == "torch" and refused.is_set():
                # Torch retries for half an hour where no process listens, so engines on their way must arrive first.
                wait(joins, timeout=min(self._timeout_s, _COME_S))
            meeting.close()  # a stock engine would wait there for half an hour
            raise find_culprit(
                error,
                joins,
                name,
                links=joining,
                timeout_s=self._timeout_s,
                tells_group_failure=self._meeting == "weightcast",
                first=answered,
                absent=absent,
            ) from error

    def send(self, bucket: Bucket, filled: torch.cuda.Event | None, shared: Sequence[Shared] = ()) -> None:
        """Posts and broadcasts a bucket, and reads the replies; with two in flight, those to the bucket before.

        When it returns, the bucket may be filled again.  On a GPU, ``filled`` completes when it is filled.  After an
        error the group is aborted, and the culprit named if known.
        """
        group = self._group
        assert group is not None, "connect() comes first"
        index = bucket.layout.index
        self._read_replies(index - self._in_flight)
        posts = event_loop.submit(
            [
                tell(
                    link,
                    link.adapter.bucket(
                        link.session.id,
                        bucket.layout,
                        group=group.name if link.members else None,
                        # Another transport of a mixed update may share the bucket in memory, which is not for members.
                        shared=handles_for(link, shared) if link.plan.near or link.plan.reads else (),
                    ),
                    what=range(index, index + 1),
                    timeout_s=self._timeout_s,
                )
                for link in self.links
            ]
        )

        try:
            if filled is not None:
                filled.synchronize()
            if self._trainers is None:
                with self._sent.turn(index, lambda: group.alive):
                    began = time.monotonic()
                    data = bucket.data[: bucket.layout.size_bytes]
                    work = group.start_broadcast(data) if data.numel() else None
                if work is not None:
                    group.finish(
                        work, what=f"bucket {index}", timeout_s=self._timeout_s, poll=lambda: _raise_refusals(posts)
                    )
                self.links[0].events.step_ended("wire", began, time.monotonic(), bucket=index)
            if any(link.plan.near or any(link.plan.reads) for link in self.links):
                wait(posts)  # ranks may still read the bucket in memory
                _raise_refusals(posts)
        except BaseException as error:
            self._await_refusals(error, posts)
            answered = _answered(posts)
            group.abort(f"bucket {index} failed")
            try:
                self.drain()  # the bucket before may have failed and be the cause
            except WeightcastError as cause:
                raise cause from error
            raise self._give_up(error, posts, range(index, index + 1), answered) from error
        self._sent.expect(range(index, index + 1), posts)
        if self._in_flight == 1:
            self.drain()

    def announce(self, layouts: Sequence[BucketLayout]) -> None:
        """Posts buckets that trainer ranks send by themselves; with two in flight, reads the replies to earlier ones.

        After an error the group is aborted, and the culprit named if known.
        """
        group, buckets = self._group, range(layouts[0].index, layouts[-1].index + 1)
        assert group is not None, "connect() comes first"
        while len(self._sent) >= self._in_flight and (first := self._sent.first()) is not None:
            self._read_replies(first.buckets[-1])
        steps = (link.adapter.messages(link.session.id, layouts, group=group.name) for link in self.links)
        posts = event_loop.submit(
            [
                tell(link, one, what=buckets, timeout_s=self._timeout_s)
                for link, one in zip(self.links, steps, strict=True)
            ]
        )
        self._sent.expect(buckets, posts)

    def drain(self) -> None:
        """Reads the replies that are due; raises as ``send``."""
        self._read_replies(None)

    def _read_replies(self, last: int | None) -> None:
        """Reads the replies to the buckets up to ``last``; None for all.

        A reply stays due until it is read and good.  So a thread that fails because of a bad reply finds that reply.
        """
        while (unanswered := self._sent.first(last)) is not None:
            buckets, posts = unanswered
            try:
                for post in as_completed(posts):
                    post.result()
            except BaseException as error:
                raise self._give_up(error, posts, buckets, _answered(posts)) from error
            self._sent.was_answered(unanswered)

    def settle(self) -> None:
        """Waits for the replies that are due, good or bad."""
        self._sent.settle()

    def _give_up(
        self, error: BaseException, posts: Sequence[Future[None]], buckets: range, answered: Sequence[Future[None]]
    ) -> BaseException:
        """Aborts the group and returns the error to raise.  Answers that come later follow from the abort."""
        group, what = self._group, words_for(buckets)
        assert group is not None
        group.abort(f"{what} failed")
        self._release_waiting(group.name, posts)
        return find_culprit(
            error,
            posts,
            what,
            links=self.links,
            timeout_s=self._timeout_s,
            tells_group_failure=self._meeting == "weightcast",
            first=answered,
        )

    def _await_refusals(self, error: BaseException, posts: Sequence[Future[None]]) -> None:
        """Gives stock engines a moment to refuse on their own, before the abort makes them answer."""
        if self._meeting != "weightcast" and isinstance(error, TargetRejected):
            wait(posts, timeout=min(self._timeout_s, _OTHERS_S))

    def abort(self, reason: str) -> None:
        """Ends every wait; the next ``connect`` makes a new group.  Safe to call twice and from any thread."""
        if self._group is not None:
            self._group.abort(reason)

    def close(self) -> None:
        """Closes the group on both sides; safe to call twice."""
        if self._group is not None:
            leave_all(self.links, self._group.name)
            self._group.close()
            self._group = None
        self._store = None

    def _release_waiting(self, name: str, posts: Sequence[Future[None]]) -> None:
        """Tells stock engines on CPUs that a broadcast failed.

        Gloo's bytes go from member to member.  An engine that waits for another engine does not notice our abort and
        waits for half an hour.  Engines that have answered are told to leave, which ends the waits for them.
        """
        if self._meeting == "torch" and self._device.type == "cpu":
            answered = [link for link, post in zip(self.links, posts, strict=True) if post.done()]
            leave_all(answered, name)


def _absent(links: Sequence[Link], meeting: Rendezvous, token: str, world_size: int) -> dict[str, list[int]]:
    """Returns the absent engine ranks by URL, of members with our own rendezvous."""
    try:
        missing = meeting.absent(token, world_size) if links else ()
    except GroupFailed:  # the reason under inspection is better than this one
        return {}
    found: dict[str, list[int]] = {}
    for link in links:
        ranks = [rank for place, rank in enumerate(link.members) if link.group_rank + place in missing]
        if ranks:
            found[link.url] = ranks
    return found


def _raise_refusals(posts: Sequence[Future[None]]) -> None:
    for post in posts:
        if post.done() and (error := post.exception()) is not None:
            raise error


def _answered(posts: Sequence[Future[None]]) -> list[Future[None]]:
    return [post for post in posts if post.done()]


async def _join(link: Link, invitation: Invitation) -> None:
    try:
        await link.ask("join", link.adapter.join(invitation), timeout_s=invitation.join.timeout_s)
    except TargetError:
        raise
    except DeadlineExceeded as error:
        raise TargetLost(f"{link.url}: did not join {invitation.join.group} in time", url=link.url) from error
