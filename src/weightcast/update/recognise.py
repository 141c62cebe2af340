"""Recognises the engine behind a URL by asking the server in each registered adapter's way.

The packages of this process may differ from the server's, so they are not asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from weightcast.adapters.registry import OTHERS, OURS, adapter_kind, all_kinds, kind_named
from weightcast.comm import event_loop
from weightcast.comm.http import Client
from weightcast.comm.run_steps import converse_on_loop
from weightcast.config import Target
from weightcast.errors import ConfigError, DeadlineExceeded, TargetUnreachable, WeightcastError
from weightcast.protocols import Kind
from weightcast.wire.adapters import AdapterRequest
from weightcast.wire.engine_info import EngineInfo

_CONNECTIONS = 2  # which a balancer gives to two engines in turn


def recognise(client: Client) -> EngineInfo:
    """As ``recognise_on_loop``, for a thread that waits for the description."""
    return event_loop.run(recognise_on_loop(client))


def ask(target: Target, timeout_s: float) -> EngineInfo | WeightcastError:
    """As ``recognise``, over a connection that is closed again; returns the error of an engine that does not answer."""
    client = Client(target, timeout_s=timeout_s)
    try:
        return recognise(client)
    except WeightcastError as error:
        return error
    finally:
        client.close()


async def recognise_on_loop(
    client: Client, *, timeout_s: float | None = None, adapter: AdapterRequest | None = None
) -> EngineInfo:
    """Returns the description of the engine behind a client; ``Target.engine`` narrows the kinds that are tried.

    ``timeout_s`` limits each kind's requests; None takes the client's.  With ``adapter``, the engine is to take a LoRA
    adapter, which is described then.

    Raises:
        ConfigError: ``Target.engine`` names no kind, or the server is not an engine that weightcast can update.
        TargetUnreachable: The server did not answer in time.
        TargetRejected: The server refused, for example a wrong key.
    """
    asked = client.target.engine
    if adapter is not None:
        info = await _probe(client, [adapter_kind(adapter)], timeout_s)
    elif asked == "auto":
        # Imports of other packages would hold up the event loop.
        info = await _probe(client, OURS, timeout_s)
        info = info or await _probe(client, await asyncio.to_thread(OTHERS.made), timeout_s)
    else:
        info = await _probe(client, [await asyncio.to_thread(kind_named, asked)], timeout_s)
    if info is not None:
        return _located(client, info)
    url = client.target.url
    if asked != "auto":
        raise ConfigError(
            f"{url} answers, but is not an engine that weightcast can update as {asked}",
            hint="leave the kind out: engine='auto' and --engine auto, the defaults, ask for every kind",
        )
    raise ConfigError(
        f"{url} answers, but is not an engine that weightcast can update (known kinds: "
        f"{', '.join(kind.name for kind in all_kinds())})",
        hint="check the port; start the engine with `weightcast serve`, or SGLang, vLLM or LMDeploy with the flags on "
        "their pages in docs/engines",
    )


async def _probe(client: Client, kinds: Sequence[Kind], timeout_s: float | None) -> EngineInfo | None:
    """Asks in the way of each kind, in order; None if the server is of none of them."""
    url = client.target.url
    for kind in kinds:
        try:
            info = await converse_on_loop(client, kind.recognise(url), timeout_s=timeout_s or client.timeout_s)
        except DeadlineExceeded as error:
            raise TargetUnreachable(
                str(error),
                url=url,
                hint="its port accepts connections; check whether the engine is stopped or overloaded",
            ) from error
        if info is not None:
            return info
    return None


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


async def ask_afresh_on_loop(
    target: Target,
    recognise: Callable[[Client], Awaitable[EngineInfo]],
    *,
    timeout_s: float,
) -> EngineInfo:
    """Asks over new connections whether a URL leads to one engine, and returns its description.

    ConfigError says that it leads to several; a description that ``shows_restart`` is one by which that can be told.
    Only a balancer that keeps this process with one of them goes unnoticed.
    """
    clients = [Client(target, timeout_s=timeout_s) for _ in range(_CONNECTIONS)]
    try:
        # One after the other: the second need not send the table of tensors that the first has sent.
        infos = [await recognise(client) for client in clients]
    finally:
        for client in clients:
            client.close()
    named = dict.fromkeys(f"{info.engine} ({_identity(info)})" for info in infos)
    if len({info.incarnation for info in infos}) > 1:
        raise ConfigError(
            f"{target.url} leads to more than one engine: new connections reached {' and '.join(named)}; one URL must "
            "be one engine, or an update reaches only some of them",
            hint="name each engine by its own address, not by that of a balancer before several (a Kubernetes Service, "
            "for example)",
        )
    return infos[0]


def _identity(info: EngineInfo) -> str:
    pids = ", ".join(str(rank.pid) for rank in info.ranks if rank.pid)
    return f"instance {info.instance[:40]}" if info.instance else f"processes {pids}"
