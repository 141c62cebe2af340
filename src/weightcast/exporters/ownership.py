"""The trainer ranks that hold each part of each tensor, from one exchange of tables.

Refuses models that differ between ranks, and tensors that the ranks together do not hold exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from weightcast.comm.trainer_group import TrainerGroup
from weightcast.errors import ConfigError
from weightcast.exporters.held_parts import Local, is_ready
from weightcast.wire.box import Box, are_disjoint
from weightcast.wire.layout import TensorSpec

_Corners = tuple[tuple[int, ...], tuple[int, ...]]


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """A part that a rank holds.

    Attributes:
        offset: Its first element in the whole tensor.
        shape: Its shape.
        ready: Its memory can be sent as it is: contiguous, wire dtype, right device.
        computed: Its values are computed when they are sent.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    ready: bool
    computed: bool


class _Table(msgspec.Struct, frozen=True):
    """The parts that one rank holds of each tensor; ``error`` if the rank cannot say."""

    specs: tuple[tuple[str, str, tuple[int, ...]], ...]
    held: tuple[tuple[_Part, ...], ...]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SharedPart:
    """A part of a tensor and the ranks that hold it, in order.

    Attributes:
        box: Place of the part.
        holders: The ranks that hold it.
        ready: Every holder can send it as it is.
        computed: At least one holder computes its values.
    """

    box: Box
    holders: tuple[int, ...]
    ready: bool
    computed: bool


def exchange(specs: Sequence[TensorSpec], local: Local, group: TrainerGroup) -> list[list[SharedPart]]:
    """The distinct parts of each tensor, in the order of ``specs``.  Collective.

    Raises:
        ConfigError: The ranks do not have the same model, or together do not hold every tensor exactly once; the
            same on every rank.
        TrainerRankFailed: A rank is gone or did not take part in time.
    """
    raw = group.all_gather_bytes(msgspec.json.encode(_table(specs, local, group)))
    tables = [msgspec.json.decode(one, type=_Table) for one in raw]
    for rank, table in enumerate(tables):
        if table.error is not None:
            raise ConfigError(f"trainer rank {rank}: {table.error}" if len(tables) > 1 else table.error)
        if table.specs != tables[0].specs:
            raise ConfigError(f"trainer ranks 0 and {rank} have different models: {_difference(tables[0], table)}")
    return [_parts(spec, [table.held[number] for table in tables]) for number, spec in enumerate(specs)]


def _table(specs: Sequence[TensorSpec], local: Local, group: TrainerGroup) -> _Table:
    listed = tuple((spec.name, spec.dtype, spec.shape) for spec in specs)
    held: list[tuple[_Part, ...]] = []
    try:
        for number, spec in enumerate(specs):
            held.append(
                tuple(
                    _Part(
                        part.box.offset,
                        part.box.shape,
                        ready=is_ready(part.memory, spec, group.device),
                        computed=part.memory is None,
                    )
                    for part in local(number)
                )
            )
    except ConfigError as error:
        # Raised here, it would leave the other ranks waiting for this one's table.
        return _Table(specs=listed, held=(), error=str(error))
    return _Table(specs=listed, held=tuple(held))


def _parts(spec: TensorSpec, held: Sequence[tuple[_Part, ...]]) -> list[SharedPart]:
    """The distinct parts of a tensor, by their place in it.

    Raises:
        ConfigError: They do not cover the tensor exactly once.
    """
    holders: dict[_Corners, list[int]] = {}
    ready: dict[_Corners, bool] = {}
    computed: set[_Corners] = set()
    for rank, parts in enumerate(held):
        for part in parts:
            if math.prod(part.shape):
                key = (part.offset, part.shape)
                holders.setdefault(key, []).append(rank)
                ready[key] = ready.get(key, True) and part.ready
                if part.computed:
                    computed.add(key)
    volume = sum(math.prod(shape) for _, shape in holders)
    boxes = [Box(offset=offset, shape=shape) for offset, shape in holders]
    if volume != math.prod(spec.shape) or not (_is_grid(spec, list(holders)) or are_disjoint(boxes)):
        found = ", ".join(f"{list(shape)} at {list(offset)}" for offset, shape in sorted(holders))
        raise ConfigError(
            f"{spec.name} {list(spec.shape)}: the trainer ranks hold {found or 'nothing'}, "
            "which is not the whole tensor exactly once",
            hint="every rank of the model's mesh must take part in the update",
        )
    return [
        SharedPart(
            Box(offset=offset, shape=shape),
            tuple(ranks),
            ready=ready[offset, shape],
            computed=(offset, shape) in computed,
        )
        for (offset, shape), ranks in sorted(holders.items())
    ]


def _is_grid(spec: TensorSpec, boxes: Sequence[_Corners]) -> bool:
    """True if the intervals of each dimension tile it and there are as many boxes as combinations.

    Boxes form such a grid where dimensions were cut one by one.
    """
    count = 1
    for dim, extent in enumerate(spec.shape):
        end = 0
        intervals = sorted({(offset[dim], shape[dim]) for offset, shape in boxes})
        for start, length in intervals:
            if start != end:
                return False
            end = start + length
        if boxes and end != extent:
            return False
        count *= len(intervals)
    return count == len(boxes)


def _difference(first: _Table, other: _Table) -> str:
    """The first difference between two models, in words."""
    for mine, theirs in zip(first.specs, other.specs, strict=False):
        if mine != theirs:
            return f"{mine[0]} {mine[1]} {list(mine[2])} is {theirs[0]} {theirs[1]} {list(theirs[2])} there"
    return f"{len(first.specs)} tensors here, {len(other.specs)} there"
