"""Copies of pieces of some memories to places in others, summed on the way: worked out once, run wherever they lie.

A program numbers its memories: tensors of known forms, such as parameters, and flat buffers.  It is made of numbers
alone, before an update, and takes the memories of each update when it runs.  It keeps none of them alive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from weightcast.digest.copies import bits, copy_all
from weightcast.digest.definition import partial_sums
from weightcast.digest.pieces import TensorPiece, Transfer, check_piece
from weightcast.digest.templates import NOWHERE, Placed, StandIns, Template, can_stand_in, flat_stand_in
from weightcast.digest.transfers import can_transfer, launches_of, transfers_on
from weightcast.runtime.tensor_places import addresses_of
from weightcast.wire.box import Box, contiguous_strides
from weightcast.wire.casts import is_copied_cast
from weightcast.wire.layout import TensorSlot

if TYPE_CHECKING:
    from weightcast.digest.kernel import GpuLaunches
    from weightcast.digest.on_cpu import CpuLaunches

__all__ = ["CopyProgram", "CopyStep", "View", "flat_stand_in", "view_of_slot"]

_MAX_PLACES = 16


class View(NamedTuple):
    """A strided view of one memory of a program.  ``offset`` and ``stride`` are in elements of ``dtype``.

    ``offset`` counts from the first element of a tensor of this dtype, or from the first byte of a flat buffer.
    """

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The view of a tensor of this dtype."""
        return memory.detach().as_strided(self.shape, self.stride, int(memory.storage_offset()) + self.offset)


class CopyStep(NamedTuple):
    """A piece that is copied, or summed, or both.

    Attributes:
        target: Destination with the piece's shape; None for a sum alone.
        full_shape: Shape of the tensor that the piece is a box of.
        box: None if the piece is all of it.
        total: Number of the sum that the piece is added to, in the target's dtype; None for a copy alone.
        sent: Dtype that the values have on the way, and when they are summed without a target; None for that of the
            piece.
        name: For whoever looks at values that are cast.
    """

    source: View
    target: View | None
    full_shape: tuple[int, ...]
    box: Box | None = None
    total: int | None = None
    sent: torch.dtype | None = None
    name: str = ""

    @property
    def travels(self) -> torch.dtype:
        """Dtype of the values on the way."""
        return self.sent or self.source.dtype


def view_of_slot(slot: TensorSlot, box: Box | None = None, *, memory: int = 0) -> View:
    """A slot's rows in a bucket, or one box of them, which counts in the whole tensor."""
    dtype, strides = slot.spec.torch_dtype, contiguous_strides(slot.shape)
    offset = slot.offset_bytes // dtype.itemsize
    if box is None:
        return View(memory, dtype, slot.shape, strides, offset)
    offset += sum((at - zero) * step for at, zero, step in zip(box.offset, slot.box.offset, strides, strict=True))
    return View(memory, dtype, tuple(box.shape), strides, offset)


class CopyProgram:
    """The steps of one launch, and those that torch does one by one.

    Attributes:
        form: The object that stands for the forms of the memories: for another one there must be another program.
        rest: Steps that no launch takes: a memory is on another device, or a cast is not a part of a copy.
        small: As that of the last launch on a CPU, which looked at what it summed.
    """

    def __init__(
        self,
        steps: Sequence[CopyStep],
        memories: Sequence[torch.Tensor],
        device: torch.device,
        *,
        num_sums: int = 0,
        form: object = None,
        far: Collection[int] = (),
        launches: bool | None = None,
        looks: bool = False,
    ) -> None:
        """Works the steps out, and touches no memory.

        Args:
            memories: Tensors with the forms of the memories; ``flat_stand_in`` for a flat buffer of at least that size.
            device: The device whose memories a launch can take.
            far: Numbers of memories that lie on another GPU and are mapped for this one.
            launches: False if torch does all; None where launches on the device are worth it.
            looks: Whether launches on a CPU look at what they sum, for ``small``.
        """
        self.form = form
        self._device, self._num_sums = device, num_sums
        self._sizes = [(number, one.numel()) for number, one in enumerate(memories) if one.is_meta]
        self._far = frozenset(far)
        self.rest: list[CopyStep] = list(steps)
        self._launched: list[CopyStep] = []
        self._template: Template | None = None
        # By the addresses of all memories, so they are never out of date.
        self._launches: dict[tuple[int, ...], GpuLaunches | CpuLaunches] = {}
        self._looks = looks
        self.small = False
        if transfers_on(device) if launches is None else launches:
            self._plan(steps, memories, device)
        self._sums_all = all(step.total is None for step in self.rest)
        self._numbers: dict[torch.device, torch.Tensor] = {}  # of the sums of ``rest``, by the device of their values

    def _plan(self, steps: Sequence[CopyStep], memories: Sequence[torch.Tensor], device: torch.device) -> None:
        made = StandIns()
        near = {
            number: one if one.is_meta else made.of(one)
            for number, one in enumerate(memories)
            if one.is_meta or (one.device == device and can_stand_in(one))
        }
        viewed, self.rest = _Viewed(near), []
        transfers: list[Transfer] = []
        for step in steps:
            copied = self._transfer_of(step, viewed, near)
            target = step.target
            if copied is None and target is not None and target.dtype == step.travels and step.total is not None:
                # It is summed all the same.
                summed = step._replace(target=None)
                if (transfer := self._transfer_of(summed, viewed, near)) is not None:
                    transfers.append(transfer)
                    self._launched.append(summed)
                    step = step._replace(total=None)
            if copied is None:
                self.rest.append(step)
                continue
            transfers.append(copied)
            self._launched.append(step)
        if transfers and not self._far:  # copy engines may bring what is far, which the places decide
            ends = [(one.source.memory, NOWHERE if one.target is None else one.target.memory) for one in self._launched]
            self._template = Template(transfers, ends, device)

    def _transfer_of(self, step: CopyStep, viewed: _Viewed, near: Collection[int]) -> Transfer | None:
        """The step as a launch takes it; None if none does."""
        if step.source.memory not in near or (step.target is not None and step.target.memory not in near):
            return None
        transfer = self._transfer(step, viewed)
        if transfer is None or not can_transfer(transfer):
            return None
        if step.total is not None:
            check_piece(transfer.piece, step.total)
        return transfer

    def is_for(self, form: object, memories: Sequence[torch.Tensor]) -> bool:
        """True if the program is right for memories of a form, which may lie anywhere."""
        return form is self.form and all(memories[number].numel() >= size for number, size in self._sizes)

    @property
    def sums_all(self) -> bool:
        """True if a launch takes all sums."""
        return self._sums_all

    def prepare(self, memories: Sequence[torch.Tensor], addresses: tuple[int, ...] | None = None) -> None:
        """Makes the tables for memories that lie here; nothing is read.  ``addresses`` are as for ``run``."""
        if self._launched:
            addresses = addresses or addresses_of(memories)
            if addresses not in self._launches:
                self._make(memories, addresses)

    def run(
        self,
        memories: Sequence[torch.Tensor],
        addresses: tuple[int, ...] | None = None,
        *,
        summed: bool = True,
        on_cast: Callable[[CopyStep, torch.Tensor], None] | None = None,
    ) -> torch.Tensor | None:
        """Copies and sums.  Enqueued on the current stream of a GPU, done on a CPU.

        Args:
            addresses: Those of the memories, if they are known: there may be tens of thousands.
            summed: False if nobody needs the sums.
            on_cast: Called with each of ``rest`` that is cast, and the values that it is cast from.

        Returns:
            The sums, int64 ``[num_sums]`` on the device, to be read mod 2**64; None unless they are to be ``summed``.
        """
        sums: torch.Tensor | None = None
        if self._launched:
            addresses = addresses or addresses_of(memories)
            launches = self._launches.get(addresses)
            sums = launches.launch(summed=summed) if launches is not None else None
            if launches is None or sums is None:  # or they were made for another stream
                launches = self._make(memories, addresses)
                sums = launches.launch(summed=summed)
            self.small = launches.small
        self._copy_rest(memories, on_cast)
        return self._with_rest(sums, memories) if summed else None

    def sums(self, memories: Sequence[torch.Tensor], addresses: tuple[int, ...] | None = None) -> torch.Tensor:
        """As ``run``, which sums."""
        found = self.run(memories, addresses)
        assert found is not None
        return found

    def _with_rest(self, sums: torch.Tensor | None, memories: Sequence[torch.Tensor]) -> torch.Tensor:
        """Adds the sums that no launch takes: torch sums what was written, or what is only read."""
        if sums is None:
            sums = torch.zeros(self._num_sums, dtype=torch.int64, device=self._device)
        if self._sums_all:
            return sums
        viewed = _Viewed(dict(enumerate(memories)))
        by_device: dict[torch.device, list[tuple[int, TensorPiece]]] = {}
        for step in self.rest:
            if step.total is not None:
                values = viewed.at(step.target) if step.target is not None else viewed.at(step.source).to(step.travels)
                piece = TensorPiece(tensor=values, full_shape=step.full_shape, box=step.box)
                by_device.setdefault(values.device, []).append((step.total, piece))
        for device, some in by_device.items():
            if device not in self._numbers:  # a copy of them to a GPU waits for it
                self._numbers[device] = torch.tensor([total for total, _ in some], device=self._device)
            found = partial_sums([piece for _, piece in some])
            sums = sums.index_add(0, self._numbers[device], found.to(self._device))
        return sums

    def _make(self, memories: Sequence[torch.Tensor], addresses: tuple[int, ...]) -> GpuLaunches | CpuLaunches:
        transfers: Sequence[Transfer] | Placed
        if self._template is not None:
            transfers = Placed(self._template, addresses)
        else:
            viewed = _Viewed(dict(enumerate(memories)))
            transfers = [one for step in self._launched if (one := self._transfer(step, viewed)) is not None]
        if len(self._launches) >= _MAX_PLACES:
            self._launches.clear()
        made = self._launches[addresses] = launches_of(transfers, self._num_sums, self._device, looks=self._looks)
        return made

    def _transfer(self, step: CopyStep, viewed: _Viewed) -> Transfer | None:
        """None if the step has a cast that is not a part of a copy."""
        casts = step.travels != step.source.dtype
        if casts and not is_copied_cast(step.source.dtype, step.travels):
            return None
        target = viewed.at(step.target) if step.target is not None else None
        far = step.source.memory in self._far
        piece = TensorPiece(tensor=viewed.at(step.source), full_shape=step.full_shape, box=step.box)
        return Transfer(piece=piece, target=target, total=step.total, far=far, casts=casts)

    def _copy_rest(
        self, memories: Sequence[torch.Tensor], on_cast: Callable[[CopyStep, torch.Tensor], None] | None
    ) -> None:
        if not self.rest:
            return
        viewed = _Viewed(dict(enumerate(memories)))
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for step in self.rest:
            if step.target is None:
                continue
            same = step.source.dtype == step.travels == step.target.dtype
            source = viewed.at(step.source, as_bits=same)
            if step.travels not in (step.source.dtype, step.target.dtype):
                source = source.to(step.travels)
            if on_cast is not None and step.travels != step.target.dtype:
                on_cast(step, source)
            targets.append(viewed.at(step.target, as_bits=same))
            sources.append(source)
        copy_all(targets, sources)


class _Viewed:
    """Memories by number, and views of them."""

    def __init__(self, memories: dict[int, torch.Tensor]) -> None:
        self._memories = memories
        self._bases: dict[tuple[int, torch.dtype, bool], torch.Tensor] = {}

    def at(self, view: View, *, as_bits: bool = False) -> torch.Tensor:
        """A view; with ``as_bits`` as integers of its size."""
        key = view.memory, view.dtype, as_bits
        base = self._bases.get(key)
        if base is None:
            base = self._memories[view.memory].detach()
            if base.dtype != view.dtype:  # a flat buffer, which need not be a multiple of the size
                size = view.dtype.itemsize
                base = base[: base.numel() // size * size].view(view.dtype)
            base = self._bases[key] = bits(base) if as_bits else base
        return base.as_strided(view.shape, view.stride, int(base.storage_offset()) + view.offset)
