"""Buckets by broadcast from the trainer's head to every engine rank.

The receiver is ``receiver/sources/broadcast.py``.

Engines with the same kind of rendezvous are divided into cells (``cells.py``), each of which is one group with the head
(``channel.py``).  The head broadcasts to all cells at the same time.  Other trainer ranks only gather and are in no
group.  A cell that fails has its ``failure``.

Ranks of one engine may be on several hosts.  Those on hosts with trainer ranks can read the buckets there, as with
``ipc``; then only the others are members of the group (``BY_RANK``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Self

import torch

from weightcast.comm.rendezvous import Invited
from weightcast.comm.shared_buckets import Shared
from weightcast.comm.update_group import UpdateGroup, local_address_towards
from weightcast.errors import ConfigError, WeightcastError
from weightcast.protocols import Cell, Meeting
from weightcast.transports.blame import raise_together
from weightcast.transports.cells import MANY_RANKS, divide, most_ranks
from weightcast.transports.channel import Channel
from weightcast.transports.link import Link, in_flight_to
from weightcast.transports.link_bytes import by_broadcast, by_buckets
from weightcast.transports.plan import UpdatePlan
from weightcast.transports.pump import Pumped, ThreadPump
from weightcast.transports.spec import Sender, TransportSpec
from weightcast.transports.topology import Topology
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout
from weightcast.wire.messages import MAX_GROUP
from weightcast.wire.nccl_settings import differences


class GroupCarrier(Pumped):
    """Sends in groups of the trainer and engine ranks: nccl on GPUs, gloo on CPUs.

    The head broadcasts, or all trainer ranks are members and each sends its own parts (``update/exchange.py``); then
    the head only announces the buckets.
    """

    def __init__(
        self,
        links: Sequence[Link],
        *,
        device: torch.device,
        host: str,
        bucket_bytes: int,
        timeout_s: float,
        trainers: int | None = None,
        chains: bool = False,
        in_flight: int | None = None,
        cell_ranks: int | None = None,
        name: str = "broadcast",
    ) -> None:
        """Creates no group yet; the other arguments, and errors, are those of ``Channel``.

        Args:
            in_flight: As ``Sender.in_flight``; None if these are all targets of the update.
            cell_ranks: Most engine ranks in one group; None for one group over all of them.
        """
        in_flight = in_flight or in_flight_to(links)
        super().__init__(ThreadPump(self._send_one, in_flight=in_flight))
        self.name = name
        self._exchanges = trainers is not None
        self._device = device
        meetings: dict[Meeting, None] = dict.fromkeys(link.adapter.meeting for link in links)
        self._channels = [
            Channel(
                cell,
                meeting=meeting,
                device=device,
                host=host,
                bucket_bytes=bucket_bytes,
                timeout_s=timeout_s,
                in_flight=in_flight,
                trainers=trainers,
                chains=chains,
            )
            for meeting in meetings
            for cell in divide(
                [link for link in links if link.adapter.meeting == meeting],
                lambda link: len(link.members),
                cell_ranks or MAX_GROUP,
            )
        ]
        self._pool = ThreadPoolExecutor(
            max_workers=in_flight * len(self._channels), thread_name_prefix="weightcast-channel"
        )

    @classmethod
    def of(cls, links: Sequence[Link], plan: UpdatePlan, sender: Sender) -> Self:
        """Makes the carrier of an update."""
        config, target = sender.config, links[0].plan
        return cls(
            links,
            device=sender.device,
            host=config.rendezvous_host or _address_for(links),
            bucket_bytes=plan.bucket_bytes,
            timeout_s=config.timeout_s,
            trainers=None if target.gathers else sender.num_ranks,
            chains=target.chains,
            in_flight=sender.in_flight if target.gathers else None,
            cell_ranks=most_ranks(target.cells, config.cell_ranks, plan.cell_limit),
            name=target.transport,
        )

    @property
    def cells(self) -> Sequence[Cell]:
        """As ``Carrier.cells``."""
        return self._channels

    def connect(self) -> None:
        """Makes the groups that do not exist; raises as ``Channel.connect``, for all targets."""
        channels = self._channels
        if self._exchanges:  # those that all trainer ranks were invited to
            channels = [channel for channel in channels if channel.invited is not None]
        else:
            for channel in channels:
                channel.begin()
        self._each(Channel.connect, channels)

    def invite(self) -> None:
        """As ``Carrier.invite``."""
        if self._exchanges:
            for channel in self._channels:
                channel.begin()
                channel.invite()

    @property
    def invited(self) -> Sequence[Invited]:
        """As ``Carrier.invited``."""
        invited = (channel.invited for channel in self._channels if self._exchanges)
        return [one for one in invited if one is not None]

    @property
    def members(self) -> Mapping[str, UpdateGroup]:
        """As ``Carrier.members``."""
        groups = (channel.member() for channel in self._channels if self._exchanges)
        return {group.name: group for group in groups if group is not None}

    def lost(self, name: str, error: WeightcastError) -> None:
        """As ``Carrier.lost``."""
        channels = [channel for channel in self._channels if channel.name == name]
        for channel in channels:
            channel.abort(str(error))
        self._pump.drain()
        self._each(lambda channel: channel.lose(error), [one for one in channels if one.failure is None])

    def send(self, bucket: Bucket, shared: Sequence[Shared]) -> None:
        """As ``Carrier.send``."""
        self._note_filled(bucket)
        super().send(bucket, shared)

    def announce(self, layouts: Sequence[BucketLayout]) -> None:
        """As ``Carrier.announce``."""
        self._each(lambda channel: channel.announce(layouts), self._channels)

    def drain(self) -> None:
        """As ``Carrier.drain``."""
        super().drain()
        self._each(Channel.drain, self._channels)

    def settle(self) -> None:
        """As ``Carrier.settle``."""
        super().settle()
        for channel in self._channels:
            channel.settle()

    def abort(self, reason: str) -> None:
        """As ``Carrier.abort``; the next ``connect`` makes new groups."""
        for channel in self._channels:
            channel.abort(reason)

    def _end(self) -> None:
        super()._end()
        self.settle()
        self._each(Channel.close, self._channels)
        self._pool.shutdown(wait=True)

    def _send_one(self, bucket: Bucket, shared: tuple[Shared, ...]) -> None:
        filled = self._filled.pop(bucket.layout.index, None)
        self._each(lambda channel: channel.send(bucket, filled, shared), self._channels)

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


def _address_for(links: Sequence[Link]) -> str:
    """Returns an address of this process that every target can reach."""
    addresses = {local_address_towards(link.client.target.host, 80) for link in links}
    outside = [address for address in addresses if not address.startswith("127.") and address != "::1"]
    return sorted(outside or addresses)[0]


def _check(topology: Topology) -> None:
    on_gpu = topology.device.type == "cuda"
    unlike = [device for device in topology.devices if (device != "cpu") != on_gpu]
    if unlike:
        raise ConfigError(
            "broadcast needs trainer and engines on the same type of device: the trainer's weights are on "
            f"{topology.device}, an engine's are on {unlike[0]}",
            hint='use ipc on one host (transport="ipc", --via ipc), or put the weights on the engines\' type of device',
        )
    if on_gpu and topology.places[0] in topology.devices:
        raise ConfigError(
            f"trainer and engine share GPU {topology.places[0]}, and NCCL needs a GPU for each rank",
            hint='use ipc for engines on the trainer\'s GPUs: transport="ipc", --via ipc',
        )
    check_nccl(topology)


def check_nccl(topology: Topology) -> None:
    """Raises ConfigError if NCCL is set otherwise in an engine rank's process than in a trainer rank's.

    Trainer ranks that are in no group count too: a trainer whose ranks differ has trouble of its own.
    """
    members = 1 + sum(len(info.ranks) for info in topology.infos.values())
    for url, info in topology.infos.items():
        for rank, host in zip(info.ranks, info.hosts, strict=True):
            for number, ours in enumerate(topology.nccl):
                if ours is None or rank.nccl is None:
                    continue
                one_host = host in topology.near_hosts(info)
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
    carriers=("group",),
    cells=MANY_RANKS,
    suits=lambda _: True,
    build=GroupCarrier.of,
    check=_check,
    link_bytes=by_broadcast,
)


def _suits_by_rank(topology: Topology) -> bool:
    """True if some ranks of every engine are on hosts with trainer ranks, and some are not."""
    on_gpu = topology.device.type == "cuda"
    return (
        all(
            info.has_receiver
            and {"ipc", "broadcast"} <= set(info.transports)
            and 0 < len(topology.near_ranks(info)) < len(info.ranks)
            and all(device != "cuda" and (device != "cpu") == on_gpu for device in info.devices)
            for info in topology.infos.values()
        )
        and topology.all_see()
    )


# For an engine whose ranks are on several hosts.  ``auto`` chooses it; nobody asks for it by name.  Ranks that share
# the trainer's GPU are in no group.
BY_RANK = replace(
    SPEC,
    name="ipc+broadcast",
    carriers=("buffer", "group"),
    suits=_suits_by_rank,
    check=check_nccl,
    link_bytes=by_buckets,
)
