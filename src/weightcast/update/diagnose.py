"""Checks whether this process can update an engine, without touching its weights.

The checks of reach hold for this process alone.  A trainer rank on another host is asked by running them there.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import torch

from weightcast.adapters.registry import OTHERS as ENGINE_KINDS
from weightcast.adapters.registry import adapter_for, kind_of
from weightcast.comm import event_loop
from weightcast.comm.http import Client
from weightcast.comm.ipc import device_of, host_id, visible_gpus
from weightcast.comm.nccl import settings_here
from weightcast.comm.rendezvous import GroupFailed, Rendezvous
from weightcast.comm.tls import client_distrusted
from weightcast.comm.update_group import UpdateGroup, local_address_towards
from weightcast.config import Target
from weightcast.errors import (
    ConfigError,
    DeadlineExceeded,
    TargetRejected,
    TargetUnreachable,
    WeightcastError,
)
from weightcast.exporters.claims import OTHERS as MODEL_KINDS
from weightcast.exporters.memory_estimate import default_bucket_bytes, peak_bytes
from weightcast.protocols import Delivery
from weightcast.report import count_of, format_bytes, one_line
from weightcast.runtime.addresses import is_loopback
from weightcast.runtime.free_memory import free_host_bytes
from weightcast.transports.broadcast import check_nccl
from weightcast.transports.registry import TRANSPORTS
from weightcast.transports.topology import Topology
from weightcast.update.recognise import ask, ask_afresh_on_loop, recognise, recognise_on_loop
from weightcast.wire.codec import encode
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import total_bytes
from weightcast.wire.messages import Join, Leave

Level = Literal["ok", "warn", "fail"]
_ELSEWHERE = "192.0.2.1"  # of nobody: https://www.rfc-editor.org/rfc/rfc5737
_KNOCK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check: its result, and a hint if something has to be fixed."""

    name: str
    level: Level
    text: str
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All checks of one engine; ``engine`` describes it and is empty if it did not answer."""

    url: str
    engine: str
    checks: tuple[Check, ...]
    ok: bool


def examine(target: Target, *, bucket_bytes: int | None, host: str | None, timeout_s: float) -> Diagnosis:
    """Asks the engine for its description and checks it; an engine on the CPU also joins a small group.

    ``bucket_bytes`` is the size of a bucket; None takes what ``connect`` would choose for a trainer of one rank.
    ``host`` is an address of this machine that engines can reach; None takes it from the routing table.
    ``timeout_s`` limits each single wait.
    """
    client = Client(target, timeout_s=timeout_s)
    try:
        answered, info = _ask(client)
        checks = [*answered]
        if info is not None:
            checks += [_state(info), *(_sharing(info) if info.has_receiver else _check_stock(info))]
            checks += [*hazards(info), _staging(info), *([_memory(info, bucket_bytes)] if info.specs else [])]
            if info.has_receiver and _transports_by("group", info):
                checks += _rendezvous(client, info, host=host, timeout_s=timeout_s)
            if info.has_receiver:
                checks += [_transports(checks, info), *_scattered(checks, info)]
    finally:
        client.close()
    engine = ""
    if info is not None:
        version = "?" if info.version is None else info.version
        engine = f"{info.engine}, {info.model}, {info.sizes}, {info.state} version {version}"
    return Diagnosis(
        url=target.url, engine=engine, checks=tuple(checks), ok=all(check.level != "fail" for check in checks)
    )


def extensions() -> list[Check]:
    """Checks the kinds of engine and the exporters that other packages add; imports these packages."""
    checks: list[Check] = []
    for what, found in (("engine", ENGINE_KINDS.load()), ("exporter", MODEL_KINDS.load())):
        for one in found:
            name = f"{what} {one.name}"
            left_out = f"{one.package} is left out: {one_line(one.error)}"
            hint = "repair or uninstall that package; updates of other engines do not need it"
            checks.append(_warn(name, left_out, hint) if one.error else _ok(name, f"from {one.package}"))
    return checks


def _ask(client: Client) -> tuple[list[Check], EngineInfo | None]:
    reached = _ok("reachable", f"{client.target.url} answers")
    try:
        info = recognise(client)
    except (TargetUnreachable, DeadlineExceeded) as error:
        return [_failed("reachable", error, "check that the engine runs, and its host and port")], None
    except TargetRejected as error:
        if error.status in (401, 403):
            return [reached, _failed("key", error, "pass the engine's key with --api-key")], None
        return [reached, _failed("receiver", error, "look at the engine's log")], None
    except ConfigError as error:
        return [reached, _failed("receiver", error, "start the engine with `weightcast serve`")], None
    except WeightcastError as error:
        return [_failed("reachable", error, "look at the engine's log")], None
    return [
        reached,
        _key(client),
        _ok(
            "receiver",
            f"{info.engine} speaks protocol {info.protocol}, as this process does"
            if info.has_receiver
            else f"none: {info.engine} is updated through its own routes ({info.kind})",
        ),
        _one_engine(client, info),
    ], info


def _one_engine(client: Client, info: EngineInfo) -> Check:
    """Checks that the URL leads to one engine, and not to a balancer before several."""
    if not info.shows_restart:
        return _warn(
            "one engine",
            "cannot be told: this engine says nothing that differs from another's",
            hint="make sure that the URL is this engine's own address, and not that of a balancer before several",
        )
    try:
        event_loop.run(ask_afresh_on_loop(client.target, recognise_on_loop, timeout_s=client.timeout_s))
    except WeightcastError as error:
        return _failed("one engine", error, "look at the engine's log")
    return _ok("one engine", "new connections reach the same one")


def _key(client: Client) -> Check:
    """Checks whether the engine asks for a key or a client certificate, and if not, who can reach it."""
    target = client.target
    stranger = dataclasses.replace(target, api_key=None, cert_file=None, key_file=None)
    if stranger != target:
        answer = ask(stranger, client.timeout_s)
        if _turned_away(answer):
            return _ok("key", "accepted" if target.api_key is not None else "none needed beside the client certificate")
        if not isinstance(answer, EngineInfo):
            return _warn(
                "key",
                f"cannot be told: without it, the engine answers: {one_line(str(answer))}",
                hint="run this again when the engine is at rest; if it stays so, look at the engine's log",
            )
    reached = _reached_from_outside(target)
    if not reached:
        return _ok("key", "none needed; only this host reaches it")
    return _warn(
        "key",
        f"none needed: whoever reaches {reached} can read and replace the weights",
        hint="start the engine with an API key, or let it listen on 127.0.0.1",
    )


def _turned_away(answer: EngineInfo | WeightcastError) -> bool:
    """True if an engine refused a request because it had no key or no client certificate."""
    if isinstance(answer, TargetRejected):
        return answer.status in (401, 403)
    return isinstance(answer, TargetUnreachable) and answer.hint == client_distrusted(has_certificate=False)[1]


def _reached_from_outside(target: Target) -> str:
    """The URL or address at which others reach an engine; empty if only this host does."""
    if not is_loopback(target.host):
        return target.url
    parts = urlsplit(target.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        own = local_address_towards(_ELSEWHERE, port)
        socket.create_connection((own, port), timeout=_KNOCK_S).close()
    except (OSError, GroupFailed):
        return ""
    return "" if is_loopback(own) else f"{own}, port {port},"


def _transports_by(delivery: Delivery, info: EngineInfo) -> list[str]:
    """Names of the engine's transports that deliver the weights in this way."""
    return [spec.name for spec in TRANSPORTS if spec.delivery == delivery and spec.name in info.transports]


def _check_stock(info: EngineInfo) -> Iterator[Check]:
    """Checks an engine without our receiver: the transports it was started for, and what its adapter advises."""
    ways = ", ".join(info.transports)
    yield Check(
        name="transports",
        level="ok" if ways else "fail",
        text=f"as it was started, it takes {ways or 'no update'}; not tried",
        hint=info.message or None,
    )
    by_memory = _transports_by("memory", info)
    if by_memory and "cuda" in info.devices:
        via = by_memory[0]
        how = f"ask for {via} with --via {via}, from trainer ranks on the same GPUs"
        yield _ok(via, f"the engine does not report its GPUs: {how}")
    elif set(info.devices) != {"cpu"}:
        yield _ok("gpus", "its ranks are on " + ", ".join(info.devices))


def _failed(name: str, error: WeightcastError, hint: str) -> Check:
    return _fails(name, one_line(str(error)), hint=error.hint or hint)


def _ok(name: str, text: str) -> Check:
    return Check(name=name, level="ok", text=text)


def _warn(name: str, text: str, hint: str | None = None) -> Check:
    return Check(name=name, level="warn", text=text, hint=hint)


def _fails(name: str, text: str, hint: str | None = None) -> Check:
    return Check(name=name, level="fail", text=text, hint=hint)


def _state(info: EngineInfo) -> Check:
    version = "an unknown version" if info.version is None else f"version {info.version}"
    if info.state == "quarantined":
        return _fails(
            "state",
            f"quarantined: {one_line(info.message) or 'the engine may hold a mixture of two versions'}",
            hint="send it a full update: `weightcast push CHECKPOINT --to URL --version N`",
        )
    if info.state == "updating":
        return _warn(
            "state",
            f"being updated by {info.session_owner or 'an unknown trainer'}, was at {version}",
            hint="wait for that update, or end the process that runs it",
        )
    if info.paused:
        return _warn(
            "state",
            f"paused or asleep at {version}",
            hint="resume or wake it by its own routes (vLLM: POST /resume or /wake_up; weightcast serve: /continue or "
            "/wake); an engine that is asleep accepts no update",
        )
    return _ok("state", f"serving {version}, {info.digest or 'not proven yet'}")


def hazards(info: EngineInfo) -> Iterator[Check]:
    """Lists what an update leaves as it is or cannot prove, and the pauses that the engine refuses."""
    for hazard in info.hazards:
        yield _warn("hazard", one_line(hazard))
    for pause, why in info.no_pause.items():
        yield _warn("pause", f"{pause} is refused: {one_line(why)}")


def _sharing(info: EngineInfo) -> Iterator[Check]:
    """Checks whether memory can be shared.  Nothing here is a failure, since broadcast remains."""
    yield _ok(
        "seen from",
        f"{socket.gethostname()}, process {os.getpid()}: what follows about hosts, memory and addresses holds for "
        "it alone, so run doctor on each host that has trainer ranks",
    )
    if info.on_several_hosts:
        near = [info.named(rank.rank) for rank in info.ranks if rank.host_id == host_id()]
        far = [info.named(rank.rank) for rank in info.ranks if rank.host_id != host_id()]
        ways = f"from here, auto reaches {', '.join(near)} by memory, {', '.join(far)} by broadcast"
        if not near:
            ways = f"none is this process's: broadcast can work, ipc cannot: {', '.join(far)}"
        yield _ok("host", f"the ranks are on several; {ways}")
        return
    if info.host_id != host_id():
        yield _ok("host", "another host than this process: broadcast can work, ipc cannot")
        return
    yield _ok("host", "the same host as this process")
    hidden = [rank for rank in info.ranks if rank.pid and not Path(f"/proc/{rank.pid}").exists()]
    if hidden:
        yield _warn(
            "ipc",
            f"process {hidden[0].pid} of rank {hidden[0].rank} cannot be seen from here: another pid namespace",
            hint="start both containers with one pid namespace (--pid=host), or use --via broadcast",
        )
        return
    devices = dict.fromkeys(rank.device for rank in info.ranks)
    here = visible_gpus()
    if not here and set(devices) != {"cpu"}:
        yield _ok("ipc", "possible, by shared memory: this process sees no GPU, so its weights can only be on the CPU")
        return
    blind = [rank for rank in info.ranks if here and rank.visible and not set(here) & set(rank.visible)]
    if blind:
        yield _warn(
            "ipc",
            f"{info.named(blind[0].rank)} sees only {', '.join(blind[0].visible)}, and this process sees "
            f"{', '.join(here)}: an update takes broadcast",
            hint="for ipc, add the trainer's GPUs to the engine's CUDA_VISIBLE_DEVICES",
        )
        return
    unseen = [rank.device for rank in info.ranks if not rank.visible and device_of(rank.device) is None]
    if unseen:
        yield _warn(
            "ipc",
            f"GPU {unseen[0]} of the engine cannot be seen from here",
            hint="include it in CUDA_VISIBLE_DEVICES (or give the container all GPUs), or use --via broadcast",
        )
        return
    where = "shared memory" if set(devices) == {"cpu"} else f"CUDA IPC on {count_of(len(devices), 'GPU')}"
    yield _ok("ipc", f"possible, by {where}")


def _staging(info: EngineInfo) -> Check:
    if info.staging == "none" and not info.has_receiver:
        page = kind_of(info).receiver_page
        receiver = f"run it with our receiver ({page}), or " if page else ""
        return _warn(
            "staging",
            "none, and no proof of the weights it keeps: an update that fails half way quarantines it",
            hint=f'{receiver}prove with verify="behaviour"',
        )
    if info.staging == "none":
        return _warn(
            "staging",
            "none: an update that fails half way quarantines the engine until the next full one",
            hint="let it stage on the device or the host if there is memory for a second set of weights: "
            + (
                '--additional-config \'{"weightcast": {"staging": "device"}}\', or "host"'
                if info.engine.startswith("vllm ")
                else "--staging device or --staging host"
            ),
        )
    return _ok("staging", f"on the {info.staging}: an update that fails leaves the old version serving")


def _memory(info: EngineInfo, bucket_bytes: int | None) -> Check:
    """Checks that the tensors fit into buckets, and the buckets into this machine's memory; the estimate is plan's."""
    kept = Counter(spec.dtype for spec in info.specs).most_common()
    dtypes = " and ".join(f"{count} in {dtype}" if len(kept) > 1 else f"in {dtype}" for dtype, count in kept)
    model = f"{count_of(len(info.specs), 'tensor')} {dtypes}, {format_bytes(total_bytes(info.specs))}"
    packing = adapter_for(info).packing
    if bucket_bytes is None:
        bucket_bytes = default_bucket_bytes(info.specs, packing=packing, world_size=1, large=_maps_on_gpus(info))
    try:
        need = peak_bytes(info.specs, bucket_bytes=bucket_bytes, packing=packing, world_size=1)
    except ConfigError as error:
        return _fails(
            "memory", one_line(str(error)), hint=error.hint or f"use larger buckets than --bucket-bytes {bucket_bytes}"
        )
    free = free_host_bytes() or None
    if free is not None and free < need:
        return _fails(
            "memory",
            f"{format_bytes(free)} free here, an update needs {format_bytes(need)}",
            hint="use smaller buckets: --bucket-bytes 64MiB",
        )
    room = "" if free is None else f", {format_bytes(free)} free"
    buckets = f"with buckets of {format_bytes(bucket_bytes)} an update needs {format_bytes(need)}"
    return _ok("memory", f"{model}; {buckets} on this machine{room}")


def _maps_on_gpus(info: EngineInfo) -> bool:
    """True if ``connect`` from this host would choose large buckets, which the engine's GPUs map."""
    on_gpus = bool(info.devices) and not {"cpu", "cuda"} & set(info.devices)
    taken = any(spec.maps_buckets and spec.name in info.transports for spec in TRANSPORTS)
    return on_gpus and taken and info.has_receiver and set(info.hosts) == {host_id()}


def _rendezvous(client: Client, info: EngineInfo, *, host: str | None, timeout_s: float) -> list[Check]:
    """Checks the address of the rendezvous, and joins a group with an engine on the CPU."""
    try:
        address = host or local_address_towards(client.target.host, 80)
        _listen_on(address)
    except (OSError, WeightcastError) as error:
        return [
            _fails(
                "rendezvous",
                f"{host or client.target.host}: this machine has no address that engines can reach: {error}",
                hint="pass one with --rendezvous HOST",
            )
        ]
    if any(rank.device != "cpu" for rank in info.ranks):
        text = f"this process listens at {address}; joining was not tried: the engine keeps its weights on GPUs"
        return [_ok("rendezvous", text), *_nccl(info)]
    if info.state != "serving":
        text = f"this process listens at {address}; joining was not tried: the engine is {info.state}"
        return [_warn("rendezvous", text, hint="run this again when the engine serves")]
    try:
        _join_group(client, info, address=address, timeout_s=timeout_s)
    except WeightcastError as error:
        hint = f"allow TCP from {client.target.host} to this machine at {address}, or pass --rendezvous HOST"
        return [_fails("rendezvous", one_line(str(error)), hint=error.hint or hint)]
    return [_ok("rendezvous", f"{count_of(info.tp_size, 'rank')} joined this process at {address} and left again")]


def _nccl(info: EngineInfo) -> Iterator[Check]:
    """Compares NCCL in a trainer with this process's environment to NCCL in the engine's ranks."""
    if torch.cuda.is_available() and any(rank.nccl is not None for rank in info.ranks):
        device = torch.device("cuda")
        place = Topology(infos={"the engine": info}, device=device, places=("",), nccl=(settings_here(device),))
        try:
            check_nccl(place)
        except ConfigError as error:
            yield _warn("nccl", one_line(str(error)), error.hint)
        else:
            yield _ok("nccl", "set alike here and in the engine's ranks")


def _listen_on(address: str) -> None:
    """Listens at the address and connects to it, which fails if it is not an address of this machine."""
    family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as server:
        server.bind(place)
        server.listen(1)
        with socket.create_connection(server.getsockname()[:2], timeout=5.0):
            pass


def _join_group(client: Client, info: EngineInfo, *, address: str, timeout_s: float) -> None:
    """Makes a group of this process and the engine's ranks, and closes it again."""
    name, token = f"doctor-{os.getpid()}-{secrets.token_hex(4)}", secrets.token_hex(16)
    store = Rendezvous(host=address, timeout_s=timeout_s)
    world_size = info.tp_size + 1
    join = Join(
        group=name,
        host=address,
        port=store.port,
        token=token,
        first_rank=1,
        world_size=world_size,
        backend="gloo",
        timeout_s=timeout_s,
    )
    group: UpdateGroup | None = None
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="weightcast-doctor") as pool:
        answer = pool.submit(client.post_json, "/weightcast/apply", encode(join), timeout_s=timeout_s + 10.0)
        try:
            group = UpdateGroup(
                store=store.store,
                name=name,
                token=token,
                rank=0,
                world_size=world_size,
                device=torch.device("cpu"),
                address=address,
                timeout_s=timeout_s,
            )
        finally:
            # The engine's refusal says more than our own timeout.
            refusal = answer.exception()
            if refusal is None:
                client.post_json("/weightcast/apply", encode(Leave(group=name)), timeout_s=timeout_s)
            if group is not None:
                group.close()
            if refusal is not None:
                raise refusal


def _deliveries(checks: list[Check]) -> dict[Delivery, bool]:
    """Returns the deliveries that these checks have found possible."""
    level = {check.name: check.level for check in checks}
    return {"memory": level.get("ipc") == "ok", "group": level.get("rendezvous") != "fail"}


def _transports(checks: list[Check], info: EngineInfo) -> Check:
    """Sums up which transports an update can use."""
    possible = _deliveries(checks)
    # A transport that leaves shards on their ranks has a line of its own.
    ours = [spec for spec in TRANSPORTS if spec.delivery in possible and spec.gathers]
    both = [spec.name for spec in ours if spec.name in info.transports]
    usable = [spec.name for spec in ours if spec.name in both and possible[spec.delivery]]
    if not both:
        return _fails(
            "transports",
            f"the engine accepts {', '.join(info.transports) or 'none'}, "
            f"this process has {', '.join(spec.name for spec in ours)}",
            hint="install the same version of weightcast on both sides",
        )
    if not usable:
        return _fails(
            "transports",
            f"both sides have {' and '.join(both)}, but none can be used",
            hint="fix the checks above that failed",
        )
    return _ok("transports", f"{' and '.join(usable)} can be used")


def _legs_from_here(info: EngineInfo, *, mapped: bool) -> str:
    """The way from trainer ranks on this host to each rank of an engine; ``mapped`` if ranks here can map memory."""
    near = [rank.rank for rank, host in zip(info.ranks, info.hosts, strict=True) if mapped and host == host_id()]
    far = [rank.rank for rank in info.ranks if rank.rank not in near]
    ways = [f"{', '.join(map(info.named, some))} by {by}" for some, by in ((near, "memory"), (far, "messages")) if some]
    return f"from trainer ranks on this host {' and '.join(ways) or 'messages'}"


def _scattered(checks: list[Check], info: EngineInfo) -> Iterator[Check]:
    """Says whether each transport without a gather can reach the engine, by what, and what auto needs to take it."""
    possible = _deliveries(checks)
    if not visible_gpus() and set(info.devices) != {"cpu"}:
        possible["memory"] = False  # engine ranks on GPUs read no shards on a CPU
    for spec in TRANSPORTS:
        if spec.gathers or not spec.offered_by(info) or spec.lacks(info):
            continue
        ways = [way for way in spec.variants if possible[way.delivery]]
        if spec.variants and not ways:
            yield _warn(spec.name, "cannot be used, for the reasons above")
            continue
        auto = "auto does not take it"
        if ways and set(info.devices) == {"cpu"}:
            auto = "auto takes it between hosts where that saves bytes"
        if any(way.in_place for way in ways):
            auto = "auto takes it if the trainer sets keep_mapped=True"
        legs = ""
        if ways:
            legs = f", {_legs_from_here(info, mapped=possible['memory'] or info.on_several_hosts)}"
        yield _ok(spec.name, f"can be used{legs}; {auto}")
