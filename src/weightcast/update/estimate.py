"""Estimates the buckets, memory and time of an update from its tensors, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from weightcast.adapters.registry import all_kinds, kind_named
from weightcast.errors import ConfigError
from weightcast.exporters.fp8_formats import SCALE_SUFFIXES
from weightcast.exporters.memory_estimate import COMPUTED_BYTES, WORK_BYTES, default_bucket_bytes, peak_bytes
from weightcast.protocols import Kind
from weightcast.transports.broadcast import BY_RANK
from weightcast.transports.broadcast import SPEC as BROADCAST
from weightcast.transports.cells import divide, most_ranks
from weightcast.transports.direct import SPEC as DIRECT
from weightcast.transports.ipc import SPEC as IPC
from weightcast.transports.link_bytes import mixed, share_bytes
from weightcast.transports.preflight import choose_gathered, choose_scattered, choose_transport
from weightcast.transports.topology import Topology
from weightcast.wire.engine_info import EngineInfo, RankInfo
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets, total_bytes
from weightcast.wire.messages import PROTOCOL


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Buckets, and the smallest possible ones in bytes, that one kind of engine needs; 0 if the tensors do not fit."""

    engine: str
    buckets: int
    needs_bucket_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectPlan:
    """The update over ``direct``, if trainer ranks hold equal parts and engine ranks cut every matrix evenly.

    Attributes:
        refused: The reason why it cannot go over ``direct`` at all; empty if it can.
        out_of_trainer_rank_bytes: Bytes that each trainer rank sends, or that engine ranks read from it.
        busiest: The link with most bytes: ``trainer rank`` or ``engine rank``.
        seconds: Transfer time on the busiest link alone; None without a bandwidth.
        computed: Names of the tensors whose values are computed when they are sent.  They cannot be read in place, with
            ``keep_mapped``, and go by bucket.
        memory_bytes: Bytes that all engine ranks together read in memory of their own hosts, if some have trainer ranks
            beside them and others do not, or not those with all weights; otherwise 0.
        message_bytes: Bytes that they get from other hosts then.
    """

    refused: str = ""
    into_engine_rank_bytes: int = 0
    out_of_trainer_rank_bytes: int = 0
    busiest: str = ""
    seconds: float | None = None
    computed: tuple[str, ...] = ()
    memory_bytes: int = 0
    message_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WayPlan:
    """One way of an update between hosts.

    Attributes:
        name: Transport, and its variant if there are several, such as ``direct by relay``.
        busiest_bytes: Bytes on the busiest link, if each host has one (``transports/link_bytes.py``).
        cost_bytes: Bytes that this link could have carried in the time of an update, by which the way is chosen; more
            than ``busiest_bytes`` if links wait for each other.
        busiest_link: That link, such as ``out of host 1``.
        seconds: Time of an update on that link; None without a bandwidth.
        taken_by: Those of ``transport="auto"`` and ``"direct"`` that take this way.
    """

    name: str
    busiest_bytes: int
    cost_bytes: int
    busiest_link: str
    seconds: float | None
    taken_by: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Estimate of one update.

    Attributes:
        size_bytes: Payload of one copy of the model.
        default_bucket_bytes: Sizes of a bucket that ``connect`` chooses by itself: ``ipc`` by ipc on GPUs with enough
            free memory, ``other`` for everything else.
        cut: Names of the tensors that are sent in several buckets, in order.
        oversized: Names of the tensors that are larger than a bucket, in order.
        alone: Names of the tensors that have a bucket to themselves, in order.
        family: Table of names that was used, if any.
        not_covered: Tensors that no update contains, with the reason.
        trainer_peak_bytes: Extra memory of a trainer rank at its peak: two buckets (one if there is only one), the
            scratch buffer of a gather, and 64 MiB for sums and casts.
        link_bytes: Bytes that each engine rank receives.
        cells: Number of engine ranks in each process group, where engines get their weights in groups.
        link_gb_per_s: Assumed bandwidth in 10^9 bytes per second; None if none was given.
        seconds: Transfer time alone at that bandwidth, with every link busy at once.
        ways: The ways between hosts; none on one host, or for engines without our receiver.
    """

    model: str
    engine: str
    tensors: int
    size_bytes: int
    buckets: int
    bucket_bytes: int
    default_bucket_bytes: dict[str, int]
    largest_bucket_bytes: int
    cut: tuple[str, ...]
    oversized: tuple[str, ...]
    alone: tuple[str, ...]
    dtypes: dict[str, int]
    packing: Packing
    others: tuple[EnginePlan, ...]
    family: str | None
    not_covered: tuple[str, ...]
    device: str
    trainer_ranks: int
    trainer_peak_bytes: int
    engine_ranks: int
    link_bytes: int
    all_links_bytes: int
    cells: tuple[int, ...]
    link_gb_per_s: float | None
    seconds: float | None
    direct: DirectPlan
    ways: tuple[WayPlan, ...]


def make_plan(
    specs: Sequence[TensorSpec],
    *,
    model: str,
    engine: str,
    packing: Packing,
    engine_ranks: int,
    bucket_bytes: int | None = None,
    most_bytes: int | None = None,
    link_gb_per_s: float | None = None,
    trainer_ranks: int = 1,
    computed: bool = False,
    tp: int = 1,
    cell_ranks: int | None = None,
    hosts: int = 1,
    engine_hosts: int = 0,
    device: str = "cuda",
    family: str | None = None,
    not_covered: tuple[str, ...] = (),
) -> Plan:
    """Makes the plan for some tensors.  ``Plan`` explains the arguments of the same names.

    Args:
        most_bytes: Size above which a bucket does not keep to a limit of extra memory; None for no limit.
        computed: True if values are computed on the way, such as by quantising.
        tp: Ranks of each engine.
        cell_ranks: As ``AdvancedOptions.cell_ranks``.
        hosts: Number of hosts that trainer ranks are spread over, evenly and in order.
        engine_hosts: Number of other hosts that engine ranks are spread over; 0 if they are on those of the trainer.
        device: ``cuda`` or ``cpu``.

    It raises ConfigError if a tensor, or a row of one that may be cut, is larger than a bucket.
    """
    kind = kind_named(engine)
    default = {
        way: default_bucket_bytes(specs, packing=packing, world_size=trainer_ranks, large=large)
        for way, large in {"ipc": kind.speaks.sharing == "weightcast", "other": False}.items()
    }
    bucket_bytes = default["ipc"] if bucket_bytes is None else bucket_bytes
    if most_bytes is not None:
        bucket_bytes = min(bucket_bytes, most_bytes)
    layouts = plan_buckets(specs, bucket_bytes=bucket_bytes, packing=packing)
    size_bytes = total_bytes(specs)
    largest = max((layout.size_bytes for layout in layouts), default=0)
    cut = dict.fromkeys(slot.spec.name for layout in layouts for slot in layout.slots if not slot.whole)
    alone = [layout.slots[0].spec.name for layout in layouts if len(layout.slots) == 1 and layout.slots[0].whole]
    dtypes: dict[str, int] = {}
    for spec in specs:
        dtypes[spec.dtype] = dtypes.get(spec.dtype, 0) + spec.size_bytes
    fleet = _fleet(
        specs,
        trainer_ranks=trainer_ranks,
        engine_ranks=engine_ranks,
        tp=tp,
        hosts=hosts,
        engine_hosts=engine_hosts,
        device=device,
        cell_ranks=cell_ranks,
    )
    rate = None if link_gb_per_s is None else link_gb_per_s * 1e9
    cells = tuple(map(sum, divide([tp] * (engine_ranks // tp), int, most_ranks(BROADCAST.cells, cell_ranks))))
    return Plan(
        model=model,
        engine=engine,
        tensors=len(specs),
        size_bytes=size_bytes,
        buckets=len(layouts),
        bucket_bytes=bucket_bytes,
        default_bucket_bytes=default,
        largest_bucket_bytes=largest,
        cut=tuple(cut),
        oversized=tuple(spec.name for spec in specs if spec.size_bytes > bucket_bytes),
        alone=tuple(alone),
        dtypes=dtypes,
        packing=packing,
        others=tuple(_engine_plan(other, specs, bucket_bytes) for other in all_kinds()),
        family=family,
        not_covered=not_covered,
        device=device,
        trainer_ranks=trainer_ranks,
        trainer_peak_bytes=peak_bytes(
            specs,
            bucket_bytes=bucket_bytes,
            packing=packing,
            world_size=trainer_ranks,
            work_bytes=WORK_BYTES + (COMPUTED_BYTES if computed else 0),
        ),
        engine_ranks=engine_ranks,
        link_bytes=size_bytes,
        all_links_bytes=size_bytes * engine_ranks,
        cells=cells,
        link_gb_per_s=link_gb_per_s,
        seconds=None if rate is None else size_bytes / rate,
        direct=_direct(fleet, kind, rate, computed=computed),
        ways=_ways(fleet, rate) if kind.has_receiver and hosts + engine_hosts > 1 else (),
    )


def _fleet(
    specs: Sequence[TensorSpec],
    *,
    trainer_ranks: int,
    engine_ranks: int,
    tp: int,
    hosts: int,
    engine_hosts: int,
    device: str,
    cell_ranks: int | None,
) -> Topology:
    """The trainer and the engines that were described, each rank on a GPU of its own or all on CPUs."""

    def place(side: str, rank: int) -> str:
        return "cpu" if device == "cpu" else f"GPU-{side}-{rank}"

    first, others = (hosts, engine_hosts) if engine_hosts else (0, hosts)
    on = [str(1 + first + rank * others // engine_ranks) for rank in range(engine_ranks)]
    infos: dict[str, EngineInfo] = {}
    for number, start in enumerate(range(0, engine_ranks, tp)):
        near = on[start : start + tp]
        infos[f"engine {number}"] = EngineInfo(
            protocol=PROTOCOL,
            engine="engine",
            model="",
            state="serving",
            version=None,
            digest=None,
            tp_size=len(near),
            host_id=near[0],
            ranks=tuple(
                RankInfo(rank=rank, pid=0, device=place("engine", start + rank), host_id=host)
                for rank, host in enumerate(near)
            ),
            staging="device",
            transports=("ipc", "direct", "broadcast"),
            specs=(),
        )
    return Topology(
        infos=infos,
        device=torch.device(device),
        places=[place("trainer", rank) for rank in range(trainer_ranks)],
        hosts=[str(1 + rank * hosts // trainer_ranks) for rank in range(trainer_ranks)],
        specs=specs,
        cell_ranks=cell_ranks,
    )


def _ways(fleet: Topology, rate: float | None) -> tuple[WayPlan, ...]:
    try:
        auto = {choose_scattered(fleet)}
    except ConfigError:
        alone = [replace(fleet, infos={url: info}) for url, info in fleet.infos.items()]
        auto = set(map(choose_gathered, alone))
    direct = choose_transport("direct", fleet)
    found: list[WayPlan] = []
    shown = ("messages", "relay") if fleet.device.type == "cpu" else ("messages",)
    for spec in (IPC, BY_RANK, BROADCAST, *DIRECT.variants):
        taken = tuple(name for name, those in (("auto", auto), ("direct", {direct})) if spec in those)
        if not taken and not spec.suits(fleet) and spec.variant not in shown:
            continue
        assert spec.link_bytes is not None
        sent = spec.link_bytes(fleet)
        found.append(
            WayPlan(
                name=f"{spec.name} by {spec.variant}" if spec.variant else spec.name,
                busiest_bytes=sent.busiest,
                cost_bytes=sent.cost,
                busiest_link=sent.busiest_link,
                seconds=None if rate is None else sent.cost / rate,
                taken_by=taken,
            )
        )
    return tuple(found)


def _direct(fleet: Topology, kind: Kind, rate: float | None, *, computed: bool) -> DirectPlan:
    if not kind.has_receiver:
        return DirectPlan(refused=f"{kind.name} without our receiver takes gathered buckets only")
    infos = list(fleet.infos.values())
    shares = [share_bytes(fleet.specs, info.tp_size) for info in infos for _ in info.ranks]
    into, out = max(shares), -(-sum(shares) // len(fleet.places))
    messages = sum(mixed(fleet).out.values())
    near = any(host for url in fleet.infos for host in fleet.reads_on(url))
    return DirectPlan(
        memory_bytes=sum(shares) - messages if near and messages else 0,
        message_bytes=messages if near else 0,
        into_engine_rank_bytes=into,
        out_of_trainer_rank_bytes=out,
        busiest="trainer rank" if out >= into else "engine rank",
        seconds=None if rate is None else max(into, out) / rate,
        computed=_quantised(fleet.specs) if computed else (),
    )


def _quantised(specs: Sequence[TensorSpec]) -> tuple[str, ...]:
    """Names of the 8-bit tensors, and of the scales beside them."""
    return tuple(spec.name for spec in specs if "float8" in spec.dtype or spec.name.endswith(SCALE_SUFFIXES))


def _engine_plan(kind: Kind, specs: Sequence[TensorSpec], bucket_bytes: int) -> EnginePlan:
    packing = kind.speaks.packing
    needed = max((spec.row_bytes if packing.slices else spec.size_bytes for spec in specs), default=0)
    buckets = 0
    if needed <= bucket_bytes:
        buckets = len(plan_buckets(specs, bucket_bytes=bucket_bytes, packing=packing))
    return EnginePlan(engine=kind.name, buckets=buckets, needs_bucket_bytes=needed)
