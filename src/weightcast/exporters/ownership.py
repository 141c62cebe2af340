"""Finds the trainer ranks that hold each part of a tensor; refuses tensors that they do not hold exactly once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weightcast.comm.trainer_group import TrainerGroup
from weightcast.errors import ConfigError
from weightcast.exporters.module_tensors import PlacedTensors
from weightcast.exporters.placements import Agreed, StoredParts, agree, model_hash
from weightcast.exporters.segments import Arranged, Segment
from weightcast.wire.box import Box
from weightcast.wire.layout import TensorSpec


@dataclass(frozen=True, slots=True)
class SharedPart:
    """A part of a tensor and the ranks that hold it, in order.

    ``ready``: every holder can send it as it is.  ``computed``: at least one holder computes its values.
    """

    box: Box
    holders: tuple[int, ...]
    ready: bool
    computed: bool


class PartTable(Protocol):
    """The parts of all tensors of one exporter."""

    def agree(self, group: TrainerGroup) -> None:
        """Exchanges which rank holds which part.  Collective; communicates the first time only.

        Raises:
            ConfigError: The ranks do not have the same model, or together do not hold every tensor exactly once; the
                same on every rank.
            TrainerRankFailed: A rank is gone or did not take part in time.
        """
        ...

    def parts(self, number: int) -> Sequence[SharedPart]:
        """The distinct parts of the tensor with this number, in order of their place; known after ``agree``."""
        ...


class SharedParts:
    """The parts of tensors that are cut out of a module's tensors.

    Args:
        travelling: All tensors that travel, which must be the same on every rank; None for ``specs``.
        computed: Function of a stored tensor's number: True if its values are computed when they are sent.
    """

    def __init__(
        self,
        tensors: PlacedTensors,
        arranged: Sequence[Arranged],
        specs: Sequence[TensorSpec],
        *,
        travelling: Sequence[TensorSpec] | None = None,
        computed: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._tensors = tensors
        self._arranged = arranged
        self._specs = specs
        self._travelling = specs if travelling is None else travelling
        self._computed = computed
        self._group: TrainerGroup | None = None
        self._agreed = Agreed(())
        # Experts of different layers are cut alike, so their parts are listed once.
        self._known: dict[object, list[SharedPart]] = {}

    def agree(self, group: TrainerGroup) -> None:
        """Implements ``PartTable.agree``."""
        if self._group is group:
            return
        self._agreed = agree(
            self._tensors, self._travelling, model_hash(self._travelling, self._arranged), group, self._computed
        )
        self._known.clear()
        checked: set[tuple[int, ...]] = set()
        for tensor, spec in zip(self._arranged, self._specs, strict=True):
            for segment in tensor.segments:
                key = self._agreed.class_of(segment.source)
                if key not in checked:
                    _check_cover(spec, self._agreed.parts(segment.source))
                    checked.add(key)
        self._group = group

    def parts(self, number: int) -> list[SharedPart]:
        """Implements ``PartTable.parts``."""
        spec, segments = self._specs[number], self._arranged[number].segments
        key = (
            spec.dtype,
            *((self._agreed.class_of(one.source), one.box.offset, one.box.shape, one.dims, one.at) for one in segments),
        )
        if key not in self._known:
            found = [part for one in segments for part in _cut(self._agreed.parts(one.source), one, spec)]
            self._known[key] = sorted(found, key=lambda part: (part.box.offset, part.box.shape))
        return self._known[key]


def as_stored(tensors: PlacedTensors) -> list[Arranged]:
    """The arrangement of tensors that travel as they are stored."""
    return [
        Arranged(name=place.name, shape=place.shape, segments=(Segment.whole(number, place.shape),))
        for number, place in enumerate(tensors.places)
    ]


def _check_cover(spec: TensorSpec, parts: StoredParts) -> None:
    """Refuses a stored tensor that the ranks together do not hold exactly once."""
    if parts.cover():
        return
    found = ", ".join(f"{list(extent)} at {list(offset)}" for offset, extent in parts.corners())
    if not found:
        raise ConfigError(
            f"{spec.name}: no trainer rank has the tensor that it comes from, {list(parts.shape)}",
            hint="give one rank's module a tensor of that name, as the whole model has it",
        )
    raise ConfigError(
        f"{spec.name}: of the trainer's tensor {list(parts.shape)} the trainer ranks hold {found}, "
        "which is not the whole tensor exactly once",
        hint="every rank of the model's mesh must take part in the update",
    )


def _cut(parts: StoredParts, segment: Segment, spec: TensorSpec) -> list[SharedPart]:
    """The parts of one segment, in the travelling tensor."""
    start, extent = segment.box.offset, segment.box.shape
    boxes, dims = parts.boxes, len(start)
    inside = list(range(len(boxes)))
    if dims and len(boxes) > 1:
        low, high = boxes[:, 0], boxes[:, 0] + boxes[:, 1]
        first = low.new_tensor(start)
        inside = ((low < first + low.new_tensor(extent)) & (high > first)).all(dim=1).nonzero()[:, 0].tolist()
    same_dtype = parts.dtypes == frozenset((spec.dtype,))
    found: list[SharedPart] = []
    for index in inside:
        offset, shape = boxes[index].tolist()
        box = segment.target_box(Box(offset=tuple(offset), shape=tuple(shape)))
        if box is None:
            continue
        ready = same_dtype and parts.ready[index] and not parts.computed[index]
        # As it lies in a contiguous shard.
        ready = ready and segment.view(torch.empty(shape, device="meta"), tuple(offset), box).is_contiguous()
        found.append(SharedPart(box, parts.holders[index], ready=ready, computed=parts.computed[index]))
    return found
