"""One process group across both worlds, and the targets that are in it.

Rank 0 of the group is the trainer's head; the engine ranks follow, target by target.  Order, for each bucket: post to
every target, enter the collective, read the replies last.  Engines answer after they have received; a target that
refuses will never enter, so the group is aborted, not waited for.  Of engines that allow it, the next bucket is posted
while this one is on its way, and goes when its turn comes.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import torch

from weightcast.comm.group import WHERE_TO_LOOK, GroupFailed, Rendezvous, WorldGroup, backend_for
from weightcast.comm.nccl import NcclGroup, nccl_binding, new_unique_id
from weightcast.errors import DeadlineExceeded, TargetError, TargetLost, TargetRejected, WeightcastError
from weightcast.protocols import Invitation, Meeting, Storing
from weightcast.transports.ipc import leave_all, tell
from weightcast.transports.link import Link
from weightcast.wire.bucket import Bucket
from weightcast.wire.messages import GROUP_FAILED

_Unanswered = tuple[int, list[Future[None]]]  # a bucket, and what the targets say to it

_COME_S = 1.0  # for engines that were asked to join to come to where we listen
_TURN_POLL_S = 0.05  # a group that is aborted wakes nobody who waits for a turn in it
_LATE_S = 10.0  # targets keep the deadline themselves and answer; this much later they are given up


class Channel:
    """The group of those targets that meet in one way.

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
    ) -> None:
        """Nothing is created yet; the arguments are those of ``BroadcastTransport``.

        Raises:
            ConfigError: Engines that meet by an id of NCCL's want a binding that is not installed.
        """
        if meeting == "nccl-id":
            nccl_binding()  # here and not in ``connect``: no engine has been told to hold still yet
        self._links = list(links)
        self._meeting: Meeting = meeting
        self._device = device
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(
            max_workers=max(1, in_flight * len(self._links)), thread_name_prefix="weightcast-post"
        )
        self._in_flight = in_flight
        self._unanswered: deque[_Unanswered] = deque()
        self._turns = threading.Condition()
        self._turn = 0  # the bucket whose broadcast is entered next
        self._group: WorldGroup | NcclGroup | None = None
        self._store: Rendezvous | None = None

    def connect(self) -> None:
        """Make the group if there is none.

        Raises:
            TargetError: Targets could not join or did not come; they are named, with their own words if they have any.
            DeadlineExceeded: They did not all come, and it is not known who stayed away.
        """
        self._turn = 0
        if self._group is not None:
            if self._group.alive:
                return
            leave_all(self._links, self._group.name)
            self._group.close()
            self._group = None
        name = f"weightcast-{secrets.token_hex(4)}"
        token = secrets.token_hex(16)
        self._store = meeting = Rendezvous(host=self._host, timeout_s=self._timeout_s)
        rank = 1
        for link in self._links:
            link.group_rank = rank
            rank += link.info.tp_size
        unique_id = new_unique_id() if self._meeting == "nccl-id" else b""
        for link in self._links:
            if unique_id and isinstance(link.adapter, Storing):
                for key, value in link.adapter.stored(unique_id).items():
                    cast(Any, meeting.store).set(key, value)  # it takes bytes, whatever its annotations say
        refused = threading.Event()
        deadline = time.monotonic() + self._timeout_s  # engines start later, so none of them is sooner at its own
        joins = [
            self._pool.submit(
                _join,
                link,
                Invitation(
                    session=link.session,
                    group=name,
                    host=self._host,
                    port=meeting.port,
                    token=token,
                    first_rank=link.group_rank,
                    world_size=rank,
                    backend=backend_for(self._device),
                    bucket_bytes=self._bucket_bytes,
                    timeout_s=self._timeout_s,
                    unique_id=unique_id,
                ),
            )
            for link in self._links
        ]
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
                self._group = WorldGroup(
                    # Gloo waits for the others inside torch, holding its store: it must not be the one that listens.
                    store=meeting.visit if self._device.type == "cpu" else lambda: meeting.store,
                    name=name,
                    token=token,
                    rank=0,
                    world_size=rank,
                    device=self._device,
                    address=self._host,
                    timeout_s=self._timeout_s,
                    cancelled=refused,  # who refuses will never come
                    meeting="torch" if self._meeting == "torch" else "weightcast",
                )
            for join in joins:
                join.result()
        except BaseException as error:
            self.abort("not all could join")
            answered = _answered(joins)  # the others answer because of what comes now
            suspects = self._links
            if time.monotonic() < deadline:  # the others may only be on their way
                suspects = [link for link, join in zip(self._links, joins, strict=True) if join in answered]
            absent = self._absent(suspects, meeting, token, rank)
            if self._meeting == "torch" and refused.is_set():
                # Torch goes on trying for half an hour where nobody listens: who is on the way must find us first.
                wait(joins, timeout=min(self._timeout_s, _COME_S))
            meeting.close()  # a stock engine would wait there for the others, for half an hour
            raise self._culprit(error, joins, name, answered, absent) from error

    def send(self, bucket: Bucket, filled: torch.cuda.Event | None) -> None:
        """Post, broadcast, read the replies; where two may be in flight, those to the bucket before.

        When it returns the bucket may be filled again.

        Args:
            bucket: What.
            filled: On a GPU, when it is complete.

        Raises:
            TargetError, GroupFailed, DeadlineExceeded: The group is aborted, the culprit named where it is known.
        """
        group = self._group
        assert group is not None, "connect() comes first"
        index = bucket.layout.index
        self._read_replies(index - self._in_flight)
        posts: list[Future[None]] = [
            self._pool.submit(
                tell,
                link,
                link.adapter.bucket(link.session, bucket.layout, group=group.name, shared=()),
                what=f"bucket {index}",
                timeout_s=self._timeout_s,
            )
            for link in self._links
        ]

        def look_for_refusals() -> None:
            for post in posts:
                if post.done():
                    error = post.exception()
                    if error is not None:
                        raise error

        try:
            if filled is not None:
                filled.synchronize()
            with self._in_turn(index, group):
                works = [group.start_broadcast(run) for run in bucket.runs() if run.numel()]
            for work in works:
                group.finish(work, what=f"bucket {index}", timeout_s=self._timeout_s, poll=look_for_refusals)
        except BaseException as error:
            answered = _answered(posts)
            group.abort(f"bucket {index} failed")
            try:
                self.drain()  # the bucket before may have failed, and this one because of that
            except WeightcastError as cause:
                raise cause from error
            raise self._give_up(error, posts, index, answered) from error
        with self._turns:
            self._unanswered.append((index, posts))
        if self._in_flight == 1:
            self.drain()

    def drain(self) -> None:
        """Read the replies that are due.

        Raises:
            TargetError, GroupFailed: As ``send``.
        """
        self._read_replies(None)

    def _read_replies(self, last: int | None) -> None:
        """To the buckets up to this one; None for all.

        They stay due until they are read and good: who fails meanwhile, because of what one of them says, finds it here
        too.
        """
        while (unanswered := self._first_unanswered(last)) is not None:
            index, posts = unanswered
            try:
                for post in as_completed(posts):
                    post.result()
            except BaseException as error:
                raise self._give_up(error, posts, index, _answered(posts)) from error
            self._was_answered(unanswered)

    def settle(self) -> None:
        """Wait for the replies that are due, whatever they are."""
        while (unanswered := self._first_unanswered(None)) is not None:
            wait(unanswered[1])
            self._was_answered(unanswered)

    def _first_unanswered(self, last: int | None) -> _Unanswered | None:
        with self._turns:
            if self._unanswered and (last is None or self._unanswered[0][0] <= last):
                return self._unanswered[0]
        return None

    def _was_answered(self, unanswered: _Unanswered) -> None:
        with self._turns:
            if self._unanswered and self._unanswered[0] is unanswered:  # two threads may read the same ones
                self._unanswered.popleft()

    def _give_up(
        self, error: BaseException, posts: Sequence[Future[None]], index: int, answered: Sequence[Future[None]]
    ) -> BaseException:
        """End the group; what to raise.  Those that have not answered yet do so because of that."""
        group = self._group
        assert group is not None
        group.abort(f"bucket {index} failed")
        self._let_go(group.name, posts)
        return self._culprit(error, posts, f"bucket {index}", answered)

    @contextmanager
    def _in_turn(self, index: int, group: WorldGroup | NcclGroup) -> Generator[None]:
        """Members enter a group's collectives in one order."""
        with self._turns:
            while self._turn != index:
                if not group.alive:
                    raise GroupFailed(f"bucket {self._turn} failed, which came before bucket {index}")
                self._turns.wait(_TURN_POLL_S)
        yield
        with self._turns:
            self._turn = index + 1
            self._turns.notify_all()

    def abort(self, reason: str) -> None:
        """Make every wait end; the next ``connect`` makes a new group.  Safe to call twice and from any thread."""
        if self._group is not None:
            self._group.abort(reason)

    def close(self) -> None:
        """Let go of the group on both sides; safe to call twice."""
        if self._group is not None:
            leave_all(self._links, self._group.name)
            self._group.close()
            self._group = None
        self._store = None
        self._pool.shutdown(wait=True)

    def _let_go(self, name: str, posts: Sequence[Future[None]]) -> None:
        """Let stock engines on CPUs hear of a broadcast that failed.

        Gloo's bytes go from member to member: who waits for another engine does not hear of our end, and waits for half
        an hour.  Those that have answered are told to leave, which hangs up on those that wait for them.
        """
        if self._meeting == "torch" and self._device.type == "cpu":
            answered = [link for link, post in zip(self._links, posts, strict=True) if post.done()]
            leave_all(answered, name)

    def _absent(self, links: Sequence[Link], meeting: Rendezvous, token: str, world_size: int) -> dict[str, list[int]]:
        """By URL, the engine ranks that have not come; only of members that meet as ours do can it be known."""
        if self._meeting != "weightcast" or not links:
            return {}
        try:
            missing = meeting.absent(token, world_size)
        except GroupFailed:  # a worse reason than the one that is being looked into
            return {}
        found: dict[str, list[int]] = {}
        for link in links:
            ranks = [rank for rank in range(link.info.tp_size) if link.group_rank + rank in missing]
            if ranks:
                found[link.url] = ranks
        return found

    def _culprit(
        self,
        error: BaseException,
        posts: Sequence[Future[None]],
        what: str,
        first: Sequence[Future[None]] = (),
        absent: Mapping[str, Sequence[int]] | None = None,
    ) -> BaseException:
        """Because of whom a step failed, by the targets' answers to it.

        When one member of a group dies, all the others fail too, and may say so first.  So the one that is lost
        counts before one that refuses, that one before those who were to meet the others and did not come, and these
        before those who only say that their group has failed.  Stock engines have one status for everything: what they
        say after we gave up is because we did.
        """
        if not isinstance(error, Exception):
            return error
        refusals: list[TargetRejected] = []
        waiting = dict(zip(posts, self._links, strict=True))
        try:
            others = [post for post in posts if post not in first]
            for post in chain(first, as_completed(others, timeout=self._timeout_s + _LATE_S)):
                waiting.pop(post)
                answer = post.exception()
                if isinstance(answer, TargetRejected):
                    refusals.append(answer)
                    if answer.status != GROUP_FAILED and (self._meeting != "torch" or post in first):
                        break
                elif isinstance(answer, WeightcastError):
                    return answer
        except TimeoutError:
            url = next(iter(waiting.values())).url
            return TargetLost(f"{url}: silent during {what}", url=url)
        for refusal in refusals:
            if refusal.status != GROUP_FAILED:
                return refusal
        if absent:
            return _did_not_come(what, absent, [post.exception() for post in first], error)
        if len(self._links) == 1 and refusals:
            return refusals[0]
        return GroupFailed(f"{what}: {error}") if isinstance(error, TargetRejected) else error


def _did_not_come(
    group: str, absent: Mapping[str, Sequence[int]], unprompted: Sequence[BaseException | None], error: Exception
) -> TargetError:
    """All of them at once: one at a time, each would cost an update another deadline.

    Args:
        group: Where they were to come.
        absent: Which ranks of which targets did not, by URL.
        unprompted: How targets answered before the meeting was given up; later it is only because of that.
        error: How it was given up.
    """
    own_words = {refusal.url: refusal for refusal in unprompted if isinstance(refusal, TargetRejected)}
    limit = f" within {error.timeout_s:g} s" if isinstance(error, DeadlineExceeded) else ""
    parts: list[str] = []
    for url, ranks in absent.items():
        which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        words = f": {own_words[url]}" if url in own_words else limit
        parts.append(f"{url}: {which} did not come to {group}{words}")
    hints = [refusal.hint for url, refusal in own_words.items() if url in absent]
    own = error.hint if isinstance(error, WeightcastError) else None
    hint = next((hint for hint in hints if hint), own or WHERE_TO_LOOK)
    first, *others = absent
    return TargetError("; ".join(parts), url=first, also=others, hint=hint)


def _answered(posts: Sequence[Future[None]]) -> list[Future[None]]:
    return [post for post in posts if post.done()]


def _join(link: Link, invitation: Invitation) -> None:
    try:
        link.ask(link.adapter.join(invitation), timeout_s=invitation.timeout_s)
    except TargetError:
        raise
    except DeadlineExceeded as error:
        raise TargetLost(f"{link.url}: did not join {invitation.group} in time", url=link.url) from error
