"""Recognises the engine behind a URL by asking the server in each registered adapter's way."""

from __future__ import annotations

import msgspec

from weightcast.adapters.registry import KINDS, adapter_kinds
from weightcast.comm import event_loop
from weightcast.comm.http import Client
from weightcast.errors import ConfigError
from weightcast.fleet.probe import probe
from weightcast.wire.adapters import AdapterRequest
from weightcast.wire.engine_info import EngineInfo


def recognise(client: Client, *, timeout_s: float | None = None, adapter: AdapterRequest | None = None) -> EngineInfo:
    """As ``recognise_on_loop``, for a thread that waits for the description."""
    return event_loop.run(recognise_on_loop(client, timeout_s=timeout_s, adapter=adapter))


async def recognise_on_loop(
    client: Client, *, timeout_s: float | None = None, adapter: AdapterRequest | None = None
) -> EngineInfo:
    """Returns the description of the engine behind a client; ``Target.engine`` narrows the kinds that are tried.

    Args:
        timeout_s: As for ``fleet.probe.probe``.
        adapter: LoRA adapter that the engine is to take, and that is described then; None for the engine's model.

    Raises:
        ConfigError: ``Target.engine`` names no kind, or the engine is of no known kind.
        TargetUnreachable, TargetRejected: As ``fleet.probe.probe``.
    """
    asked = client.target.engine
    if adapter is not None:
        return _located(client, await probe(client, adapter_kinds(adapter), timeout_s=timeout_s))
    kinds = [kind for kind in KINDS if asked in ("auto", kind.name)]
    if not kinds:
        known = ", ".join(kind.name for kind in KINDS)
        raise ConfigError(f"engine={asked!r}: choose auto or one of {known}")
    return _located(client, await probe(client, kinds, timeout_s=timeout_s))


def _located(client: Client, info: EngineInfo) -> EngineInfo:
    """Adds the caller's ``Target.devices`` to the description of an engine that does not name its GPUs."""
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
