"""Buckets by broadcast from the trainer's head to every engine rank.

The receiver is ``receiver/sources/broadcast.py``.

Rank 0 of the group is the head; the engine ranks follow, target by target.  Other trainer ranks only gather and are not
in the group.  Order, for each bucket: post to every target, enter the collective, read the replies last.  Engines
answer after they have received; a target that refuses will never enter, so the group is aborted, not waited for.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

import torch

from weightcast.comm.group import GroupFailed, Rendezvous, WorldGroup, backend_for
from weightcast.errors import DeadlineExceeded, TargetError, TargetLost, WeightcastError
from weightcast.transports.ipc import leave_all, post_bucket
from weightcast.transports.link import Link
from weightcast.transports.pump import Pump
from weightcast.wire.bucket import Bucket
from weightcast.wire.messages import Join, MemoryHandle


class BroadcastTransport:
    """A group across both worlds: nccl on GPUs, gloo on CPUs."""

    name = "broadcast"

    def __init__(self, links: Sequence[Link], *, device: torch.device, host: str, timeout_s: float) -> None:
        """Nothing is created yet.

        Args:
            links: The targets.
            device: Where the buckets are.
            host: Address of this process that engines can reach.
            timeout_s: Deadline of each wait, in seconds.
        """
        self._links = list(links)
        self._device = device
        self._host = host
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(self._links)), thread_name_prefix="weightcast-post")
        self._pump = Pump(self._send_one)
        self._group: WorldGroup | None = None
        self._store: Rendezvous | None = None
        self._filled = torch.cuda.Event() if device.type == "cuda" else None
        self._closed = False

    def connect(self) -> None:
        """Make the group if there is none.

        Raises:
            TargetError: A target could not join; it is named with its own words.
            DeadlineExceeded: They did not all come.
        """
        if self._group is not None and self._group.alive:
            return
        name = f"weightcast-{secrets.token_hex(4)}"
        token = secrets.token_hex(16)
        self._store = Rendezvous(host=self._host, timeout_s=self._timeout_s)
        rank = 1
        for link in self._links:
            link.group_rank = rank
            rank += link.info.tp_size
        joins = [
            self._pool.submit(
                _join,
                link,
                Join(
                    group=name,
                    host=self._host,
                    port=self._store.port,
                    token=token,
                    first_rank=link.group_rank,
                    world_size=rank,
                    backend=backend_for(self._device),
                    timeout_s=self._timeout_s,
                ),
            )
            for link in self._links
        ]
        failure: BaseException | None = None
        try:
            self._group = WorldGroup(
                store=self._store.store,
                name=name,
                token=token,
                rank=0,
                world_size=rank,
                device=self._device,
                address=self._host,
                timeout_s=self._timeout_s,
            )
        except (DeadlineExceeded, GroupFailed) as error:
            failure = error
        refusals = [join.exception() for join in joins]
        for refusal in refusals:
            if refusal is not None:
                raise refusal
        if failure is not None:
            raise failure

    def send(self, bucket: Bucket, handles: Sequence[MemoryHandle]) -> None:
        """As ``Transport.send``."""
        if self._filled is not None:
            self._filled.record(torch.cuda.current_stream(self._device))
        self._pump.put(bucket, ())

    def drain(self) -> None:
        """As ``Transport.drain``."""
        self._pump.drain()

    def abort(self, reason: str) -> None:
        """As ``Transport.abort``; the next ``connect`` makes a new group."""
        if self._group is not None:
            self._group.abort(reason)

    def settle(self) -> None:
        """Wait until no thread works on a bucket any more."""
        self._pump.settle()

    def close(self) -> None:
        """As ``Transport.close``."""
        if self._closed:
            return
        self._closed = True
        self._pump.close()
        if self._group is not None:
            leave_all(self._links, self._group.name)
            self._group.close()
            self._group = None
        self._store = None
        self._pool.shutdown(wait=True)

    def _send_one(self, bucket: Bucket, handles: tuple[MemoryHandle, ...]) -> None:
        group = self._group
        assert group is not None, "connect() comes first"
        index = bucket.layout.index
        posts: list[Future[None]] = [
            self._pool.submit(
                post_bucket,
                link,
                link.adapter.bucket_request(link.session, bucket.layout, group=group.name, handles=()),
                index=index,
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
                if self._filled is not None:
                    self._filled.synchronize()
                work = group.start_broadcast(bucket.data[: bucket.layout.size_bytes])
                group.finish(work, what=f"bucket {index}", timeout_s=self._timeout_s, poll=look_for_refusals)
            for post in as_completed(posts):
                post.result()
        except BaseException as error:
            group.abort(f"bucket {index} failed")
            raise self._culprit(error, posts, index) from error

    def _culprit(self, error: BaseException, posts: list[Future[None]], index: int) -> BaseException:
        """A group says that it failed; the targets' answers, given now that it is aborted, say because of whom."""
        if not isinstance(error, (GroupFailed, DeadlineExceeded)):
            return error
        answers: list[WeightcastError] = []
        silent: list[Link] = []
        for link, post in zip(self._links, posts, strict=True):
            try:
                answer = post.exception(timeout=self._timeout_s + 10.0)
            except TimeoutError:
                silent.append(link)
                continue
            if isinstance(answer, TargetLost):
                return answer
            if isinstance(answer, WeightcastError):
                answers.append(answer)
        if silent:
            url = silent[0].url
            return TargetLost(f"{url}: silent during bucket {index}", url=url, half_updated=True)
        return answers[0] if len(self._links) == 1 and answers else error


def _join(link: Link, message: Join) -> None:
    try:
        link.ask(link.adapter.join_request(message), timeout_s=message.timeout_s)
    except TargetError:
        raise
    except DeadlineExceeded as error:
        raise TargetLost(f"{link.url}: did not join {message.group} in time", url=link.url) from error
