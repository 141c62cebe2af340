"""The form of a transport's registration.

Each transport's file exports one ``TransportSpec`` as ``SPEC``, and ``transports/registry.py`` lists them.  Code
outside a transport's file reads the registration; it never compares a transport's name with a string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from weightcast.config import TransportName, UpdateConfig
from weightcast.protocols import Carrier, Delivery, Sharing
from weightcast.transports.link import Link
from weightcast.transports.link_bytes import LinkBytes
from weightcast.transports.plan import CarrierName, UpdatePlan, reads_memory
from weightcast.transports.topology import Range, Topology
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import TensorSpec

SpecName = TransportName | Literal["ipc+broadcast"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """The trainer as a carrier needs to know it.

    Attributes:
        in_flight: Buckets that may be announced to all targets of the update before the first answer: 1 or 2.
    """

    config: UpdateConfig
    device: torch.device
    specs: Sequence[TensorSpec]
    num_ranks: int
    in_flight: int


Build = Callable[[Sequence[Link], UpdatePlan, Sender], Carrier]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSpec:
    """The registration of one transport: what carries the weights, what it reaches and when it suits.

    Attributes:
        name: The transport's name in ``UpdateConfig.transport``, or that of several which ``"auto"`` has put together.
        carriers: The carrier to every engine rank; where there are two, the first to ranks that can read memory of
            trainer ranks on their host, and the second to the others.
        build: Builds the head's end of the carriers; nothing is sent yet.
        gathers: True if whole tensors are gathered into buckets; otherwise each trainer rank sends its own parts.
        chains: True if engine ranks that keep the same parts pass on to each other what trainer ranks send.
        cells: Most engine ranks in each of the process groups that they join, unless the caller asks for another
            number; 0 if they join none.
        offered_as: The transport that engines name in their description if they take this one; None for its own name.
        variants: Registrations of which one takes the place of this one, best first.
        variant: Name among ``variants``, if this is one of them; empty otherwise.
        sharing: The kind of handle that engines get to a buffer; None takes the kind that the adapter names.
        suits: Returns True if ``transport="auto"`` may choose this transport.  The first that suits wins.
        check: Raises ConfigError if the transport cannot work with these ranks.
        link_bytes: Returns the bytes over the hosts' links; None for a transport that uses files or another program.
        slow: Returns the reason why another transport is faster with these ranks; empty if none is known to be.
        lacks: Returns what this process or an engine has not installed for this transport; empty if nothing is missing.
    """

    name: SpecName
    carriers: tuple[CarrierName, ...]
    build: Build
    gathers: bool = True
    chains: bool = False
    cells: int = 0
    reach: Range = "anywhere"
    offered_as: TransportName | None = None
    variants: tuple[TransportSpec, ...] = ()
    variant: str = ""
    sharing: Sharing | None = None
    suits: Callable[[Topology], bool] = lambda _: False
    check: Callable[[Topology], None] = lambda _: None
    link_bytes: Callable[[Topology], LinkBytes] | None = None
    slow: Callable[[Topology], str] = lambda _: ""
    lacks: Callable[[EngineInfo], str] = lambda _: ""

    def offered_by(self, info: EngineInfo) -> bool:
        """True if an engine takes updates by this transport."""
        return (self.offered_as or self.name) in info.transports

    @property
    def delivery(self) -> Delivery:
        """The steps by which an engine gets the weights."""
        if "group" in self.carriers:
            return "group"
        if "file" in self.carriers:
            return "folder"
        return "handles" if self.sharing == "ring" else "memory"

    @property
    def in_place(self) -> bool:
        """True if engine ranks read the weights where the trainer keeps them."""
        return "mapped" in self.carriers

    @property
    def reads_memory(self) -> bool:
        """True if engine ranks read memory of trainer ranks, so that each engine GPU needs a buffer of its own."""
        return reads_memory(self.carriers)

    @property
    def divides(self) -> bool:
        """True if ranks of one engine may be reached by different carriers."""
        return len(self.carriers) > 1

    @property
    def maps_buckets(self) -> bool:
        """True if engines may map whole buckets, so that larger ones than usual are faster on GPUs."""
        return self.gathers and self.carriers == ("buffer",) and self.sharing is None

    @property
    def mixes(self) -> bool:
        """True if another transport may send the same gathered buckets to other targets of the update."""
        return self.gathers and self.delivery in ("group", "memory")
