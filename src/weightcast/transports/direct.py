"""Shards go from the trainer rank that holds them to the engine ranks that keep them: nothing is gathered.

They move in one of these ways, which ``connect`` finds:

- as shards: engine ranks map the memory in which trainer ranks of their host keep their weights, and read it there.
  There is no bucket.  The weights must stay where they are, so the caller says ``keep_mapped=True``.
- over memory: each trainer rank copies its own parts of a bucket into its own buffer.  The head gathers the handles,
  with the parts that each buffer has, and posts them.  An engine rank maps all buffers of its host and reads the parts
  that it keeps (``receiver/sources/ipc.py``).
- by messages: each trainer rank copies its own parts into its own buffer, too.  Trainer ranks and engine ranks are one
  process group.  Every trainer rank sends every engine rank the parts that it keeps (``update/exchange.py``), and the
  head posts which trainer rank has which parts.
- by relay: as by messages, but trainer ranks send each piece once.  Engine ranks that keep the same pieces pass them on
  from one to the next (``comm/group_moves.py``).  ``auto`` does not choose it.
- mixed: an engine rank reads the buffers of trainer ranks on its own host, as over memory, and gets messages from the
  others.

``transport="rdma"`` is as over memory, but the buffers are registered with NIXL, and engine ranks on any hosts read the
parts that they keep into memory of their own (``receiver/sources/remote.py``).

The first two ways of ``direct`` reach engines on every host whose trainer ranks hold all weights together, as replicas
in HSDP do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from weightcast.comm import nixl
from weightcast.comm.rendezvous import Invited
from weightcast.comm.update_group import UpdateGroup
from weightcast.errors import ConfigError, WeightcastError
from weightcast.protocols import Transport
from weightcast.transports.broadcast import SPEC as BROADCAST
from weightcast.transports.broadcast import BroadcastTransport
from weightcast.transports.cells import FEW_RANKS, MANY_RANKS
from weightcast.transports.channel import Channel
from weightcast.transports.ipc import IpcTransport
from weightcast.transports.spec import Placement, TransportSpec, Wiring
from weightcast.wire.engine_info import EngineInfo

SLOW_BETWEEN_GPUS = "direct by messages between GPUs takes longer than a broadcast of the same weights"


class DirectTransport(IpcTransport):
    """Shares each trainer rank's shards with engines on its host."""

    name = "direct"


class ExchangeTransport(BroadcastTransport):
    """Announces the buckets that trainer ranks send to engine ranks by themselves."""

    name = "direct"

    def invite(self) -> Sequence[Invited]:
        """As ``Exchanging.invite``."""
        for channel in self.cells:
            channel.begin()
            channel.invite()
        return self.invited

    @property
    def invited(self) -> Sequence[Invited]:
        """As ``Exchanging.invited``."""
        return [channel.invited for channel in self.cells if channel.invited is not None]

    def connect(self) -> None:
        """As ``Transport.connect``, for the cells that were ``invited``."""
        self._each(Channel.connect, [channel for channel in self.cells if channel.invited is not None])

    @property
    def members(self) -> Mapping[str, UpdateGroup]:
        """As ``Exchanging.members``."""
        return {group.name: group for channel in self.cells if (group := channel.member()) is not None}

    def lost(self, name: str, error: WeightcastError) -> None:
        """As ``Exchanging.lost``."""
        channels = [channel for channel in self.cells if channel.name == name]
        for channel in channels:
            channel.abort(str(error))
        self._pump.drain()
        self._each(lambda channel: channel.lose(error), [one for one in channels if one.failure is None])


def _check_memory(placement: Placement) -> None:
    if not _reach_memory(placement):
        raise ConfigError(
            f"engine ranks cannot map the memory of the trainer's {placement.device}: they run on "
            f"{', '.join(sorted(placement.devices))}",
            hint='use another transport: transport="auto"',
        )
    placement.check_seen(every=True)


def _check_rdma(placement: Placement) -> None:
    for url, info in placement.infos.items():
        lacking = _lacks_for_rdma(info)
        if lacking:
            raise ConfigError(
                f"{url} cannot be updated by rdma: {lacking}",
                hint='pip install "weightcast[rdma]" on both sides, or use another transport: transport="direct"',
            )


def _lacks_for_rdma(info: EngineInfo) -> str:
    if nixl.missing():
        return "NIXL is not installed in this process"
    return "" if info.reads_remote else "NIXL is not installed in the engine"


def _check_messages(placement: Placement) -> None:
    BROADCAST.check(placement)
    shared = sorted(set(placement.places) & placement.devices - {"cpu"})
    if shared:
        raise ConfigError(
            f"trainer and engine share GPU {shared[0]}, and NCCL needs a GPU for each rank",
            hint='use ipc for engines on the trainer\'s GPUs: transport="ipc", --via ipc',
        )


def _reach_memory(placement: Placement) -> bool:
    """True if trainer and engines are all on CPUs, or all on GPUs that are known."""
    if placement.device.type == "cpu":
        return placement.devices == frozenset(("cpu",))
    return not placement.devices & {"cpu", "cuda"}


def _suits_memory(placement: Placement) -> bool:
    unmapped = any(url in placement.unmapped for url in placement.infos)
    return (
        not unmapped
        and _reach_memory(placement)
        and placement.beyond("replicas") is None
        and placement.all_see(every=True)
    )


def _suits_shards(placement: Placement) -> bool:
    return placement.keep_mapped and _suits_memory(placement)


def _suits(placement: Placement) -> bool:
    """True where the caller keeps the weights mapped and every engine can read them: one pass over the bytes.

    On GPUs only trainers on one host have been shown to work.
    """
    if not all(map(SPEC.offered_by, placement.infos.values())):
        return False
    shown = placement.device.type == "cpu" or not placement.on_many_hosts
    return shown and _suits_shards(placement)


def _check_mixed(placement: Placement) -> None:
    for url, info in placement.infos.items():
        BROADCAST.check(replace(placement, infos={url: info}, places=("",)))
        reads = placement.reads_on(url)
        shared = [
            rank.device
            for rank, host in zip(info.ranks, reads, strict=True)
            if not (host and placement.is_whole(host)) and rank.device in set(placement.places) - {"cpu"}
        ]
        if shared:
            raise ConfigError(
                f"{url} and the trainer share GPU {shared[0]}, whose engine rank needs messages from trainer ranks on "
                "other hosts, and NCCL needs a GPU for each rank",
                hint='shard within each host and replicate between hosts (HSDP), or gather: transport="ipc", --via ipc',
            )


def _suits_mixed(placement: Placement) -> bool:
    """True if any engine rank can read memory.  On GPUs the caller must ask for it, since it was not shown there."""
    on_cpus = placement.device.type == "cpu" and placement.devices == frozenset(("cpu",))
    return on_cpus and any(host for url in placement.infos for host in placement.reads_on(url))


def _slow_between_gpus(placement: Placement) -> str:
    if placement.device.type != "cuda":
        return ""
    return f'{SLOW_BETWEEN_GPUS}; use transport="broadcast" or "auto"'


def _exchange(wiring: Wiring, *, relays: bool = False) -> Transport:
    return ExchangeTransport.of(wiring, trainers=wiring.num_trainers, relays=relays)


_MEMORY = TransportSpec(
    name="direct",
    primitive="memory",
    reach="replicas",
    scattered=True,
    delivery="memory",
    sharing="weightcast",
    suits=_suits_memory,
    check=_check_memory,
    build=lambda wiring: DirectTransport(wiring.links, timeout_s=wiring.config.timeout_s),
)
_SHARDS = replace(_MEMORY, primitive="shards", mapped=True, suits=_suits_shards)
RDMA = TransportSpec(
    name="rdma",
    offered_as="direct",
    primitive="rdma",
    scattered=True,
    delivery="memory",
    sharing="remote",
    check=_check_rdma,
    lacks=_lacks_for_rdma,
    build=lambda wiring: DirectTransport(wiring.links, timeout_s=wiring.config.timeout_s),
)
_MESSAGES = TransportSpec(
    name="direct",
    primitive="messages",
    scattered=True,
    exchanges=True,
    cells=FEW_RANKS,
    delivery="group",
    check=_check_messages,
    slow=_slow_between_gpus,
    build=_exchange,
)
_MIXED = replace(_MESSAGES, primitive="mixed", legs=True, suits=_suits_mixed, check=_check_mixed)
_RELAY = replace(_MESSAGES, primitive="relay", relays=True, cells=MANY_RANKS, build=partial(_exchange, relays=True))
SPEC = replace(_MEMORY, primitive="", suits=_suits, primitives=(_SHARDS, _MEMORY, _RELAY, _MIXED, _MESSAGES))
