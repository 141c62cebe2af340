"""Buckets by broadcast from the trainer's head to every engine rank.

The receiver is ``receiver/sources/broadcast.py``.

Engines of one kind meet in one group (``channel.py``); where kinds that meet in different ways are updated at once,
each has a group of its own and the groups run side by side.  Other trainer ranks only gather and are in no group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from weightcast.comm.share import Shared
from weightcast.protocols import Meeting
from weightcast.transports.channel import Channel
from weightcast.transports.link import Link, in_flight_to
from weightcast.transports.pump import Pumped
from weightcast.wire.bucket import Bucket


class BroadcastTransport(Pumped):
    """Groups across both worlds: nccl on GPUs, gloo on CPUs."""

    name = "broadcast"

    def __init__(
        self, links: Sequence[Link], *, device: torch.device, host: str, bucket_bytes: int, timeout_s: float
    ) -> None:
        """Nothing is created yet.

        Args:
            links: The targets.
            device: Where the buckets are.
            host: Address of this process that engines can reach.
            bucket_bytes: No bucket is larger.
            timeout_s: Deadline of each wait, in seconds.

        Raises:
            ConfigError: As ``Channel``.
        """
        in_flight = in_flight_to(links)
        super().__init__(self._send_one, in_flight=in_flight)
        self._device = device
        meetings: dict[Meeting, None] = dict.fromkeys(link.adapter.meeting for link in links)
        self._channels = [
            Channel(
                [link for link in links if link.adapter.meeting == meeting],
                meeting=meeting,
                device=device,
                host=host,
                bucket_bytes=bucket_bytes,
                timeout_s=timeout_s,
                in_flight=in_flight,
            )
            for meeting in meetings
        ]
        self._pool = ThreadPoolExecutor(
            max_workers=in_flight * len(self._channels), thread_name_prefix="weightcast-channel"
        )
        self._filled: dict[int, torch.cuda.Event] = {}  # by bucket, until it is on its way
        self._closed = False

    def connect(self) -> None:
        """Make the groups that are not there.

        Raises:
            TargetError: Targets could not join or did not come; they are named, with their own words if they have any.
            DeadlineExceeded: They did not all come, and it is not known who stayed away.
        """
        self._each(Channel.connect)

    def send(self, bucket: Bucket, shared: Sequence[Shared]) -> None:
        """As ``Transport.send``."""
        if self._device.type == "cuda":
            event = self._filled[bucket.layout.index] = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        self._pump.put(bucket, ())

    def drain(self) -> None:
        """As ``Transport.drain``."""
        super().drain()
        self._each(Channel.drain)

    def settle(self) -> None:
        """As ``Transport.settle``."""
        super().settle()
        for channel in self._channels:
            channel.settle()

    def abort(self, reason: str) -> None:
        """As ``Transport.abort``; the next ``connect`` makes new groups."""
        for channel in self._channels:
            channel.abort(reason)

    def close(self) -> None:
        """As ``Transport.close``."""
        if self._closed:
            return
        self._closed = True
        self._pump.close()
        self.settle()
        self._each(Channel.close)
        self._pool.shutdown(wait=True)

    def _send_one(self, bucket: Bucket, shared: tuple[Shared, ...]) -> None:
        filled = self._filled.pop(bucket.layout.index, None)
        self._each(lambda channel: channel.send(bucket, filled))

    def _each(self, do: Callable[[Channel], None]) -> None:
        """The same on every channel at once; the first failure, after all have ended."""
        if len(self._channels) == 1:
            do(self._channels[0])
            return
        futures = [self._pool.submit(do, channel) for channel in self._channels]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
