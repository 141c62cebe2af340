"""Gathers sharded tensors into buckets, from the rank that holds a part to the ranks that need it.

No rank ever holds a whole tensor beside its bucket.  A part that lies contiguously in the bucket is received in its
place.  Other parts, and parts that are cast before they are sent, pass through a scratch buffer: the bucket's size
divided by the number of ranks.  The traffic of a bucket is one batch, or several where the scratch buffer is too small.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch

from weightcast.comm.ipc import shared_buffer_at
from weightcast.comm.trainer_group import Move, TrainerGroup
from weightcast.digest.definition import partial_sums
from weightcast.digest.source_sums import Taker
from weightcast.digest.transfers import prepare_kernels
from weightcast.errors import ConfigError
from weightcast.exporters.gather_plan import GatherPlan, Parcel, align, check_on_each_host, plan_gather
from weightcast.exporters.held_parts import Batch, Held, HeldParts, InMemory, Local, Watch, is_ready, region, to_sum
from weightcast.exporters.own_parts import OwnParts
from weightcast.exporters.ownership import PartTable, SharedPart
from weightcast.protocols import BucketUse, Lying, PlannedBucket
from weightcast.wire.box import is_one_run, slices
from weightcast.wire.bucket import Bucket
from weightcast.wire.casts import is_copied_cast, why_no_cast
from weightcast.wire.layout import BucketLayout, TensorSpec


class Gatherer:
    """Gathers the tensors of one exporter.

    Args:
        local: The parts that this rank holds now of the tensor with this number.  Called anew for every bucket.
        shared: The parts that all ranks hold.  Several ranks may hold replicas of a part.
        watch: A quicker way than ``local`` to parts that lie in memory; None if there is none.
        batch: A quicker way to write parts that do not; None if there is none.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        local: Local,
        shared: PartTable,
        watch: Watch | None = None,
        batch: Batch | None = None,
    ) -> None:
        self._specs = tuple(specs)
        self._held = HeldParts(self._specs, local, watch, batch)
        self._shared = shared
        self._group: TrainerGroup | None = None
        self._mine: dict[int, tuple[Sequence[SharedPart], tuple[str, ...], Sequence[SharedPart]]] = {}

    def prepare(self, group: TrainerGroup) -> None:
        """Exchanges which rank holds which part, as ``PartTable.agree`` does.  Collective."""
        if self._group is group:
            return
        prepare_kernels(group.device)
        self._shared.agree(group)
        self._mine.clear()
        self._group = group

    def plan(self, layout: BucketLayout, group: TrainerGroup, use: BucketUse) -> GatherBucket:
        """Plans a bucket.

        ``ConfigError`` if the layout is not of these tensors, or a host lacks a part that its engines read there.
        """
        tensors: dict[str, tuple[TensorSpec, Sequence[SharedPart]]] = {}
        for slot in layout.slots:
            number = self._held.number.get(slot.spec.name)
            if number is not None:
                spec = self._as_sent(number, slot.spec)
                parts = self._own(number, group, use) if use.scattered else self._all(number, spec)
                tensors[slot.spec.name] = spec, parts
        return GatherBucket(plan_gather(layout, tensors, group, use), group, use, self._held)

    def _own(self, number: int, group: TrainerGroup, use: BucketUse) -> Sequence[SharedPart]:
        """The parts of a tensor that this rank holds."""
        parts = self._shared.parts(number)
        known = self._mine.get(id(parts), (None, (), ()))
        if known[0] is not parts or known[1] != use.reading_hosts:  # tensors that are held alike share one list
            check_on_each_host(self._specs[number].name, parts, group, use)
            mine = [part for part in parts if group.rank in part.holders]
            known = self._mine[id(parts)] = parts, use.reading_hosts, mine
        return known[2]

    def whole_on(self, hosts: Sequence[str]) -> frozenset[str]:
        """Hosts whose ranks hold all tensors together; see ``Exporter.whole_on``."""
        whole = set(hosts)
        seen: dict[int, object] = {}
        for number in range(len(self._specs)):
            parts = self._shared.parts(number)
            if id(parts) in seen:  # tensors that are held alike share one list
                continue
            seen[id(parts)] = parts
            for part in parts:
                whole.intersection_update(hosts[rank] for rank in part.holders)
        return frozenset(whole)

    def unmappable(self, group: TrainerGroup, specs: Sequence[TensorSpec], *, casts: bool) -> list[str]:
        """Names of tensors that others cannot read where this rank keeps them; see ``Exporter.unmappable``."""
        return [
            spec.name
            for number, spec in enumerate(specs)
            if any(not _is_mappable(held, spec, group.device, casts=casts) for held in self._held.local(number))
        ]

    def _as_sent(self, number: int, sent: TensorSpec) -> TensorSpec:
        """A tensor for a layout that may have it in another dtype, to which it is cast then."""
        spec = self._specs[number]
        if spec.dtype == sent.dtype or why_no_cast(spec.name, spec.torch_dtype, sent.torch_dtype):
            return spec
        return msgspec.structs.replace(spec, dtype=sent.dtype)

    def _all(self, number: int, sent: TensorSpec) -> Sequence[SharedPart]:
        """The parts of a tensor that all ranks hold; what is cast cannot be sent as it is."""
        parts = self._shared.parts(number)
        return parts if sent is self._specs[number] else [replace(part, ready=False) for part in parts]


class GatherBucket(PlannedBucket):
    """A bucket that ranks fill from the parts that they hold.

    When ``fill`` returns, the bucket is complete and the model's memory may be written again.  ``fill`` returns sums
    where this rank copied all of the bucket itself, and computed nothing and cast nothing but masters
    (``is_copied_cast``).  It raises ``ConfigError`` if the model has changed since the bucket was planned, and
    ``TrainerRankFailed`` if another rank failed.
    """

    def __init__(self, plan: GatherPlan, group: TrainerGroup, use: BucketUse, held: HeldParts) -> None:
        super().__init__(plan.layout, group)
        self.serves, self.serves_to, self.sum_places = plan.serves, plan.serves_to, plan.sum_places
        self._plan = plan
        self._group = group
        self.use = use
        self._held = held
        self._own = OwnParts(plan.layout, plan.own, held, group.device)

    def prepare(self, data: torch.Tensor | None) -> None:
        """Implements ``PlannedBucket.prepare``."""
        group, use = self._group, self.use
        with torch.no_grad():
            copies = use.copies and group.rank in self._plan.receivers
            self._own.prepare(copies=copies, sums=use.sums, data=data)

    def fill(self, data: torch.Tensor | None, taker: Taker | None = None) -> torch.Tensor | None:
        """Implements ``PlannedBucket.fill``."""
        plan, own, group = self._plan, self._own, self._group
        if (group.rank in plan.receivers) != (data is not None):
            raise ConfigError(f"trainer rank {group.rank} must have a bucket if, and only if, it is a receiver")
        bucket = Bucket(self.layout, data) if data is not None else None
        what = f"its part of bucket {self.layout.index}"
        sums = None
        with torch.no_grad():
            look = own.look() if own and (bucket is not None or taker is not None) else None
            if bucket is not None and look is not None:
                sums = own.copy_into(bucket, taker, look)
            if plan.gathers:
                assert bucket is not None
                group.all_gather([bucket.view(slot) for slot in plan.gathers], what=what)
            scratch = _Scratch(plan.scratch_bytes, group.device)
            for wave in plan.waves:
                self._move(wave, bucket, scratch, what, taker)
            if taker is not None and look is not None and sums is None:
                # Last, because the other ranks do not wait for it.
                own.sum_in_place(taker, look)
        return None if plan.gathers or plan.waves or self.use.scattered else sums

    def own_memory(self) -> Lying:
        """Implements ``PlannedBucket.own_memory``."""
        return self._own.lying(self._plan.serves)

    def sum_own(self, taker: Taker) -> None:
        """Implements ``PlannedBucket.sum_own``."""
        with torch.no_grad():
            if self._own:
                self._own.sum_in_place(taker, self._own.look())

    def _move(
        self, wave: Sequence[Parcel], bucket: Bucket | None, scratch: _Scratch, what: str, taker: Taker | None
    ) -> None:
        rank = self._group.rank
        scratch.reset()
        sends: list[Move] = []
        receives: list[Move] = []
        scatters: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parcel in wave:
            if parcel.source == rank:
                outgoing = self._outgoing(parcel, bucket, scratch, taker)
                sends.extend(Move(target, outgoing) for target in parcel.targets)
            elif rank in parcel.targets:
                assert bucket is not None
                place = incoming = region(bucket, parcel.slot, parcel.box)
                if parcel.target_scratch_bytes:
                    incoming = scratch.take(parcel.box.shape, parcel.slot.spec.torch_dtype)
                    scatters.append((place, incoming))
                receives.append(Move(parcel.source, incoming))
        self._group.move(sends, receives, what=what)
        for place, incoming in scatters:
            place.copy_(incoming)

    def _outgoing(self, parcel: Parcel, bucket: Bucket | None, scratch: _Scratch, taker: Taker | None) -> torch.Tensor:
        if not parcel.source_scratch_bytes and bucket is not None and is_one_run(parcel.box.shape, parcel.slot.shape):
            return region(bucket, parcel.slot, parcel.box)  # cast and in place already
        held = self._held.find(parcel.slot.spec.name, parcel.box)
        if not parcel.source_scratch_bytes:
            return _as_it_lies(held, parcel, self._group.device)
        outgoing = scratch.take(parcel.box.shape, parcel.slot.spec.torch_dtype)
        held.write(parcel.box, outgoing)
        if taker is not None and parcel.summed_at is not None:
            taker.add(torch.tensor([parcel.summed_at]), partial_sums([to_sum(parcel.slot, parcel.box, outgoing)]))
        return outgoing


def _is_mappable(held: Held, spec: TensorSpec, device: torch.device, *, casts: bool) -> bool:
    """True if others can read a part where it lies."""
    if not isinstance(held, InMemory) or held.source is None:
        return False
    memory, sent = held.memory, spec.torch_dtype
    if memory.device != device or not (memory.dtype == sent or (casts and is_copied_cast(memory.dtype, sent))):
        return False
    return device.type == "cuda" or not memory.numel() or shared_buffer_at(memory.data_ptr()) is not None


class _Scratch:
    """A buffer for boxes that cannot be sent or received in place; each wave reuses it."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        if device.type == "cpu" and size_bytes:
            # Unmapped when this object is gone; malloc would keep the memory.
            self._data = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
        else:
            self._data = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._taken_bytes = 0

    def reset(self) -> None:
        self._taken_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        start, size_bytes = self._taken_bytes, math.prod(shape) * dtype.itemsize
        self._taken_bytes += align(size_bytes)
        return self._data[start : start + size_bytes].view(dtype).view(shape)


def _as_it_lies(held: Held, parcel: Parcel, device: torch.device) -> torch.Tensor:
    """The memory of a box that the plan sends without a copy."""
    spec, memory = parcel.slot.spec, held.memory
    if memory is None:
        raise ConfigError(f"{spec.name} is computed, which it was not when the exporter was prepared")
    outgoing = memory[slices(parcel.box, held.box.offset)]
    if not is_ready(outgoing, spec, device):
        raise ConfigError(
            f"{spec.name} is {outgoing.dtype} on {outgoing.device} with strides {outgoing.stride()}, "
            "which it was not when the exporter was prepared"
        )
    return outgoing
