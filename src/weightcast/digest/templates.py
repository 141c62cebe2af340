"""Copies and sums whose memory is not known yet: all is worked out but the addresses.

A *template* numbers the memories that its transfers read and write.  It is made from tensors on the meta device, which
have strides and offsets and no memory.  With one address for each memory it becomes the tables of a launch, in a few
vector operations.  So what needs a look at each tensor is done before an update, and once for all places in which the
same tensors may lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from weightcast.digest.jobs import CPU_TILING, GPU_TILING, KINDS, TransferJob, TransferPlan, jobs_of, kinds_of, plan_of
from weightcast.digest.pieces import Transfer

# Addresses on the meta device start at 0, which a job reads as "no target".  All dtypes and the alignment that the
# kernels look for divide this.
_FIRST_BYTE = 256

NOWHERE = -1  # the memory that a transfer without a target writes


class StandIns:
    """Tensors on the meta device in the place of others, for a template."""

    def __init__(self) -> None:
        self._made: dict[object, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with the shape, strides and dtype of another; one and the same for all tensors of one form.

        A view of it by ``as_strided`` counts from its ``storage_offset``, like a view of the other tensor.
        """
        shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
        found = self._made.get((shape, stride, dtype))
        if found is None:
            steps = [(size - 1) * step for size, step in zip(shape, stride, strict=True)]
            elements = 1 + sum(steps) if tensor.numel() else 0
            first = _FIRST_BYTE // dtype.itemsize
            memory = torch.empty(first + elements, dtype=dtype, device="meta")
            found = self._made[shape, stride, dtype] = memory.as_strided(shape, stride, first)
        return found


def flat_stand_in(size_bytes: int) -> torch.Tensor:
    """As ``StandIns.of``, for a flat uint8 buffer."""
    return torch.empty(_FIRST_BYTE + size_bytes, dtype=torch.uint8, device="meta")[_FIRST_BYTE:]


def can_stand_in(tensor: torch.Tensor) -> bool:
    """True if the tensor's values are the bytes of its memory: torch keeps some conjugates and negatives lazily."""
    return not (tensor.is_conj() or tensor.is_neg())


@dataclass(frozen=True, slots=True, eq=False)
class _TemplateJobs:
    """The jobs of one kind, and the number of the memory that each reads and writes: int64 ``[jobs]``.

    ``plan.jobs`` has offsets in the place of addresses.
    """

    plan: TransferPlan
    reads: torch.Tensor
    writes: torch.Tensor


class Template:
    """The work of some transfers, of which there are ``num_transfers``, on one device.  It keeps no memory alive."""

    def __init__(
        self, transfers: Sequence[Transfer], memories: Sequence[tuple[int, int]], device: torch.device
    ) -> None:
        """Takes transfers between stand-ins, for each of which ``can_transfer`` is true.

        ``memories`` are the numbers of those that each reads and writes; the second may be ``NOWHERE``.
        """
        self.num_transfers = len(transfers)
        tiling = CPU_TILING if device.type == "cpu" else GPU_TILING
        jobs: dict[tuple[int, bool], list[TransferJob]] = {kind: [] for kind in KINDS}
        ends: dict[tuple[int, bool], list[tuple[int, int]]] = {kind: [] for kind in KINDS}
        for transfer, places in zip(transfers, memories, strict=True):
            if not transfer.piece.tensor.numel():
                continue
            kind = transfer.word_bytes, transfer.casts
            before = len(jobs[kind])
            jobs[kind] += jobs_of(transfer, tiling)
            ends[kind] += [places] * (len(jobs[kind]) - before)
        self._parts: list[_TemplateJobs] = []
        for (word_bytes, casts), some in jobs.items():
            if some:
                reads, writes = torch.tensor(ends[word_bytes, casts], dtype=torch.int64).unbind(1)
                self._parts.append(_TemplateJobs(plan_of(some, word_bytes, tiling, casts=casts), reads, writes))

    def at(self, addresses: Sequence[int]) -> list[TransferPlan]:
        """The tables of a launch on the CPU; ``addresses`` has that of the first element of each memory, in order."""
        # The last one is that of ``NOWHERE``, whose jobs have 0 in the place of a target.
        table = torch.tensor([*addresses, _FIRST_BYTE], dtype=torch.int64) - _FIRST_BYTE
        plans: list[TransferPlan] = []
        for part in self._parts:
            jobs = part.plan.jobs.clone()
            jobs[:, _ADDRESS] += table[part.reads]
            jobs[:, _GOAL] += table[part.writes]
            jobs[:, _KIND] = kinds_of(jobs, part.plan.word_bytes)
            plans.append(replace(part.plan, jobs=jobs))
        return plans


_ADDRESS, _GOAL, _KIND = (TransferJob._fields.index(name) for name in ("address", "goal", "kind"))


class Placed:
    """A template and the addresses of its memories."""

    def __init__(self, template: Template, addresses: Sequence[int]) -> None:
        self._template = template
        self._addresses = addresses

    def __len__(self) -> int:
        """Number of the transfers."""
        return self._template.num_transfers

    def plans(self) -> list[TransferPlan]:
        """The tables of a launch, as ``Template.at``."""
        return self._template.at(self._addresses)
