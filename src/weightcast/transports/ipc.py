"""Buckets in memory that the engines on this host map.  The receiver is ``receiver/sources/ipc.py``.

A buffer on each GPU that has both a trainer rank and an engine rank; one on the host for CPUs.  The head
rank gathers the handles and posts them once for each bucket; an engine rank takes the buffer on its own device.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from weightcast.comm.share import Shared
from weightcast.errors import DeadlineExceeded, TargetError, TargetLost, TargetRejected
from weightcast.protocols import Steps
from weightcast.transports.link import Link, in_flight_to
from weightcast.transports.pump import Pumped
from weightcast.wire.bucket import Bucket


class IpcTransport(Pumped):
    """Same host: CUDA IPC on GPUs, shared memory on CPUs."""

    name = "ipc"

    def __init__(self, links: Sequence[Link], *, timeout_s: float) -> None:
        self._links = list(links)
        self._timeout_s = timeout_s
        in_flight = in_flight_to(self._links)
        super().__init__(self._send_one, in_flight=in_flight)
        self._pool = ThreadPoolExecutor(
            max_workers=max(1, in_flight * len(self._links)), thread_name_prefix="weightcast-post"
        )
        self._closed = False

    def connect(self) -> None:
        """Nothing to create: engines map a buffer when they first hear of it."""

    def send(self, bucket: Bucket, shared: Sequence[Shared]) -> None:
        """As ``Transport.send``."""
        self._pump.put(bucket, tuple(shared))

    def abort(self, reason: str) -> None:
        """Posts are bounded by their deadline and ended by the engines' own abort."""

    def close(self) -> None:
        """As ``Transport.close``."""
        if self._closed:
            return
        self._closed = True
        self._pump.close()
        leave_all(self._links)
        self._pool.shutdown(wait=True)

    def _send_one(self, bucket: Bucket, shared: tuple[Shared, ...]) -> None:
        if len(self._links) == 1:
            self._tell(self._links[0], bucket, shared)  # without another thread's way there and back
            return
        posts = [self._pool.submit(self._tell, link, bucket, shared) for link in self._links]
        first: BaseException | None = None
        for post in as_completed(posts):
            first = first or post.exception()
        if first is not None:
            raise first

    def _tell(self, link: Link, bucket: Bucket, shared: tuple[Shared, ...]) -> None:
        tell(
            link,
            link.adapter.bucket(link.session, bucket.layout, group=None, shared=link.shared(shared)),
            what=f"bucket {bucket.layout.index}",
            timeout_s=self._timeout_s,
        )


def tell(link: Link, steps: Steps, *, what: str, timeout_s: float) -> None:
    """Tell one target of new weights, a bucket or a folder, and read its answer.

    Raises:
        TargetRejected, TargetLost: Named, with what it was, and half updated where the engine does not stage.
    """
    half = not link.stages
    link.touch()
    try:
        link.took_over(link.ask(steps, timeout_s=timeout_s))
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
    """Ask targets to let go; one that does not answer has let go, or will be told when it comes back."""

    def leave(link: Link) -> None:
        link.let_go(link.adapter.leave(group))

    with ThreadPoolExecutor(max_workers=max(1, len(links))) as pool:
        list(pool.map(leave, links))
