"""Exports a model whose parameters DeepSpeed partitions (ZeRO stage 3).

A partition is a flat run of elements, in general no box of the tensor.  So DeepSpeed gathers the parameters of one
bucket at a time, on every rank, and the bucket is filled from them.  DeepSpeed is never imported: it is there if the
model comes from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.source_sums import Folded, SourceSums
from weightcast.errors import ConfigError
from weightcast.exporters import casting
from weightcast.exporters.mapping import Family
from weightcast.exporters.module import WeightsExporter
from weightcast.exporters.module_tensors import PlacedTensors, places_of
from weightcast.exporters.peft_layers import adapter_tensors
from weightcast.protocols import Shard
from weightcast.wire.box import Box
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout, TensorSpec


def is_partitioned(model: nn.Module) -> bool:
    """True if DeepSpeed has partitioned a parameter of the model."""
    return any(_whole_shape(parameter) is not None for parameter in model.parameters())


class Zero3Exporter:
    """The parameters and persistent buffers of a model under ZeRO stage 3, as a checkpoint has them.

    Every rank gathers the parameters of a bucket while it is filled, which is a bucket of extra memory on every rank.
    The gather is DeepSpeed's own.  Ranks sum what they have gathered, so a rank that got other values is found; a
    partition that its owner lost is not.

    Args:
        model: The module, or DeepSpeed's engine around it.
        wire_dtype: The same as for ``ModuleExporter``.
        names: The same as for ``ModuleExporter``.
        family: The same as for ``ModuleExporter``.

    Raises:
        ConfigError: The model has adapters, or tensors that cannot be sent; nothing has moved.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        wire_dtype: torch.dtype | None = None,
        names: Callable[[str], str] | None = None,
        family: Family | str | None = None,
    ) -> None:
        casting.check_wire_dtype(wire_dtype)
        if type(model).__name__ == "DeepSpeedEngine":
            model = model.module  # pyright: ignore[reportAssignmentType]
        if adapter_tensors(model):
            raise ConfigError(
                "the model has adapters, and ZeRO stage 3 has partitioned them, so they cannot be merged on the way",
                hint="merge the adapters into a copy of the model, or train with ZeRO stage 2 or FSDP2",
            )
        self._tensors = _PartitionedTensors(model)
        self._weights = WeightsExporter(model, self._tensors, wire_dtype=wire_dtype, names=names, family=family)

    @property
    def device(self) -> torch.device:
        """The device of the model's partitions."""
        return self._weights.device

    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor, in the order of the model's ``state_dict``."""
        return self._weights.specs()

    def shards(self) -> Iterator[Shard]:
        """Raises an error: partitions are no boxes of tensors.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("ZeRO stage 3 keeps flat partitions, which are no boxes of the model's tensors")

    def prepare(self, group: TrainerGroup) -> None:
        """Compares the models of all ranks.  Collective.

        Raises:
            ConfigError: The ranks hold different models; raised on every rank alike.
            TrainerRankFailed: A rank is gone or did not take part in time.
        """
        self._weights.prepare(group)

    def fill(
        self, bucket: Bucket | None, layout: BucketLayout, group: TrainerGroup, sources: SourceSums | None = None
    ) -> torch.Tensor | None:
        """Gathers the bucket's parameters, fills the bucket, and partitions them again.  Collective.

        Raises:
            The same as ``ModuleExporter.fill``.
        """
        with self._tensors.gathered(self._weights.sources(layout)):
            return self._weights.fill(bucket, layout, group, sources)

    def source_counts(self, layout: BucketLayout, group: TrainerGroup) -> Sequence[int]:
        """Implements ``Summing.source_counts``."""
        return self._weights.source_counts(layout, group)

    def fold(self, layout: BucketLayout, group: TrainerGroup, answers: Sequence[torch.Tensor]) -> Folded:
        """Implements ``Summing.fold``."""
        return self._weights.fold(layout, group, answers)

    def unsummed(self) -> Collection[str]:
        """Implements ``Summing.unsummed``."""
        return self._weights.unsummed()


class _PartitionedTensors(PlacedTensors):
    """Tensors of which DeepSpeed shows each whole while it is gathered, and empty otherwise."""

    def __init__(self, model: nn.Module) -> None:
        self._shard_of = None
        self._fsdp_modules = []
        self._parts: dict[int, tuple[Box, torch.Tensor] | None] = {}
        self.places = []
        seen: set[int] = set()
        for place, tensor in places_of(model):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                shape = _whole_shape(tensor)
                self.places.append(place if shape is None else replace(place, shape=shape))
        self._settle()

    def gathered(self, numbers: Sequence[int]) -> AbstractContextManager[None]:
        """A block in which these tensors are whole on every rank.  Collective."""
        deepspeed: Any = sys.modules["deepspeed"]
        tensors = [self.tensor(number) for number in numbers]
        return deepspeed.zero.GatheredParameters([one for one in tensors if _whole_shape(one) is not None])

    def part(self, number: int) -> tuple[Box, torch.Tensor] | None:
        """The whole tensor, without memory unless it is gathered."""
        place, tensor = self.places[number], self.tensor(number)
        whole = Box(offset=(0,) * len(place.shape), shape=place.shape)
        if tuple(tensor.shape) == place.shape:
            return whole, tensor.detach()
        return whole, torch.empty(place.shape, dtype=place.dtype, device="meta")


def _whole_shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The unpartitioned shape, which DeepSpeed notes at a parameter that it partitions; None for other tensors."""
    shape = getattr(tensor, "ds_shape", None)
    return tuple(shape) if shape is not None else None
