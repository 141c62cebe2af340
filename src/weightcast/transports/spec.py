"""The form of a transport's registration.

Each transport's file exports one ``TransportSpec`` as ``SPEC``, and ``transports/registry.py`` lists them.  Code
outside a transport's file reads the registration; it never compares a transport's name with a string.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from weightcast.comm.ipc import host_id
from weightcast.config import TransportName, UpdateConfig
from weightcast.protocols import Delivery, Sharing, Transport
from weightcast.transports.link import Link
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import TensorSpec


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the trainer and the engines run, as far as the choice of a transport needs it.

    Attributes:
        infos: Each engine's description of itself, by URL.
        device: The device of the trainer's weights.
        places: UUID of each trainer rank's device; the first is the head's.
        shared_folder: True if the caller named a folder for ``disk``.
        primitive: As ``UpdateConfig.direct_by``.
        keep_mapped: As ``UpdateConfig.keep_mapped``.
    """

    infos: Mapping[str, EngineInfo]
    device: torch.device
    places: Sequence[str]
    shared_folder: bool = False
    primitive: str = "auto"
    keep_mapped: bool = False

    @cached_property
    def other_host(self) -> str | None:
        """URL of the first engine on another host; None if all engines run on this one."""
        here = host_id()
        return next((url for url, info in self.infos.items() if info.host_id != here), None)

    @cached_property
    def devices(self) -> frozenset[str]:
        """The devices of all engine ranks."""
        return frozenset(rank.device for info in self.infos.values() for rank in info.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Everything that a transport is built from.

    Attributes:
        links: The targets.
        specs: The tensors that will be sent, in order.
        device: The device of the buckets.
        config: The caller's settings.
        num_trainers: Number of trainer ranks.
        in_flight: Buckets that may be announced to all targets of the update before the first answer: 1 or 2.
        address: Returns an address of this process that every target can reach.
    """

    links: Sequence[Link]
    specs: Sequence[TensorSpec]
    device: torch.device
    config: UpdateConfig
    num_trainers: int
    in_flight: int
    address: Callable[[], str]


def _never(_: Placement) -> bool:
    return False


def _nothing(_: EngineInfo) -> str:
    return ""


def _accept(_: Placement) -> None:
    """Accepts every placement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSpec:
    """The registration of one transport.

    Attributes:
        name: The transport's name in ``UpdateConfig.transport``.
        build: Builds the transport; nothing is sent yet.
        delivery: The steps by which engines get the weights.
        one_host: True if trainer and engines must share a host.
        scattered: True if shards are not gathered: each trainer rank fills its own parts of a bucket.
        exchanges: True if every trainer rank sends its parts to engine ranks, in a group of all of them.
        mapped: True if there are no buckets: engine ranks read the trainer ranks' own memory.
        primitives: Ways in which this transport may move bytes, best first; one of them takes its place.
        primitive: Name of the way, if it is one of several; empty otherwise.
        mixes: True if another transport may send the same gathered buckets to other targets of the update.
        zero_copy: True if host tensors can be sent from the model's own memory.
        sharing: The kind of handle that engines get to a buffer; None takes the kind that the adapter names.
        suits: Returns True if ``transport="auto"`` may choose this transport.  The first that suits wins.
        check: Raises ConfigError if the transport cannot work with this placement.
        lacks: Returns what this process or an engine has not installed for this way; empty if nothing is missing.
    """

    name: TransportName
    build: Callable[[Wiring], Transport]
    delivery: Delivery
    one_host: bool = False
    scattered: bool = False
    exchanges: bool = False
    mapped: bool = False
    primitives: tuple[TransportSpec, ...] = ()
    primitive: str = ""
    mixes: bool = False
    zero_copy: bool = False
    sharing: Sharing | None = None
    suits: Callable[[Placement], bool] = _never
    check: Callable[[Placement], None] = _accept
    lacks: Callable[[EngineInfo], str] = _nothing

    @property
    def shares_memory(self) -> bool:
        """True if engine ranks map the trainer's buffers, so each engine GPU needs a buffer of its own."""
        return self.delivery in ("memory", "handles")
