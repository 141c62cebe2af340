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
  from one to the next (``comm/group_moves.py``), where that takes enough bytes off the busiest link.
- mixed: an engine rank reads the buffers of trainer ranks on its own host, as over memory, and gets messages from the
  others.

``transport="rdma"`` is as over memory, but the buffers are registered with NIXL, and engine ranks on any hosts read the
parts that they keep into memory of their own (``receiver/sources/remote.py``).

The first two ways of ``direct`` reach engines on every host whose trainer ranks hold all weights together, as replicas
in HSDP do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weightcast.comm import nixl
from weightcast.errors import ConfigError
from weightcast.transports.broadcast import SPEC as BROADCAST
from weightcast.transports.broadcast import GroupCarrier
from weightcast.transports.cells import FEW_RANKS, MANY_RANKS
from weightcast.transports.ipc import MemoryCarrier
from weightcast.transports.link_bytes import LinkBytes, by_buckets, by_messages, in_chains, mixed
from weightcast.transports.spec import TransportSpec
from weightcast.transports.topology import Topology
from weightcast.wire.engine_info import EngineInfo

SLOW_BETWEEN_GPUS = "direct by messages between GPUs takes longer than a broadcast of the same weights"


def _check_memory(topology: Topology) -> None:
    if not _reach_memory(topology):
        raise ConfigError(
            f"engine ranks cannot map the memory of the trainer's {topology.device}: they run on "
            f"{', '.join(sorted(topology.devices))}",
            hint='use another transport: transport="auto"',
        )
    topology.check_seen(every=True)


def _check_rdma(topology: Topology) -> None:
    for url, info in topology.infos.items():
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


def _check_messages(topology: Topology) -> None:
    BROADCAST.check(topology)
    shared = sorted(set(topology.places) & topology.devices - {"cpu"})
    if shared:
        raise ConfigError(
            f"trainer and engine share GPU {shared[0]}, and NCCL needs a GPU for each rank",
            hint='use ipc for engines on the trainer\'s GPUs: transport="ipc", --via ipc',
        )


def _reach_memory(topology: Topology) -> bool:
    """True if trainer and engines are all on CPUs, or all on GPUs that are known."""
    if topology.device.type == "cpu":
        return topology.devices == frozenset(("cpu",))
    return not topology.devices & {"cpu", "cuda"}


def _suits_memory(topology: Topology) -> bool:
    unmapped = any(url in topology.unmapped for url in topology.infos)
    return (
        not unmapped
        and _reach_memory(topology)
        and topology.beyond("replicas") is None
        and topology.all_see(every=True)
    )


def _suits_shards(topology: Topology) -> bool:
    return topology.keep_mapped and _suits_memory(topology)


def _suits(topology: Topology) -> bool:
    """True where engines can read weights that stay mapped, one pass over the bytes; or where it saves bytes on CPUs.

    On GPUs only trainers on one host have been shown to work, and messages are slow.
    """
    if not all(map(SPEC.offered_by, topology.infos.values())):
        return False
    on_cpus = topology.device.type == "cpu" and topology.devices == frozenset(("cpu",))
    if _suits_shards(topology):
        return on_cpus or not topology.on_many_hosts
    return on_cpus and _taken(topology)(topology).saves(by_buckets(topology))


def _taken(topology: Topology) -> Callable[[Topology], LinkBytes]:
    """The way that ``direct`` would take."""
    spec = next((one for one in SPEC.variants if one.suits(topology)), SPEC.variants[-1])
    assert spec.link_bytes is not None
    return spec.link_bytes


def _suits_relay(topology: Topology) -> bool:
    """True if chains save bytes over what ``direct`` would take without them.  On GPUs that was not measured."""
    if topology.device.type != "cpu":
        return False
    usual = mixed if _suits_mixed(topology) else by_messages
    return in_chains(topology).saves(usual(topology))


def _check_mixed(topology: Topology) -> None:
    for url, info in topology.infos.items():
        BROADCAST.check(replace(topology, infos={url: info}, places=("",)))
        reads = topology.reads_on(url)
        shared = [
            rank.device
            for rank, host in zip(info.ranks, reads, strict=True)
            if not (host and topology.is_whole(host)) and rank.device in set(topology.places) - {"cpu"}
        ]
        if shared:
            raise ConfigError(
                f"{url} and the trainer share GPU {shared[0]}, whose engine rank needs messages from trainer ranks on "
                "other hosts, and NCCL needs a GPU for each rank",
                hint='shard within each host and replicate between hosts (HSDP), or gather: transport="ipc", --via ipc',
            )


def _suits_mixed(topology: Topology) -> bool:
    """True if any engine rank can read memory.  On GPUs the caller must ask for it, since it was not shown there."""
    on_cpus = topology.device.type == "cpu" and topology.devices == frozenset(("cpu",))
    return on_cpus and any(host for url in topology.infos for host in topology.reads_on(url))


def _slow_between_gpus(topology: Topology) -> str:
    if topology.device.type != "cuda":
        return ""
    return f'{SLOW_BETWEEN_GPUS}; use transport="broadcast" or "auto"'


_MEMORY = TransportSpec(
    name="direct",
    variant="memory",
    carriers=("buffer",),
    gathers=False,
    reach="replicas",
    sharing="weightcast",
    suits=_suits_memory,
    check=_check_memory,
    link_bytes=mixed,
    build=MemoryCarrier.of,
)
_SHARDS = replace(_MEMORY, variant="shards", carriers=("mapped",), suits=_suits_shards)
RDMA = TransportSpec(
    name="rdma",
    offered_as="direct",
    carriers=("rdma",),
    gathers=False,
    sharing="remote",
    check=_check_rdma,
    link_bytes=by_messages,
    lacks=_lacks_for_rdma,
    build=MemoryCarrier.of,
)
_MESSAGES = TransportSpec(
    name="direct",
    variant="messages",
    carriers=("group",),
    gathers=False,
    cells=FEW_RANKS,
    check=_check_messages,
    link_bytes=by_messages,
    slow=_slow_between_gpus,
    build=GroupCarrier.of,
)
_MIXED = replace(
    _MESSAGES,
    variant="mixed",
    carriers=("buffer", "group"),
    suits=_suits_mixed,
    check=_check_mixed,
    link_bytes=mixed,
)
_RELAY = replace(_MESSAGES, variant="relay", chains=True, cells=MANY_RANKS, suits=_suits_relay, link_bytes=in_chains)
SPEC = replace(_MEMORY, variant="", suits=_suits, variants=(_SHARDS, _MEMORY, _RELAY, _MIXED, _MESSAGES))
