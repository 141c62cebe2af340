"""Gathers sharded tensors into buckets, from the rank that holds a part to the ranks that need it.

No rank ever holds a whole tensor beside its bucket.  A part that lies contiguously in the bucket is received in its
place.  Other parts, and parts that are cast before they are sent, pass through a scratch buffer: the bucket's size
divided by the number of ranks.  The traffic of a bucket is one batch, or several where the scratch buffer is too small.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import torch

from weightcast.comm.ipc import shared_buffer_at
from weightcast.comm.trainer_group import Move, TrainerGroup
from weightcast.digest.definition import partial_sums
from weightcast.digest.source_sums import Folded, SourceSums, Taker
from weightcast.digest.transfers import prepare_kernels
from weightcast.errors import ConfigError
from weightcast.exporters.gather_plan import GatherPlan, Parcel, align, plan_gather
from weightcast.exporters.held_parts import Batch, Held, HeldParts, InMemory, Local, Watch, is_ready, region, to_sum
from weightcast.exporters.own_parts import OwnMemory, OwnParts
from weightcast.exporters.ownership import Shared, SharedPart
from weightcast.protocols import BucketUse
from weightcast.wire.box import Box, is_one_run, slices
from weightcast.wire.bucket import Bucket
from weightcast.wire.casts import why_no_cast
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
        shared: Shared,
        watch: Watch | None = None,
        batch: Batch | None = None,
    ) -> None:
        self._specs = tuple(specs)
        self._held = HeldParts(self._specs, local, watch, batch)
        self._shared = shared
        self._group: TrainerGroup | None = None
        self._plans: dict[int, tuple[GatherPlan, OwnParts]] = {}

    def prepare(self, group: TrainerGroup) -> None:
        """Exchanges which rank holds which part, as ``Shared.agree`` does.  Collective."""
        if self._group is group:
            return
        prepare_kernels(group.device)
        self._shared.agree(group)
        self._plans.clear()
        self._group = group

    def plan(
        self,
        layout: BucketLayout,
        group: TrainerGroup,
        use: BucketUse,
        *,
        data: torch.Tensor | None = None,
        receivers: tuple[int, ...] | None = None,
    ) -> None:
        """Works out what a bucket needs; see ``Planning.plan``.

        Args:
            data: The buffer that it will be filled into; None if that is not there yet.
            receivers: As for ``fill``.
        """
        receivers = tuple(range(group.world_size)) if use.scattered else receivers or group.receivers
        plan, own = self._plan(layout, group, receivers, scattered=use.scattered)
        if use.sums and group.is_head:
            plan.ledger.prepare(group.world_size)
        with torch.no_grad():
            copies = use.copies and group.rank in receivers
            own.prepare(group.device, copies=copies, sums=use.sums, data=data)

    def fill(
        self,
        bucket: Bucket | None,
        layout: BucketLayout,
        group: TrainerGroup,
        receivers: tuple[int, ...] | None = None,
        sources: SourceSums | None = None,
    ) -> torch.Tensor | None:
        """Writes the layout's tensors into the bucket of every receiver.  Collective.

        When it returns, the bucket is complete and the model's memory may be written again.

        Args:
            bucket: This rank's bucket, on a receiver; None elsewhere.
            receivers: The ranks that have a bucket, in order; None for ``group.receivers``.
            sources: Takes the sums of this rank's parts, as ``fold`` reads them; None for no sums.

        Returns:
            ``Bucket.sums``, where this rank copied all of the bucket itself and nothing was cast or computed.

        Raises:
            ConfigError: The layout is not of these tensors, or the model has changed since it was prepared.
            TrainerRankFailed: Another rank failed; the message names it.
        """
        self.prepare(group)
        try:
            return self._fill(bucket, layout, group, receivers or group.receivers, sources)
        except BaseException as error:
            # The other ranks would wait for this one until their deadline.
            group.abort(f"{type(error).__name__}: {error}")
            raise

    def fill_own(
        self, bucket: Bucket, layout: BucketLayout, group: TrainerGroup, sources: SourceSums | None = None
    ) -> None:
        """Writes this rank's parts into its own bucket; other bytes stay, nothing moves.  Errors as for ``fill``."""
        plan, own = self._plan(layout, group, tuple(range(group.world_size)), scattered=True)
        taker = sources.reserve(plan.ledger.count(group.rank)) if sources is not None else None
        with torch.no_grad():
            summed = own.copy_into(bucket, taker) is not None if own else False
            if taker is not None:
                own.sum_in_place(taker, summed_on_the_way=summed)

    def serves(self, layout: BucketLayout, group: TrainerGroup) -> Sequence[tuple[int, Box]]:
        """Number of the slot and box of each part that engines read from this rank; see ``Scattering.serves``."""
        return self._plan(layout, group, tuple(range(group.world_size)), scattered=True)[0].serves

    def serves_to(self, layout: BucketLayout, group: TrainerGroup) -> Mapping[str, Sequence[tuple[int, Box]]]:
        """The same for engine ranks on each host; see ``Scattering.serves_to``."""
        return self._plan(layout, group, tuple(range(group.world_size)), scattered=True)[0].serves_to

    def whole_on(self, hosts: Sequence[str]) -> frozenset[str]:
        """Hosts whose ranks hold all tensors together; see ``Scattering.whole_on``."""
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

    def unmappable(self, group: TrainerGroup) -> list[str]:
        """Names of tensors that others cannot read where this rank keeps them; see ``Mappable.unmappable``."""
        self.prepare(group)
        return [
            spec.name
            for number, spec in enumerate(self._specs)
            if any(not _lies_as_it_travels(held, spec, group.device) for held in self._held.local(number))
        ]

    def own_memory(self, layout: BucketLayout, group: TrainerGroup) -> OwnMemory:
        """Places of the parts that engines read where this rank keeps them; see ``Mappable.own_memory``."""
        self.prepare(group)
        plan, own = self._plan(layout, group, tuple(range(group.world_size)), scattered=True)
        return own.lying(plan.serves)

    def sum_own(self, layout: BucketLayout, group: TrainerGroup, sources: SourceSums) -> None:
        """Sums this rank's parts where they lie; see ``Mappable.sum_own``."""
        plan, own = self._plan(layout, group, tuple(range(group.world_size)), scattered=True)
        taker = sources.reserve(plan.ledger.count(group.rank))
        with torch.no_grad():
            if own:
                own.sum_in_place(taker, summed_on_the_way=False)

    def source_counts(
        self, layout: BucketLayout, group: TrainerGroup, receivers: tuple[int, ...] | None = None
    ) -> list[int]:
        """Number of sums that each rank takes of a bucket, in order of rank."""
        ledger = self._plan(layout, group, receivers or group.receivers)[0].ledger
        return [ledger.count(rank) for rank in range(group.world_size)]

    def fold(
        self,
        layout: BucketLayout,
        group: TrainerGroup,
        answers: Sequence[torch.Tensor],
        receivers: tuple[int, ...] | None = None,
    ) -> Folded:
        """Combines ``answers``, the sums of each rank in order: int64 on the CPU, as many as ``source_counts`` says."""
        return self._plan(layout, group, receivers or group.receivers)[0].ledger.fold(answers)

    def _plan(
        self, layout: BucketLayout, group: TrainerGroup, receivers: tuple[int, ...], *, scattered: bool | None = None
    ) -> tuple[GatherPlan, OwnParts]:
        known = self._plans.get(layout.index)
        if scattered is None:  # for sums: as the bucket was filled
            scattered = known is not None and known[0].scattered and known[0].receivers == receivers
        if (
            known is None
            or (known[0].receivers, known[0].scattered) != (receivers, scattered)
            or (known[0].reading_hosts, known[0].leg_hosts) != (group.reading_hosts, group.leg_hosts)
            or known[0].layout != layout
        ):
            tensors = {
                slot.spec.name: self._as_sent(number, slot.spec)
                for slot in layout.slots
                if (number := self._held.number.get(slot.spec.name)) is not None
            }
            plan = plan_gather(layout, tensors, group, receivers, scattered=scattered)
            own = OwnParts(layout, plan.own, self._held)
            known = self._plans[layout.index] = plan, own
        return known

    def _as_sent(self, number: int, sent: TensorSpec) -> tuple[TensorSpec, Sequence[SharedPart]]:
        """A tensor and its parts, for a layout that may have it in another dtype, to which it is cast then."""
        spec, parts = self._specs[number], self._shared.parts(number)
        if spec.dtype == sent.dtype or why_no_cast(spec.name, spec.torch_dtype, sent.torch_dtype):
            return spec, parts
        return msgspec.structs.replace(spec, dtype=sent.dtype), [replace(part, ready=False) for part in parts]

    def _fill(
        self,
        bucket: Bucket | None,
        layout: BucketLayout,
        group: TrainerGroup,
        receivers: tuple[int, ...],
        sources: SourceSums | None,
    ) -> torch.Tensor | None:
        if (group.rank in receivers) != (bucket is not None):
            raise ConfigError(f"trainer rank {group.rank} must have a bucket if, and only if, it is a receiver")
        plan, own = self._plan(layout, group, receivers, scattered=False)
        taker = sources.reserve(plan.ledger.count(group.rank)) if sources is not None else None
        what = f"its part of bucket {layout.index}"
        sums = None
        with torch.no_grad():
            if bucket is not None and own:
                sums = own.copy_into(bucket, taker)
            if plan.gathers:
                assert bucket is not None
                group.all_gather([bucket.view(slot) for slot in plan.gathers], what=what)
            scratch = _Scratch(plan.scratch_bytes, group.device)
            for wave in plan.waves:
                self._move(wave, bucket, group, scratch, what, taker)
            if taker is not None:
                # Last, because the other ranks do not wait for it.
                own.sum_in_place(taker, summed_on_the_way=sums is not None)
        return sums if not plan.gathers and not plan.waves else None

    def _move(
        self,
        wave: Sequence[Parcel],
        bucket: Bucket | None,
        group: TrainerGroup,
        scratch: _Scratch,
        what: str,
        taker: Taker | None,
    ) -> None:
        scratch.reset()
        sends: list[Move] = []
        receives: list[Move] = []
        scatters: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parcel in wave:
            if parcel.source == group.rank:
                outgoing = self._outgoing(parcel, bucket, group, scratch, taker)
                sends.extend(Move(target, outgoing) for target in parcel.targets)
            elif group.rank in parcel.targets:
                assert bucket is not None
                place = incoming = region(bucket, parcel.slot, parcel.box)
                if parcel.target_scratch_bytes:
                    incoming = scratch.take(parcel.box.shape, parcel.slot.spec.torch_dtype)
                    scatters.append((place, incoming))
                receives.append(Move(parcel.source, incoming))
        group.move(sends, receives, what=what)
        for place, incoming in scatters:
            place.copy_(incoming)

    def _outgoing(
        self, parcel: Parcel, bucket: Bucket | None, group: TrainerGroup, scratch: _Scratch, taker: Taker | None
    ) -> torch.Tensor:
        if not parcel.source_scratch_bytes and bucket is not None and is_one_run(parcel.box.shape, parcel.slot.shape):
            return region(bucket, parcel.slot, parcel.box)  # cast and in place already
        held = self._held.find(parcel.slot.spec.name, parcel.box)
        if not parcel.source_scratch_bytes:
            return _as_it_lies(held, parcel, group.device)
        outgoing = scratch.take(parcel.box.shape, parcel.slot.spec.torch_dtype)
        held.write(parcel.box, outgoing)
        if taker is not None and parcel.summed_at is not None:
            taker.add(torch.tensor([parcel.summed_at]), partial_sums([to_sum(parcel.slot, parcel.box, outgoing)]))
        return outgoing


def _lies_as_it_travels(held: Held, spec: TensorSpec, device: torch.device) -> bool:
    """True if others can read a part where it lies."""
    if not isinstance(held, InMemory) or held.source is None:
        return False
    memory = held.memory
    if memory.dtype != spec.torch_dtype or memory.device != device:
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
