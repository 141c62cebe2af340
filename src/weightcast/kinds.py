"""Which kinds of engine there are.  Asked in this order: an engine with our receiver is updated through it."""

from __future__ import annotations

import msgspec

from weightcast.comm.http import Client
from weightcast.engines.lmdeploy.kind import LmdeployKind
from weightcast.engines.native.kind import NativeKind
from weightcast.engines.sglang.kind import SglangKind
from weightcast.engines.vllm.kind import VllmExtensionKind, VllmKind
from weightcast.errors import ConfigError
from weightcast.fleet.probe import probe
from weightcast.protocols import Adapter, Kind
from weightcast.wire.messages import EngineInfo

KINDS: tuple[Kind, ...] = (NativeKind(), SglangKind(), LmdeployKind(), VllmKind(), VllmExtensionKind())


def recognise(client: Client, *, timeout_s: float | None = None) -> EngineInfo:
    """What the engine behind a client is; ``Target.engine`` narrows what it may be.

    Raises:
        ConfigError: There is no such kind, or the engine is of none.
        TargetUnreachable, TargetRejected: As ``fleet.probe.probe``.
    """
    asked = client.target.engine
    kinds = [kind for kind in KINDS if asked in ("auto", kind.name)]
    if not kinds:
        known = ", ".join(kind.name for kind in KINDS)
        raise ConfigError(f"engine={asked!r}: choose auto or one of {known}")
    return _located(client, probe(client, kinds, timeout_s=timeout_s))


def _located(client: Client, info: EngineInfo) -> EngineInfo:
    """What the caller knows of an engine's GPUs, for an engine that does not tell."""
    known = client.target.devices
    if not known or any(rank.device != "cuda" for rank in info.ranks):
        return info
    if len(known) != len(info.ranks):
        raise ConfigError(f"{client.target.url}: {len(known)} devices are named, and it has {len(info.ranks)} ranks")
    ranks = tuple(
        msgspec.structs.replace(rank, device=device.removeprefix("GPU-"))
        for rank, device in zip(info.ranks, known, strict=True)
    )
    return msgspec.structs.replace(info, ranks=ranks)


def adapter_for(info: EngineInfo) -> Adapter:
    """A new adapter for an engine that was recognised."""
    return next(kind for kind in KINDS if kind.name == info.kind).adapter(info)
