"""One process group across both worlds, and the targets that are in it.

Rank 0 of the group is the trainer's head; the engine ranks follow, target by target.  Order, for each bucket: post to
every target, enter the collective, read the replies last.  Engines answer after they have received; a target that
refuses will never enter, so the group is aborted, not waited for.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from itertools import chain
from typing import Any, cast

import torch

from weightcast.comm.group import GroupFailed, Rendezvous, WorldGroup, backend_for
from weightcast.comm.nccl import NcclGroup, NcclLibrary
from weightcast.errors import DeadlineExceeded, TargetError, TargetLost, TargetRejected, WeightcastError
from weightcast.protocols import Invitation, Meeting, Storing
from weightcast.transports.ipc import leave_all, tell
from weightcast.transports.link import Link
from weightcast.wire.bucket import Bucket
from weightcast.wire.messages import GROUP_FAILED

_COME_S = 1.0  # for engines that were asked to join to come to where we listen
_LATE_S = 10.0  # targets keep the deadline themselves and answer; this much later they are given up


class Channel:
    """The group of those targets that meet in one way.

    Thread rule: one thread at a time calls ``connect``, ``send`` or ``close``; ``abort`` may come from any other.
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
    ) -> None:
        """Nothing is created yet; the arguments are those of ``BroadcastTransport``."""
        self._links = list(links)
        self._meeting: Meeting = meeting
        self._device = device
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(self._links)), thread_name_prefix="weightcast-post")
        self._group: WorldGroup | NcclGroup | None = None
        self._store: Rendezvous | None = None

    def connect(self) -> None:
        """Make the group if there is none.

        Raises:
            TargetError: A target could not join; it is named with its own words.
            DeadlineExceeded: They did not all come.
        """
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
        library = NcclLibrary() if self._meeting == "nccl-id" else None
        unique_id = library.unique_id() if library is not None else b""
        for link in self._links:
            if unique_id and isinstance(link.adapter, Storing):
                for key, value in link.adapter.stored(unique_id).items():
                    cast(Any, meeting.store).set(key, value)  # it takes bytes, whatever its annotations say
        refused = threading.Event()
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
            if library is not None:
                self._group = NcclGroup(
                    unique_id=unique_id,
                    name=name,
                    rank=0,
                    world_size=rank,
                    device=self._device,
                    timeout_s=self._timeout_s,
                    cancelled=refused,
                    library=library,
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
            answered = [join for join in joins if join.done()]  # the others answer because of what comes now
            if self._meeting == "torch" and refused.is_set():
                # Torch goes on trying for half an hour where nobody listens: who is on the way must find us first.
                wait(joins, timeout=min(self._timeout_s, _COME_S))
            meeting.close()  # a stock engine would wait there for the others, for half an hour
            raise self._culprit(error, joins, name, answered) from error

    def send(self, bucket: Bucket, filled: torch.cuda.Event | None) -> None:
        """Post, broadcast, read the replies.

        Args:
            bucket: What.
            filled: On a GPU, when it is complete.

        Raises:
            TargetError, GroupFailed, DeadlineExceeded: The group is aborted, the culprit named where it is known.
        """
        group = self._group
        assert group is not None, "connect() comes first"
        index = bucket.layout.index
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
            if bucket.layout.size_bytes:
                if filled is not None:
                    filled.synchronize()
                work = group.start_broadcast(bucket.data[: bucket.layout.size_bytes])
                group.finish(work, what=f"bucket {index}", timeout_s=self._timeout_s, poll=look_for_refusals)
            for post in as_completed(posts):
                post.result()
        except BaseException as error:
            answered = [post for post in posts if post.done()]  # the others answer because of what comes now
            group.abort(f"bucket {index} failed")
            self._let_go(group.name, posts)
            raise self._culprit(error, posts, f"bucket {index}", answered) from error

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

    def _culprit(
        self,
        error: BaseException,
        posts: Sequence[Future[None]],
        what: str,
        first: Sequence[Future[None]] = (),
    ) -> BaseException:
        """Because of whom a step failed, by the targets' answers to it.

        When one member of a group dies, all the others fail too, and may say so first.  So the one that is lost
        counts before one that refuses, and that one before those who only say that their group has failed.  Stock
        engines have one status for everything: what they say after we gave up is because we did.
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
        if len(self._links) == 1 and refusals:
            return refusals[0]
        return GroupFailed(f"{what}: {error}") if isinstance(error, TargetRejected) else error


def _join(link: Link, invitation: Invitation) -> None:
    try:
        link.ask(link.adapter.join(invitation), timeout_s=invitation.timeout_s)
    except TargetError:
        raise
    except DeadlineExceeded as error:
        raise TargetLost(f"{link.url}: did not join {invitation.group} in time", url=link.url) from error
