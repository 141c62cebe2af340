"""Exports LoRA adapters: merged into the weights on the way, or by themselves.

The exporters read PEFT's modules without importing PEFT: a module that has ``base_layer``, ``lora_A`` and ``lora_B``.
They never change the trainer's own weights.  ``peft_layers.py`` merges adapters that are not W + scale * B A.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.bucket_sums import PlanSums
from weightcast.digest.source_sums import SumPlaces, Taker
from weightcast.errors import ConfigError
from weightcast.exporters.gather import GatherBucket, Gatherer
from weightcast.exporters.held_parts import Computed, Held, InMemory
from weightcast.exporters.module_tensors import PlacedTensors
from weightcast.exporters.ownership import SharedParts, as_stored
from weightcast.exporters.peft_layers import (
    LayerMerges,
    Switches,
    active_adapters,
    adapter_tensors,
    base_of,
    check_adapters,
    levels,
    outermost_layers,
    unused_copies,
    why_no_product,
)
from weightcast.exporters.segments import Segment
from weightcast.protocols import BucketUse
from weightcast.wire.box import Box, slices
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout, Packing, TensorSlot, TensorSpec, dtype_name, plan_buckets

# Elements of one chunk of computed values: 4 MiB of float32.
CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delta:
    """Adds scale * B A to a weight.  ``a`` and ``b`` are numbers of tensors: (rank, inputs) and (outputs, rank).

    ``layer`` has the scale.  ``turned``: the weight is transposed, (inputs, outputs).
    """

    a: int
    b: int
    layer: Any
    adapter: str
    turned: bool

    @property
    def scale(self) -> float:
        """The adapter's scale now: trainers change it between two updates."""
        return float(self.layer.scaling[self.adapter])


def names_without_adapters(model: nn.Module) -> Callable[[nn.Module, str, str], str | None]:
    """Function from a module's tensor to its name, for ``PlacedTensors``; None for a tensor that is not sent.

    These are the tensors of adapters, and of copies of a module that the forward pass does not use.
    """
    adapters, unused = adapter_tensors(model), unused_copies(model)

    def name_of(module: nn.Module, prefix: str, attribute: str) -> str | None:
        if id(getattr(module, attribute)) in adapters or id(module) in unused:
            return None
        return f"{prefix}.{attribute}" if prefix else attribute

    return name_of


class Merger:
    """Adds adapters to the weights that are sent, on the ranks that hold the weights.

    ``bool(merger)`` is False if the model has no adapters.

    Raises:
        ConfigError: A module has an adapter that cannot be merged.
    """

    def __init__(self, model: nn.Module, weights: PlacedTensors) -> None:
        check_adapters(model)
        self._switches = Switches(model)
        self._weights = weights
        self._deltas: dict[int, list[_Delta]] = {}
        self._layers = LayerMerges(model, weights)
        self._gathered: tuple[Bucket, Mapping[int, TensorSlot]] | None = None  # while a bucket is filled
        adapted: list[tuple[str, Any, str]] = []
        for name, outer in outermost_layers(model):
            parts: list[Any] = [level for level in levels(outer) if active_adapters(level)]
            if not any(why_no_product(level) for level in parts):
                adapted += [
                    (name, level, adapter)
                    for level in parts
                    for adapter in active_adapters(level)
                    if adapter in level.lora_A
                ]
        if not adapted:
            return
        self._tensors = PlacedTensors(model, name_of=_adapter_name)
        numbers = {(id(place.module), place.attribute): n for n, place in enumerate(self._tensors.places)}
        bases = {(id(place.module), place.attribute): n for n, place in enumerate(weights.places)}
        for name, module, adapter in adapted:
            base = bases.get((id(base_of(module)), "weight"))
            if base is None:
                raise ConfigError(f"{name} adapts a weight that is tied to another, so it cannot be merged on the way")
            a, b = (numbers[id(getattr(module, part)[adapter]), "weight"] for part in ("lora_A", "lora_B"))
            turned = bool(getattr(module, "fan_in_fan_out", False))
            self._check(base, a, b, turned)
            self._deltas.setdefault(base, []).append(_Delta(a=a, b=b, layer=module, adapter=adapter, turned=turned))
        self._specs = tuple(
            TensorSpec(name=f"{n}:{place.name}"[:512], dtype=dtype_name(place.dtype), shape=place.shape)
            for n, place in enumerate(self._tensors.places)
        )
        self._gatherer = Gatherer(
            self._specs,
            self._local,
            SharedParts(self._tensors, as_stored(self._tensors), self._specs),
            self._tensors.watch,
        )

    def __bool__(self) -> bool:
        return bool(self._deltas) or bool(self._layers)

    def changed(self) -> bool:
        """True if other adapters are to be added than when this was made, or they have other tensors."""
        return self._switches.changed() or (bool(self._deltas) and self._tensors.changed())

    def merges(self, number: int) -> bool:
        """True if the stored tensor with this number has adapters."""
        return number in self._deltas or number in self._layers

    def computing_bytes(self) -> int | None:
        """Size of all adapters, in bytes; None if PEFT merges some, which takes copies of layers."""
        return None if self._layers else sum(spec.size_bytes for spec in self._needed(tuple(self._deltas)))

    def prepare(self, group: TrainerGroup) -> None:
        """Exchanges which rank holds which part of the adapters.  Collective."""
        if self._deltas:
            with self._tensors.looking():
                self._gatherer.prepare(group)

    def plan(
        self, layout: BucketLayout, numbers: Sequence[int], group: TrainerGroup, use: BucketUse
    ) -> MergedBucket | None:
        """Plans the adapters of a bucket; None if its weights have none.

        ``numbers`` are those of the weights in it, the same on every rank.
        """
        by_peft = tuple(number for number in numbers if number in self._layers)
        adapters = self._adapters(layout, numbers)
        if adapters is None:
            return MergedBucket(self, by_peft, None, group) if by_peft else None
        everybody = BucketUse(receivers=tuple(range(group.world_size)), copies=use.copies, sums=use.sums)
        return MergedBucket(self, by_peft, self._gatherer.plan(adapters, group, everybody), group)

    def looking(self) -> AbstractContextManager[None]:
        """A block in which adapters are read."""
        return self._tensors.looking()

    def begin(self, by_peft: Sequence[int], gathered: Bucket | None) -> None:
        """Uses gathered adapters, and merges the weights that PEFT merges, until ``end``."""
        self._layers.begin(by_peft)
        if gathered is not None:
            slots = {int(slot.spec.name.partition(":")[0]): slot for slot in gathered.layout.slots}
            self._gathered = gathered, slots

    def end(self) -> None:
        """Frees the gathered adapters and the layers that PEFT merged."""
        self._gathered = None
        self._layers.end()

    def name_of(self, numbered: str) -> str:
        """The model's name of an adapter's tensor, given that in a bucket of adapters."""
        return self._tensors.places[int(numbered.partition(":")[0])].name

    def held(self, source: int, segment: Segment, box: Box, part: tuple[Box, torch.Tensor]) -> Held:
        """The part of a travelling tensor at ``box``, made of this rank's ``part`` of a weight and its adapters."""
        if source in self._layers:
            return _MadeByPeft(box, segment, part, source, self._layers)
        if source not in self._deltas:
            return InMemory(box, segment.view(part[1], part[0].offset, box), source)
        return _Merged(box, segment, part, self._deltas[source], self)

    def delta(self, delta: _Delta, box: Box) -> torch.Tensor:
        """Computes a box of scale * B A, in float32."""
        assert self._gathered is not None, "begin comes first"
        bucket, slots = self._gathered
        a, b = bucket.view(slots[delta.a]).float(), bucket.view(slots[delta.b]).float()
        rows, columns = (slice(start, start + extent) for start, extent in zip(box.offset, box.shape, strict=True))
        if delta.turned:
            return (b[columns] @ a[:, rows]).t().mul_(delta.scale)
        return (b[rows] @ a[:, columns]).mul_(delta.scale)

    def _adapters(self, layout: BucketLayout, numbers: Sequence[int]) -> BucketLayout | None:
        """Layout of a bucket with the adapters of some weights; None if they have none."""
        needed = self._needed(numbers)
        if not needed:
            return None
        size_bytes = sum(spec.size_bytes + 64 for spec in needed)
        [adapters] = plan_buckets(needed, bucket_bytes=size_bytes, packing=Packing(alignment_bytes=16))
        return BucketLayout(index=layout.index, slots=adapters.slots, size_bytes=adapters.size_bytes)

    def _needed(self, sources: Sequence[int]) -> list[TensorSpec]:
        needed = sorted({n for source in sources for delta in self._deltas.get(source, ()) for n in (delta.a, delta.b)})
        return [self._specs[number] for number in needed]

    def _local(self, number: int) -> list[Held]:
        part = self._tensors.part(number)
        return [] if part is None else [InMemory(*part, number)]

    def _check(self, base: int, a: int, b: int, turned: bool) -> None:
        weight = self._weights.places[base]
        if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
            raise ConfigError(f"{weight.name} has an adapter and is quantised ({weight.dtype}), so it cannot be merged")
        (rank, inputs), (outputs, other) = self._tensors.places[a].shape, self._tensors.places[b].shape
        shape = (inputs, outputs) if turned else (outputs, inputs)
        if weight.shape != shape or rank != other:
            raise ConfigError(
                f"{weight.name} {list(weight.shape)} has an adapter for shape {list(shape)} of ranks {rank} and {other}"
            )


class MergedBucket:
    """The adapters of one bucket's weights.  Before the bucket is filled, every rank gathers them; they are small."""

    def __init__(
        self, merger: Merger, by_peft: Sequence[int], gathered: GatherBucket | None, group: TrainerGroup
    ) -> None:
        """Gathers nothing yet.

        ``by_peft`` are the numbers of the weights that PEFT merges.  ``gathered`` has the other adapters; None if there
        are none.
        """
        self._merger = merger
        self._by_peft = by_peft
        self._gathered = gathered
        self._device = group.device
        self._sums = PlanSums([gathered.layout] if gathered is not None else ())
        # Of adapters in place, and as gathered.
        self.sum_places = gathered.sum_places if gathered is not None else SumPlaces(group.rank, 0)
        place, everybody = self.sum_places.place, range(group.world_size)
        slots = enumerate(gathered.layout.slots if gathered is not None else ())
        received = [place(slot.spec.name, number, everybody, gathered=True) for number, slot in slots]
        self._received = torch.tensor(received, dtype=torch.int64)
        self.name_of = merger.name_of

    def prepare(self, use: BucketUse) -> None:
        """Works out what ``begin`` needs, without reading or moving anything."""
        if self._gathered is None or not use.copies:
            return
        with self._merger.looking():
            self._gathered.prepare(None)
        if use.sums:
            self._sums.prepare(self._device)

    def begin(self, taker: Taker | None) -> None:
        """Gathers the adapters to every rank.  Collective; ``end`` frees them."""
        bucket = None
        if self._gathered is not None:
            layout = self._gathered.layout
            bucket = Bucket(layout, torch.empty(layout.size_bytes, dtype=torch.uint8, device=self._device))
            with self._merger.looking():
                self._gathered.fill(bucket.data, taker)
            if taker is not None:
                taker.add(self._received, self._sums.of(bucket))
        self._merger.begin(self._by_peft, bucket)

    def end(self) -> None:
        """Frees what ``begin`` has made."""
        self._merger.end()


@dataclass(frozen=True, slots=True)
class _OfWeight(Computed):
    """A part of a weight, to which adapters are added on its way; ``part`` is what this rank has of the weight."""

    box: Box
    segment: Segment
    part: tuple[Box, torch.Tensor]

    @property
    def origin(self) -> torch.Tensor:
        return self.segment.view(self.part[1], self.part[0].offset, self.box)


@dataclass(frozen=True, slots=True)
class _Merged(_OfWeight):
    """A part with its adapters added here."""

    deltas: Sequence[_Delta]
    merger: Merger

    def write(self, box: Box, out: torch.Tensor) -> None:
        for piece in rows_of(box, CHUNK_ELEMENTS):
            stored = self.segment.source_box(piece)
            merged = self.part[1][slices(stored, self.part[0].offset)]
            for delta in self.deltas:
                merged = merged + self.merger.delta(delta, stored).to(merged.dtype)
            out[slices(piece, box.offset)].copy_(self.segment.view(merged, stored.offset, piece))


@dataclass(frozen=True, slots=True)
class _MadeByPeft(_OfWeight):
    """A part that PEFT merges."""

    source: int
    layers: LayerMerges

    def write(self, box: Box, out: torch.Tensor) -> None:
        self.layers.write(self.source, self.segment, box, out)


def rows_of(box: Box, max_elements: int, *, multiple: int = 1) -> Iterator[Box]:
    """Cuts a box of two dimensions or more into boxes of whole rows.

    Args:
        max_elements: Largest size of a box, unless it has only ``multiple`` rows.
        multiple: Boxes begin at multiples of this, except the first.
    """
    row = max(1, torch.Size(box.shape[1:]).numel())
    step = max(max_elements // row // multiple, 1) * multiple
    start, end = box.offset[0], box.offset[0] + box.shape[0]
    while start < end:
        stop = min(start - start % multiple + step, end)
        yield Box(offset=(start, *box.offset[1:]), shape=(stop - start, *box.shape[1:]))
        start = stop


def _adapter_name(module: nn.Module, prefix: str, attribute: str) -> str | None:
    return f"{prefix}.{attribute}" if {"lora_A", "lora_B"} & set(prefix.split(".")) else None
