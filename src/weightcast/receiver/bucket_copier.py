"""Copies of buckets into the set of weights that is written, with the digest sums of what passes."""

from __future__ import annotations

import torch

from weightcast.digest.copy_program import CopyProgram, CopyStep, View, flat_stand_in, view_of_slot
from weightcast.receiver.bucket_plan import BucketPlan
from weightcast.receiver.staging import StagingSet
from weightcast.wire.bucket import Bucket
from weightcast.wire.casts import may_overflow, overflows


class BucketCopier:
    """Copies the buckets of update after update.  The program of each bucket is kept in the bucket's plan."""

    def __init__(self) -> None:
        self._overflows: dict[str, list[torch.Tensor]] = {}

    def prepare(self, plan: BucketPlan, staging: StagingSet, device: torch.device) -> None:
        """Works out the copies of a bucket that will lie on this device."""
        _program(plan, staging, device)

    def place(self, bucket: Bucket, plan: BucketPlan, staging: StagingSet) -> None:
        """Works out the launch of a bucket that lies here."""
        if staging.staged:
            memories = [bucket.data, *map(staging.target, plan.parameters)]
            _program(plan, staging, bucket.data.device).prepare(memories)

    def begin(self) -> None:
        """Forgets the overflows of the update before."""
        self._overflows.clear()

    def overflowed(self) -> list[str]:
        """Names of tensors with finite values that became infinite in the model's dtype.  Waits for the device."""
        if not self._overflows:
            return []
        flags = [torch.stack(some).any().item() for some in self._overflows.values()]
        return [name for name, flag in zip(self._overflows, flags, strict=True) if flag]

    def copy(
        self, bucket: Bucket, plan: BucketPlan, staging: StagingSet, *, summed: bool = True
    ) -> torch.Tensor | None:
        """Copies a bucket into the staging set; done on a CPU, enqueued on the current stream of a GPU.

        Returns ``Bucket.sums`` where they were taken on the way.
        """
        program = _program(plan, staging, bucket.data.device)
        memories = [bucket.data, *map(staging.target, plan.parameters)]
        return program.run(memories, summed=summed, on_cast=self._look)

    def _look(self, step: CopyStep, values: torch.Tensor) -> None:
        assert step.target is not None
        if may_overflow(values.dtype, step.target.dtype):
            self._overflows.setdefault(step.name, []).append(overflows(values))


def _program(plan: BucketPlan, staging: StagingSet, device: torch.device) -> CopyProgram:
    """The copies and sums of a bucket wherever it lies."""
    known = plan.prepared.get(device)
    if isinstance(known, CopyProgram) and known.form is staging.waiting_form:
        return known
    targets = list(map(staging.target, plan.parameters))
    numbers = {name: 1 + number for number, name in enumerate(plan.parameters)}
    steps: list[CopyStep] = []
    for total, (slot, copies) in enumerate(plan.table):
        if len(copies) != 1 or copies[0].shape != slot.shape:
            steps.append(CopyStep(view_of_slot(slot), None, slot.spec.shape, slot.box, total))
        for copy in copies:
            number = numbers[copy.parameter]
            source = View(0, slot.spec.torch_dtype, copy.shape, copy.source_stride, copy.source_offset)
            target = View(number, targets[number - 1].dtype, copy.shape, copy.stride, copy.offset)
            step = CopyStep(source, target, copy.shape, name=slot.spec.name)
            if len(copies) == 1 and copy.shape == slot.shape:
                step = step._replace(full_shape=slot.spec.shape, box=slot.box, total=total)
            steps.append(step)
    memories = [flat_stand_in(plan.layout.size_bytes), *targets]
    program = CopyProgram(steps, memories, device, num_sums=len(plan.table), form=staging.waiting_form)
    plan.prepared[device] = program
    return program
