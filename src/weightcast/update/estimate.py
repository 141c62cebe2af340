"""Estimates the buckets, memory and time of an update from its tensors, without an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from weightcast.adapters.registry import all_kinds, kind_named
from weightcast.exporters.fp8_formats import SCALE_SUFFIXES
from weightcast.exporters.memory_estimate import COMPUTED_BYTES, WORK_BYTES, default_bucket_bytes, peak_bytes
from weightcast.protocols import Kind
from weightcast.transports.broadcast import SPEC as BROADCAST
from weightcast.transports.cells import divide, most_ranks
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets, total_bytes


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
        memory_bytes: Bytes that all engine ranks together read in memory of their own hosts, if trainer ranks and
            engine ranks are spread over several hosts, in equal numbers and in their order; 0 for one host.
        message_bytes: Bytes that they get from other hosts then.
        out_of_host_bytes: The most of these that leave one host.
        into_host_bytes: The most of these that one host gets.
        host_seconds: Transfer time of the busiest host with one link; None without a bandwidth or for one host.
    """

    refused: str = ""
    into_engine_rank_bytes: int = 0
    out_of_trainer_rank_bytes: int = 0
    busiest: str = ""
    seconds: float | None = None
    computed: tuple[str, ...] = ()
    memory_bytes: int = 0
    message_bytes: int = 0
    out_of_host_bytes: int = 0
    into_host_bytes: int = 0
    host_seconds: float | None = None


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
    trainer_ranks: int
    trainer_peak_bytes: int
    engine_ranks: int
    link_bytes: int
    all_links_bytes: int
    cells: tuple[int, ...]
    link_gb_per_s: float | None
    seconds: float | None
    direct: DirectPlan


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
    family: str | None = None,
    not_covered: tuple[str, ...] = (),
) -> Plan:
    """Makes the plan for some tensors.  ``Plan`` explains the arguments of the same names.

    Args:
        most_bytes: Size above which a bucket does not keep to a limit of extra memory; None for no limit.
        computed: True if values are computed on the way, such as by quantising.
        tp: Ranks of each engine.
        cell_ranks: As ``AdvancedOptions.cell_ranks``.
        hosts: Number of hosts that trainer ranks and engine ranks are spread over.

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
        seconds=None if link_gb_per_s is None else size_bytes / (link_gb_per_s * 1e9),
        direct=_direct(
            specs,
            kind=kind,
            engine_ranks=engine_ranks,
            tp=tp,
            hosts=hosts,
            trainer_ranks=trainer_ranks,
            link_gb_per_s=link_gb_per_s,
            computed=computed,
        ),
    )


def _direct(
    specs: Sequence[TensorSpec],
    *,
    kind: Kind,
    engine_ranks: int,
    tp: int,
    hosts: int,
    trainer_ranks: int,
    link_gb_per_s: float | None,
    computed: bool,
) -> DirectPlan:
    if not kind.has_receiver:
        return DirectPlan(refused=f"{kind.name} without our receiver takes gathered buckets only")
    into = sum(-(-spec.size_bytes // tp) if len(spec.shape) > 1 else spec.size_bytes for spec in specs)
    out = -(-into * engine_ranks // trainer_ranks)
    most = max(into, out)
    memory = out_of_host = into_host = 0
    if hosts > 1:
        trainers = Counter(rank * hosts // trainer_ranks for rank in range(trainer_ranks))
        readers = Counter(rank * hosts // engine_ranks for rank in range(engine_ranks))
        own = {host: into * trainers[host] // trainer_ranks for host in range(hosts)}  # of each engine rank's bytes
        memory = sum(own[host] * number for host, number in readers.items())
        out_of_host = max(own[host] * (engine_ranks - readers[host]) for host in range(hosts))
        into_host = max((into - own[host]) * readers[host] for host in range(hosts))
    rate = None if link_gb_per_s is None else link_gb_per_s * 1e9
    return DirectPlan(
        memory_bytes=memory,
        out_of_host_bytes=out_of_host,
        into_host_bytes=into_host,
        host_seconds=None if rate is None or hosts == 1 else max(out_of_host, into_host) / rate,
        message_bytes=into * engine_ranks - memory if hosts > 1 else 0,
        into_engine_rank_bytes=into,
        out_of_trainer_rank_bytes=out,
        busiest="trainer rank" if out >= into else "engine rank",
        seconds=None if rate is None else most / rate,
        computed=_quantised(specs) if computed else (),
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
