"""Copies buckets, whole or whose parts lie in the buffers of several trainer ranks or in messages from them."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from weightcast.digest.copies import Flat
from weightcast.digest.copy_program import CopyProgram, CopyStep, View, flat_stand_in
from weightcast.digest.definition import as_unsigned, finish
from weightcast.receiver.bucket_copies import (
    BucketCopies,
    BufferBox,
    BufferParts,
    ExchangePlan,
    LoadPlan,
    ShareRoutes,
    plan_exchange,
    plan_mapped,
    plan_scattered,
    plan_whole,
    wanted_of,
)
from weightcast.receiver.staging import StagingSet
from weightcast.wire.box import slices
from weightcast.wire.bucket_sources import MappedPart
from weightcast.wire.casts import may_overflow, overflows
from weightcast.wire.layout import BucketLayout, TensorSlot, TensorSpec
from weightcast.wire.pieces import Wanted


class BucketCopier:
    """Copies the own share of buckets, in update after update, and sums what it copies.

    Attributes:
        routes: What this rank keeps, and the numbers of the sums.
    """

    def __init__(self, expected: Mapping[str, TensorSpec], routes: ShareRoutes) -> None:
        self._expected = expected
        self.routes = routes
        self._plan = LoadPlan()
        self._sums: dict[torch.device, torch.Tensor] = {}  # of the buffers of each device
        self._overflows: dict[str, list[torch.Tensor]] = {}
        self._compared: set[str] = set()

    def use(self, plan: LoadPlan) -> None:
        """Takes the plan that has everything about the buckets to come."""
        self._plan = plan

    def begin(self) -> None:
        """Forgets what an earlier update left."""
        self._sums.clear()
        self._overflows.clear()
        self._compared.clear()

    def totals(self) -> torch.Tensor:
        """Digest sums of what was copied, in the dtypes that are kept, and of what arrived, in those that are expected.

        They are int64 ``[routes.num_sums]`` on the CPU, mod 2**64.  Waits for the device.
        """
        totals = torch.zeros(self.routes.num_sums, dtype=torch.int64)
        for sums in self._sums.values():
            totals += sums.cpu()
        return totals

    def arrived(self) -> dict[str, str]:
        """The digest of each source of this update that is compared whole, by name.  Waits for the device."""
        totals, found = self.totals(), dict[str, str]()
        for name in self._compared:
            spec, total = self._expected[name], as_unsigned(int(totals[self.routes.compared[name]]))
            found[name] = finish(total, dtype=spec.torch_dtype, shape=spec.shape)
        return found

    def overflowed(self) -> list[str]:
        """Names of tensors with finite values that became infinite in the model's dtype.  Waits for the device."""
        return [name for name, flags in self._overflows.items() if torch.stack(flags).any().item()]

    @cached_property
    def wanted(self) -> Wanted:
        """The boxes of the source tensors that this rank must get."""
        return wanted_of(self._expected, self.routes)

    def plan_whole(self, layout: BucketLayout) -> BucketCopies:
        """The copies out of a buffer with the whole bucket."""
        plan = self._plan.copies.get(("whole", layout.index))
        if plan is None or plan.layout != layout:
            plan = self._plan.copies["whole", layout.index] = plan_whole(layout, self.routes)
        return plan

    def plan(self, layout: BucketLayout, parts: BufferParts) -> BucketCopies:
        """The copies out of all trainer ranks' buckets; raises ``Refused`` unless parts are the bucket exactly once."""
        plan = self._plan.copies.get(("buffers", layout.index))
        if plan is None or plan.layout != layout or plan.parts != parts:
            plan = self._plan.copies["buffers", layout.index] = plan_scattered(layout, parts, self.routes)
        elif not all(map(operator.is_, plan.parts, parts)):  # the next comparison looks at no part
            plan = self._plan.copies["buffers", layout.index] = replace(plan, parts=parts)
        return plan

    def plan_exchange(
        self, layout: BucketLayout, parts: BufferParts, *, near: tuple[int, ...] = (), read: bool = False
    ) -> ExchangePlan:
        """The messages with this rank's share of a bucket; the arguments are those of ``plan_exchange``."""
        key = read, near, layout.index
        plan = self._plan.exchanges.get(key)
        if plan is None or plan.copies.layout != layout or plan.copies.parts != parts:
            plan = plan_exchange(layout, parts, self.wanted, self.routes, near=near, read=read)
        elif not all(map(operator.is_, plan.copies.parts, parts)):
            plan = replace(plan, copies=replace(plan.copies, parts=parts))
        self._plan.exchanges[key] = plan
        return plan

    def plan_mapped(
        self, layout: BucketLayout, parts: tuple[MappedPart, ...], memories: Sequence[torch.Tensor]
    ) -> BucketCopies:
        """The copies out of trainer ranks' own memory, flat uint8; errors are those of ``plan_mapped``."""
        plan = self._plan.copies.get(("mapped", layout.index))
        sizes = [memory.numel() for memory in memories]
        if plan is None or plan.layout != layout or plan.parts != parts or len(plan.buffers) != len(sizes):
            plan = plan_mapped(layout, parts, sizes, self.routes)
            self._plan.copies["mapped", layout.index] = plan
        return plan

    def prepare(self, plan: BucketCopies, sizes: Sequence[int], device: torch.device, staging: StagingSet) -> None:
        """Works out the copies of a plan whose buffers will all lie on one device.

        ``sizes`` are the least that the buffers will have, in bytes.
        """
        numbers = tuple(number for number, copies in enumerate(plan.buffers) if copies)
        if numbers:
            self._program(plan, numbers, device, [flat_stand_in(sizes[number]) for number in numbers], staging)

    def place(self, buffers: Sequence[torch.Tensor], plan: BucketCopies, staging: StagingSet) -> None:
        """Works out the launch for buffers that lie here, all on one device."""
        numbers = tuple(number for number, copies in enumerate(plan.buffers) if copies)
        data = [buffers[number] for number in numbers]
        if data and staging.staged:
            self._program(plan, numbers, data[0].device, data, staging).prepare(self._memories(plan, data, staging))

    def copy(
        self,
        buffers: Sequence[torch.Tensor],
        plan: BucketCopies,
        staging: StagingSet,
        *,
        far: Collection[int] = (),
        summed: bool = True,
    ) -> None:
        """Copies out of all buffers, flat uint8, into the written set.  Enqueued on a GPU, done on a CPU.

        Args:
            far: Numbers of buffers that lie on another GPU and are mapped for the one that copies.
            summed: False if nobody needs ``totals``.
        """
        self._compared.update(plan.compared)
        by_device: dict[torch.device, list[int]] = {}
        for number, (data, copies) in enumerate(zip(buffers, plan.buffers, strict=True)):
            if copies:
                by_device.setdefault(data.device, []).append(number)
        for device, numbers in by_device.items():
            data = [buffers[number] for number in numbers]
            program = self._program(plan, tuple(numbers), device, data, staging, frozenset(far).intersection(numbers))
            sums = program.run(self._memories(plan, data, staging), summed=summed, on_cast=self._look)
            if sums is not None:
                self._sums[device] = self._sums[device] + sums if device in self._sums else sums

    def _look(self, step: CopyStep, values: torch.Tensor) -> None:
        assert step.target is not None
        if may_overflow(values.dtype, step.target.dtype):
            self._overflows.setdefault(step.name, []).append(overflows(values))

    def put_together(
        self, slot: TensorSlot, sources: Sequence[BufferBox], buffers: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """A slot's rows, out of the parts in several buffers; a view if one buffer has them as they are."""
        if len(sources) == 1 and sources[0].dtype == slot.spec.torch_dtype:
            [source] = sources
            flat = Flat(buffers[source.buffer])
            return flat.region(source.dtype, slot.shape, source.stride, source.offset, as_bits=False)
        found = torch.empty(slot.shape, dtype=slot.spec.torch_dtype, device=buffers[0].device)
        for source in sources:
            flat, shape = Flat(buffers[source.buffer]), source.box.shape
            part = flat.region(source.dtype, shape, source.stride, source.offset, as_bits=False)
            found[slices(source.box, slot.box.offset)].copy_(part)
        return found

    def _memories(self, plan: BucketCopies, data: Sequence[torch.Tensor], staging: StagingSet) -> list[torch.Tensor]:
        """The memories of a program: the buffers, and the parameters that the plan writes."""
        return [*data, *map(staging.target, plan.parameters)]

    def _program(
        self,
        plan: BucketCopies,
        numbers: tuple[int, ...],
        device: torch.device,
        data: Sequence[torch.Tensor],
        staging: StagingSet,
        far: frozenset[int] = frozenset(),
    ) -> CopyProgram:
        """The copies out of these buffers, wherever all lies."""
        known = plan.prepared.get((numbers, device, far))
        if isinstance(known, CopyProgram) and known.is_for(staging.waiting_form, data):
            return known
        targets = list(map(staging.target, plan.parameters))
        written = {name: len(numbers) + number for number, name in enumerate(plan.parameters)}
        steps: list[CopyStep] = []
        for place, number in enumerate(numbers):
            for share in plan.buffers[number]:
                copy, spec = share.copy, share.slot.spec
                source = View(place, share.dtype, copy.shape, copy.source_stride, copy.source_offset)
                target, sent = None, spec.torch_dtype
                if copy.parameter is None:
                    sent = self._expected[spec.name].torch_dtype
                else:
                    memory = written[copy.parameter]
                    target = View(memory, targets[memory - len(numbers)].dtype, copy.shape, copy.stride, copy.offset)
                step = CopyStep(source, target, spec.shape, share.box, share.total, sent, spec.name)
                steps.append(step)
        program = CopyProgram(
            steps,
            [*(flat_stand_in(one.numel()) for one in data), *targets],
            device,
            num_sums=self.routes.num_sums,
            form=staging.waiting_form,
            far=[place for place, number in enumerate(numbers) if number in far],
        )
        plan.prepared[numbers, device, far] = program
        return program
