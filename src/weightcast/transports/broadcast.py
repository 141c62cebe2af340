"""Buckets by broadcast from the trainer's head to every engine rank.

The receiver is ``receiver/sources/broadcast.py``.

Engines with the same kind of rendezvous are divided into cells (``cells.py``), each of which is one group with the head
(``channel.py``).  The head broadcasts to all cells at the same time.  Other trainer ranks only gather and are in no
group.  A cell that fails has its ``failure``.

Ranks of one engine may be on several hosts.  Those on hosts with trainer ranks can read the buckets there, as with
``ipc``; then only the others are members of the group (``BY_RANK``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Self

import torch

from weightcast.comm.shared_buckets import Shared
from weightcast.errors import ConfigError, WeightcastError
from weightcast.protocols import Meeting
from weightcast.transports.blame import raise_together
from weightcast.transports.cells import MANY_RANKS, divide
from weightcast.transports.channel import Channel
from weightcast.transports.link import Link, in_flight_to
from weightcast.transports.pump import Pumped, ThreadPump
from weightcast.transports.spec import Placement, TransportSpec, Wiring
from weightcast.wire.bucket import Bucket
from weightcast.wire.messages import MAX_GROUP
from weightcast.wire.nccl_settings import differences


class BroadcastTransport(Pumped):
    """Broadcasts in groups of the head and the engine ranks: nccl on GPUs, gloo on CPUs."""

    name = "broadcast"

    def __init__(
        self,
        links: Sequence[Link],
        *,
        device: torch.device,
        host: str,
        bucket_bytes: int,
        timeout_s: float,
        trainers: int | None = None,
        relays: bool = False,
        in_flight: int | None = None,
        cell_ranks: int | None = None,
    ) -> None:
        """Creates no group yet; the other arguments, and errors, are those of ``Channel``.

        Args:
            in_flight: As ``Wiring.in_flight``; None if these are all targets of the update.
            cell_ranks: Most engine ranks in one group; None for one group over all of them.
        """
        in_flight = in_flight or in_flight_to(links)
        super().__init__(ThreadPump(self._send_one, in_flight=in_flight))
        if any(link.near for link in links):
            self.name = BY_RANK.name
        self._device = device
        meetings: dict[Meeting, None] = dict.fromkeys(link.adapter.meeting for link in links)
        self.cells = [
            Channel(
                cell,
                meeting=meeting,
                device=device,
                host=host,
                bucket_bytes=bucket_bytes,
                timeout_s=timeout_s,
                in_flight=in_flight,
                trainers=trainers,
                relays=relays,
            )
            for meeting in meetings
            for cell in divide(
                [link for link in links if link.adapter.meeting == meeting],
                lambda link: len(link.members),
                cell_ranks or MAX_GROUP,
            )
        ]
        self._pool = ThreadPoolExecutor(
            max_workers=in_flight * len(self.cells), thread_name_prefix="weightcast-channel"
        )

    @classmethod
    def of(cls, wiring: Wiring, **more: Any) -> Self:
        """Makes the transport of an update; ``more`` are arguments that not every way of sending has."""
        config = wiring.config
        return cls(
            wiring.links,
            device=wiring.device,
            host=config.rendezvous_host or wiring.address(),
            bucket_bytes=wiring.bucket_bytes,
            timeout_s=config.timeout_s,
            cell_ranks=wiring.cell_ranks,
            **more,
        )

    def connect(self) -> None:
        """Makes the groups that do not exist; raises as ``Channel.connect``, for all targets."""
        for channel in self.cells:
            channel.begin()
        self._each(Channel.connect, self.cells)

    def send(self, bucket: Bucket, shared: Sequence[Shared]) -> None:
        """As ``Transport.send``."""
        self._note_filled(bucket)
        super().send(bucket, shared)

    def drain(self) -> None:
        """As ``Transport.drain``."""
        super().drain()
        self._each(Channel.drain, self.cells)

    def settle(self) -> None:
        """As ``Transport.settle``."""
        super().settle()
        for channel in self.cells:
            channel.settle()

    def abort(self, reason: str) -> None:
        """As ``Transport.abort``; the next ``connect`` makes new groups."""
        for channel in self.cells:
            channel.abort(reason)

    def _end(self) -> None:
        super()._end()
        self.settle()
        self._each(Channel.close, self.cells)
        self._pool.shutdown(wait=True)

    def _send_one(self, bucket: Bucket, shared: tuple[Shared, ...]) -> None:
        filled = self._filled.pop(bucket.layout.index, None)
        self._each(lambda channel: channel.send(bucket, filled, shared), self.cells)

    def _each(self, do: Callable[[Channel], None], channels: Sequence[Channel]) -> None:
        """Calls ``do`` for these channels at once, and waits for all; the error names every engine that failed."""
        if len(channels) == 1:
            self._do(do, channels[0])
            return
        futures = [self._pool.submit(self._do, do, channel) for channel in channels]
        raise_together([future.exception() for future in futures])

    def _do(self, do: Callable[[Channel], None], channel: Channel) -> None:
        try:
            do(channel)
        except WeightcastError as error:
            channel.fail(error)
            raise


def _check(placement: Placement) -> None:
    on_gpu = placement.device.type == "cuda"
    unlike = [device for device in placement.devices if (device != "cpu") != on_gpu]
    if unlike:
        raise ConfigError(
            "broadcast needs trainer and engines on the same type of device: the trainer's weights are on "
            f"{placement.device}, an engine's are on {unlike[0]}",
            hint='use ipc on one host (transport="ipc", --via ipc), or put the weights on the engines\' type of device',
        )
    if on_gpu and placement.places[0] in placement.devices:
        raise ConfigError(
            f"trainer and engine share GPU {placement.places[0]}, and NCCL needs a GPU for each rank",
            hint='use ipc for engines on the trainer\'s GPUs: transport="ipc", --via ipc',
        )
    check_nccl(placement)


def check_nccl(placement: Placement) -> None:
    """Raises ConfigError if NCCL is set otherwise in an engine rank's process than in a trainer rank's.

    Trainer ranks that are in no group count too: a trainer whose ranks differ has trouble of its own.
    """
    members = 1 + sum(len(info.ranks) for info in placement.infos.values())
    for url, info in placement.infos.items():
        for rank, host in zip(info.ranks, info.hosts, strict=True):
            for number, ours in enumerate(placement.nccl):
                if ours is None or rank.nccl is None:
                    continue
                one_host = host in placement.near_hosts(info)
                found = differences(ours, rank.nccl, members=members, one_host=one_host)
                if not found:
                    continue
                words = "; ".join(
                    f"{one.ours} in trainer rank {number}, and {one.theirs} in {info.named(rank.rank)} of {url}"
                    for one in found
                )
                raise ConfigError(
                    f"NCCL cannot make a group of the trainer and {url} ({info.engine}): {words}; nothing was sent",
                    hint=f"{', '.join(one.set_ours for one in found)} for every trainer rank, before its first NCCL "
                    f"group; or start the engine with {', '.join(one.set_theirs for one in found)}",
                )


SPEC = TransportSpec(
    name="broadcast",
    delivery="group",
    mixes=True,
    cells=MANY_RANKS,
    suits=lambda _: True,
    build=lambda wiring: BroadcastTransport.of(wiring, in_flight=wiring.in_flight),
    check=_check,
)


def _suits_by_rank(placement: Placement) -> bool:
    """True if some ranks of every engine are on hosts with trainer ranks, and some are not."""
    on_gpu = placement.device.type == "cuda"
    return (
        all(
            info.kind == "native"
            and {"ipc", "broadcast"} <= set(info.transports)
            and 0 < len(placement.near_ranks(info)) < len(info.ranks)
            and all(device != "cuda" and (device != "cpu") == on_gpu for device in info.devices)
            for info in placement.infos.values()
        )
        and placement.all_see()
    )


# For an engine whose ranks are on several hosts.  ``auto`` chooses it; nobody asks for it by name.  Ranks that share
# the trainer's GPU are in no group.
BY_RANK = replace(SPEC, name="ipc+broadcast", by_rank=True, suits=_suits_by_rank, check=check_nccl)
