"""The plan of one bucket's gather: which rank sends which box to which ranks, and in which batch.

Every rank works out the same plan from the same table, so an update needs no negotiation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.source_sums import SumPlaces
from weightcast.errors import ConfigError
from weightcast.exporters.own_parts import OwnPart
from weightcast.exporters.ownership import SharedPart
from weightcast.protocols import BucketUse
from weightcast.wire.box import Box, is_one_run, split
from weightcast.wire.layout import BucketLayout, TensorSlot, TensorSpec

# A smaller scratch buffer only costs round trips.
MIN_SCRATCH_BYTES = 1 << 20
_SCRATCH_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Parcel:
    """A box of one slot on its way from one rank to others.

    Attributes:
        box: Place of the box in the whole tensor.
        source_scratch_bytes: Scratch memory that the source needs for it; 0 if it is sent from where it lies.
        target_scratch_bytes: Scratch memory that each target needs; 0 if it is received in its place.
        summed_at: Place of its sum on the source, which computes it into the scratch buffer; None if not summed there.
    """

    slot: TensorSlot
    box: Box
    source: int
    targets: tuple[int, ...]
    source_scratch_bytes: int
    target_scratch_bytes: int
    summed_at: int | None = None

    def scratch_bytes(self, rank: int) -> int:
        """Scratch memory that a rank needs for it."""
        if rank == self.source:
            return self.source_scratch_bytes
        return self.target_scratch_bytes if rank in self.targets else 0


@dataclass(slots=True)
class GatherPlan:
    """One rank's work for one bucket.

    Attributes:
        receivers: The ranks that have a bucket, in order.
        gathers: Slots that one all-gather fills.
        waves: Batches of parcels that this rank sends or receives.
        scratch_bytes: Scratch memory that the largest wave needs.
        serves: If scattered, the number of the slot and the box of each part that engines read from this rank.
        serves_to: The same for each of ``use.leg_hosts``.
    """

    layout: BucketLayout
    receivers: Sequence[int]
    sum_places: SumPlaces
    own: list[OwnPart] = field(default_factory=list[OwnPart])
    gathers: list[TensorSlot] = field(default_factory=list[TensorSlot])
    waves: list[list[Parcel]] = field(default_factory=list[list[Parcel]])
    scratch_bytes: int = 0
    serves: list[tuple[int, Box]] = field(default_factory=list[tuple[int, Box]])
    serves_to: dict[str, list[tuple[int, Box]]] = field(default_factory=dict[str, list[tuple[int, Box]]])


def plan_gather(
    layout: BucketLayout,
    tensors: Mapping[str, tuple[TensorSpec, Sequence[SharedPart]]],
    group: TrainerGroup,
    use: BucketUse,
) -> GatherPlan:
    """Works out one bucket's gather.

    ``tensors`` has the parts of all ranks.  If nothing is gathered, this rank's own are enough.

    Raises:
        ConfigError: The layout has a tensor that the exporter does not have.
    """
    receivers = range(group.world_size) if use.scattered else use.receivers
    plan = GatherPlan(
        layout, receivers, SumPlaces(group.rank, len(layout.slots)), serves_to={host: [] for host in use.leg_hosts}
    )
    budget_bytes = max(layout.size_bytes // group.world_size, MIN_SCRATCH_BYTES)
    budget_bytes -= budget_bytes % _SCRATCH_ALIGNMENT_BYTES
    load: Counter[int] = Counter()
    turns, far_turns = _Turns(), _Turns()
    used: Counter[int] = Counter()
    waves: list[list[Parcel]] = []
    wave: list[Parcel] = []
    for index, slot in enumerate(layout.slots):
        spec, parts = tensors.get(slot.spec.name, (None, ()))
        if spec != slot.spec:
            raise ConfigError(
                f"bucket {layout.index} carries {slot.spec.name} as {slot.spec.dtype} {list(slot.spec.shape)}, "
                f"and the exporter {'does not have it' if spec is None else f'has {spec.dtype} {list(spec.shape)}'}"
            )
        gathered = not use.scattered and _in_rank_order(slot, parts, group, receivers)
        if gathered:
            plan.gathers.append(slot)
        for part in parts:
            box = _cut_rows(part.box, slot)
            if box is None:
                continue
            if use.scattered:
                _place_sum(plan, index, part, box, None)
                size_bytes = box.numel * slot.spec.torch_dtype.itemsize
                if use.leg_hosts:
                    mine = False
                    for host in use.leg_hosts:
                        near = [rank for rank in part.holders if host and group.hosts[rank] == host]
                        chosen = (turns if host else far_turns).take(near or part.holders, size_bytes)
                        if chosen == group.rank:
                            plan.serves_to[host].append((index, box))
                            mine = True
                    if mine:
                        plan.serves.append((index, box))
                    continue
                candidates = _on_each_host(part, group, use) if use.reading_hosts else (part.holders,)
                if group.rank in [turns.take(holders, size_bytes) for holders in candidates]:
                    plan.serves.append((index, box))
                continue
            parcels = [] if gathered else list(_parcels(slot, part, box, receivers, load, budget_bytes))
            source = parcels[0].source if parcels else None
            place = _place_sum(plan, index, part, box, source)
            for parcel in parcels:
                if source == group.rank and source not in receivers and part.computed:
                    parcel = replace(parcel, summed_at=place)
                needs = {rank: parcel.scratch_bytes(rank) for rank in (parcel.source, *parcel.targets)}
                if any(used[rank] + needed > budget_bytes for rank, needed in needs.items() if needed):
                    waves.append(wave)
                    wave = []
                    used.clear()
                used.update(needs)
                wave.append(parcel)
    waves.append(wave)
    mine = [[parcel for parcel in wave if group.rank in (parcel.source, *parcel.targets)] for wave in waves]
    plan.waves = [wave for wave in mine if wave]
    plan.scratch_bytes = max((sum(parcel.scratch_bytes(group.rank) for parcel in wave) for wave in mine), default=0)
    return plan


def align(size_bytes: int) -> int:
    """Size of a box in the scratch buffer, in bytes."""
    return -(-size_bytes // _SCRATCH_ALIGNMENT_BYTES) * _SCRATCH_ALIGNMENT_BYTES


def _place_sum(plan: GatherPlan, index: int, part: SharedPart, box: Box, source: int | None) -> int | None:
    """Enters a part in ``own`` if this rank holds it; returns the place of its sum, None if this rank takes none.

    Every holder sums what lies in its memory.  A computed value is summed where it is first written: in the bucket of
    a receiver that holds the part, or on the rank that sends it.  Holders of one computed part compute it from
    replicas, and the sums of those replicas are compared.  ``source`` is None if no rank sends the part.
    """
    slot, places = plan.layout.slots[index], plan.sum_places
    name, rank, takers = slot.spec.name, places.rank, part.holders
    if rank not in part.holders:
        return None
    origin = None
    if part.computed:
        takers = tuple(one for one in part.holders if one in plan.receivers or one == source)
        origin = places.place(name, None, part.holders) if len(part.holders) > 1 else None
    place = places.place(name, index, takers) if rank in takers else None
    plan.own.append(OwnPart(slot=slot, number=index, box=box, place=place, origin=origin, computed=part.computed))
    return place


def _in_rank_order(
    slot: TensorSlot, parts: Sequence[SharedPart], group: TrainerGroup, receivers: Sequence[int]
) -> bool:
    """True if rank r holds the r-th of equal parts of the slot and every rank receives all of them."""
    world = group.world_size
    if not group.uses_nccl or not slot.whole or len(receivers) != world or len(parts) != world:
        return False
    rows = slot.spec.num_rows // world
    return all(
        part.holders == (rank,)
        and part.box.offset == (rank * rows, *(0 for _ in slot.spec.shape[1:]))
        and part.box.shape == (rows, *slot.spec.shape[1:])
        for rank, part in enumerate(parts)
    )


def _parcels(
    slot: TensorSlot,
    part: SharedPart,
    box: Box,
    receivers: Sequence[int],
    load: Counter[int],
    budget_bytes: int,
) -> Iterator[Parcel]:
    targets = tuple(rank for rank in receivers if rank not in part.holders)
    if not targets:
        return
    itemsize = slot.spec.torch_dtype.itemsize
    source = _least_loaded(part.holders, load, math.prod(box.shape) * itemsize)

    def parcel(box: Box) -> Parcel:
        scratch_bytes = align(math.prod(box.shape) * itemsize)
        in_place = is_one_run(box.shape, slot.shape)
        # A receiver that is also the source has the box in its bucket, cast, before anything is sent.
        as_it_is = source in receivers and in_place
        as_it_is = as_it_is or (part.ready and is_one_run(box.shape, part.box.shape))
        return Parcel(slot, box, source, targets, 0 if as_it_is else scratch_bytes, 0 if in_place else scratch_bytes)

    whole = parcel(box)
    if not whole.source_scratch_bytes and not whole.target_scratch_bytes:
        yield whole
        return
    for small in split(box, max(budget_bytes // itemsize, 1)):
        yield parcel(small)


def check_on_each_host(name: str, parts: Sequence[SharedPart], group: TrainerGroup, use: BucketUse) -> None:
    """Raises ConfigError, the same on every rank, if a host whose engines read there lacks a part of a tensor."""
    for part in parts:
        for host, ranks in zip(use.reading_hosts, _on_each_host(part, group, use), strict=True):
            if not ranks:
                raise ConfigError(
                    f"no trainer rank on host {host} holds {list(part.box.shape)} at {list(part.box.offset)} of "
                    f"{name}, and engines there read it from trainer ranks of their host",
                    hint="was the model sharded anew since connect()?",
                )


def _on_each_host(part: SharedPart, group: TrainerGroup, use: BucketUse) -> list[list[int]]:
    """The holders of a part on each host whose engines read it."""
    return [[rank for rank in part.holders if group.hosts[rank] == host] for host in use.reading_hosts]


def _least_loaded(holders: Sequence[int], load: Counter[int], size_bytes: int) -> int:
    """The holder that gives least so far, and gives these bytes from now on."""
    source = min(holders, key=lambda rank: (load[rank], rank))
    load[source] += size_bytes
    return source


class _Turns:
    """Shares out by bytes the parts that the same ranks hold, so that these can tell without the parts of others."""

    def __init__(self) -> None:
        self._loads: dict[tuple[int, ...], Counter[int]] = {}

    def take(self, holders: Sequence[int], size_bytes: int) -> int:
        """The holder that gives the next part of so many bytes."""
        return _least_loaded(holders, self._loads.setdefault(tuple(holders), Counter()), size_bytes)


def _cut_rows(box: Box, slot: TensorSlot) -> Box | None:
    """The rows of a box that are in this slot; None if there are none."""
    if not box.shape:
        return box
    start = max(box.offset[0], slot.first_row)
    end = min(box.offset[0] + box.shape[0], slot.first_row + slot.num_rows)
    if start >= end:
        return None
    return Box(offset=(start, *box.offset[1:]), shape=(end - start, *box.shape[1:]))
