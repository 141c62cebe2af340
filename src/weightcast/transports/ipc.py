"""Buckets in memory that engines on the trainers' hosts map.  The receiver is ``receiver/sources/ipc.py``.

On each host with engines one trainer rank, the host's speaker, fills buffers for all of them.  Each GPU with a trainer
rank and an engine rank has buffers of its own; on CPUs the buffers are in shared memory.  The head gathers the handles
and posts them with each bucket: to an engine those of its own host.  An engine rank reads the buffer on its own device.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Self

from weightcast.comm import event_loop
from weightcast.comm.shared_buckets import Shared
from weightcast.transports.blame import each_on_loop
from weightcast.transports.handles import handles_for
from weightcast.transports.link import Link, in_flight_to, leave_all, tell
from weightcast.transports.link_bytes import by_buckets
from weightcast.transports.plan import UpdatePlan
from weightcast.transports.pump import Pump, Pumped
from weightcast.transports.spec import Sender, TransportSpec
from weightcast.transports.topology import Topology
from weightcast.wire.bucket import Bucket


class MemoryCarrier(Pumped):
    """Tells engines where each bucket, or what lies in its place, can be read: CUDA IPC, shared memory or NIXL."""

    def __init__(
        self, links: Sequence[Link], *, timeout_s: float, in_flight: int | None = None, name: str = "ipc"
    ) -> None:
        """Sends nothing yet; ``in_flight`` is as ``Sender.in_flight``, None if these are all targets of the update."""
        self.name = name
        self._links = list(links)
        self._timeout_s = timeout_s
        super().__init__(Pump(self._start_one, in_flight=in_flight or in_flight_to(self._links)))

    @classmethod
    def of(cls, links: Sequence[Link], _plan: UpdatePlan, sender: Sender) -> Self:
        """Makes the carrier of an update."""
        timeout_s = sender.config.timeout_s
        return cls(links, timeout_s=timeout_s, in_flight=sender.in_flight, name=links[0].plan.transport)

    def _end(self) -> None:
        super()._end()
        leave_all(self._links)

    def _start_one(self, bucket: Bucket, shared: tuple[Shared, ...]) -> Future[None]:
        tell_each = each_on_loop(lambda link: self._tell(link, bucket, shared), self._links)
        (sent,) = event_loop.submit([tell_each])
        event_loop.flush()
        return sent

    async def _tell(self, link: Link, bucket: Bucket, shared: tuple[Shared, ...]) -> None:
        await tell(
            link,
            link.adapter.bucket(link.session.id, bucket.layout, group=None, shared=handles_for(link, shared)),
            what=range(bucket.layout.index, bucket.layout.index + 1),
            timeout_s=self._timeout_s,
        )


def _suits(topology: Topology) -> bool:
    # An engine that does not report its GPUs ("cuda") may run on other GPUs than the trainer, so the caller decides.
    reported = "cuda" not in topology.devices
    supported = all(map(SPEC.offered_by, topology.infos.values()))
    return topology.beyond("trainers") is None and reported and supported and topology.all_see()


SPEC = TransportSpec(
    name="ipc",
    carriers=("buffer",),
    reach="trainers",
    suits=_suits,
    check=Topology.check_seen,
    link_bytes=by_buckets,
    build=MemoryCarrier.of,
)
