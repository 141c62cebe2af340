"""Bytes over the network links of hosts, by each way of an update: ``connect`` chooses by them, ``plan`` prints them.

A host has one link here, which carries as much in each direction at once, and within a host bytes cost nothing.
Trainer ranks hold equal parts.  Engine ranks cut every matrix evenly and keep everything else whole, as tensor
parallelism does; ranks of one number in engines of one size keep the same.

- Gathered: the head, and one trainer rank on each other host whose engines read buckets, get what their hosts lack.
  The head broadcasts to the other engine ranks: gloo along a binomial tree, in which the head sends everything once for
  each doubling of the group, NCCL from host to host.
- By messages: each trainer rank sends each engine rank its share.
- In chains: it sends to the first of the ranks that keep the same, which passes on to the next.  A rank passes a bucket
  on when it has all of it, and two buckets are on their way, so the links of a long chain wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from weightcast.transports.cells import MANY_RANKS, divide, most_ranks
from weightcast.transports.topology import Topology
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import TensorSpec, total_bytes

# A way must save so much.  tests/e2e/test_relay_hosts.py, with other numbers of engines, took so many times as long as
# one copy over a link of 100 Mbit/s, and by this model:
#
#     engines   broadcast    by messages   in chains
#     2         2.1 (2)      2.1 (2)       1.3 (1)
#     3         2.2 (2)      3.2 (3)       1.9 (1.5)
#     4         3.2 (3)      4.8 (4)       3.5 (2)
#     7         3.4 (3)      7.4 (7)       3.5 (3.5)
GAIN = 1.75
_IN_FLIGHT = 2


@dataclass(slots=True)
class LinkBytes:
    """Bytes out of each host, and into each host.

    Attributes:
        hops: Links that a bucket passes one after the other.
    """

    out: Counter[str] = field(default_factory=Counter[str])
    into: Counter[str] = field(default_factory=Counter[str])
    hops: int = 1

    def send(self, host: str, other: str, size_bytes: int) -> None:
        """Adds bytes from one host to another."""
        if host != other and size_bytes:
            self.out[host] += size_bytes
            self.into[other] += size_bytes

    @property
    def busiest(self) -> int:
        """The most bytes that any link carries in one direction."""
        return max((*self.out.values(), *self.into.values()), default=0)

    @property
    def cost(self) -> int:
        """Bytes that the busiest link could have carried in the time of an update."""
        return self.busiest * max(_IN_FLIGHT, self.hops) // _IN_FLIGHT

    @property
    def busiest_link(self) -> str:
        """That link in words; empty if no bytes go between hosts."""
        for words, some in (("out of", self.out), ("into", self.into)):
            for host, size_bytes in some.items():
                if size_bytes == self.busiest:
                    return f"{words} host {host}"
        return ""

    def saves(self, usual: LinkBytes) -> bool:
        """True if this way is worth taking in the place of the usual one."""
        return usual.cost >= max(1, GAIN * self.cost)


def by_broadcast(topology: Topology) -> LinkBytes:
    """Whole buckets, gathered on the head and broadcast to every engine rank."""
    return _gathered(topology, reads=False)


def by_buckets(topology: Topology) -> LinkBytes:
    """Whole buckets: engine ranks on hosts with trainer ranks read them there, and others get a broadcast."""
    return _gathered(topology, reads=True)


def _gathered(topology: Topology, *, reads: bool) -> LinkBytes:
    found = LinkBytes()
    head, whole = topology.trainer_hosts[0], total_bytes(topology.specs)
    joining: list[tuple[str, ...]] = []
    receiving = {head: None}
    for info in topology.infos.values():
        near = topology.near_hosts(info) if reads else ()
        receiving |= dict.fromkeys(near)
        joining.append(tuple(host for host in info.hosts if host not in near))
    for host in receiving:
        _feed(found, topology, host, whole)
    for cell in divide([hosts for hosts in joining if hosts], len, most_ranks(MANY_RANKS, topology.cell_ranks)):
        members = [head, *(host for hosts in cell for host in hosts)]
        if topology.device.type == "cuda":
            for host, other in pairwise(dict.fromkeys(members)):
                found.send(host, other, whole)
        else:
            for number, host in enumerate(members[1:], 1):
                found.send(members[number - (1 << number.bit_length() - 1)], host, whole)
    return found


def by_messages(topology: Topology) -> LinkBytes:
    """Each engine rank's share from every trainer rank."""
    found = LinkBytes()
    for host, _, size_bytes in _shares(topology, topology.infos.values()):
        _feed(found, topology, host, size_bytes, whole_too=True)
    return found


def mixed(topology: Topology) -> LinkBytes:
    """As by messages, but an engine rank reads what trainer ranks on its host have, which may be all."""
    found = LinkBytes()
    for url, info in topology.infos.items():
        reads = topology.reads_on(url)
        for (host, _, size_bytes), near in zip(_shares(topology, [info]), reads, strict=True):
            _feed(found, topology, host, size_bytes, whole_too=not near)
    return found


def in_chains(topology: Topology) -> LinkBytes:
    """Each share once from every trainer rank, then from each engine rank to the next that keeps the same."""
    found = LinkBytes()
    most = most_ranks(MANY_RANKS, topology.cell_ranks)
    for cell in divide(topology.infos.values(), lambda info: info.tp_size, most):
        last: dict[object, tuple[str, int]] = {}
        for host, role, size_bytes in _shares(topology, cell):
            if role in last:
                before, hops = last[role]
                found.send(before, host, size_bytes)
                hops += before != host
            else:
                _feed(found, topology, host, size_bytes, whole_too=True)
                hops = int(set(topology.trainer_hosts) != {host})
            last[role] = host, hops
            found.hops = max(found.hops, hops)
    return found


def _feed(found: LinkBytes, topology: Topology, host: str, size_bytes: int, *, whole_too: bool = False) -> None:
    """Adds what a host lacks of so many bytes; with ``whole_too``, although trainer ranks there hold all weights."""
    if not whole_too and topology.is_whole(host):
        return
    ranks = len(topology.trainer_hosts)
    for other, count in Counter(topology.trainer_hosts).items():
        found.send(other, host, size_bytes * count // ranks)


def _shares(topology: Topology, infos: Iterable[EngineInfo]) -> Iterator[tuple[str, object, int]]:
    """The host of each engine rank, what it keeps, and the bytes of that."""
    sizes: dict[int, int] = {}
    for info in infos:
        parts = info.tp_size
        if parts not in sizes:
            sizes[parts] = share_bytes(topology.specs, parts)
        for number, host in enumerate(info.hosts):
            yield host, (parts, number), sizes[parts]


def share_bytes(specs: Sequence[TensorSpec], parts: int) -> int:
    """Bytes that each rank of an engine keeps whose ranks divide a model into so many parts."""
    return sum(-(-spec.size_bytes // parts) if len(spec.shape) > 1 else spec.size_bytes for spec in specs)
