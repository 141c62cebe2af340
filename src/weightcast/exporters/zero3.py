"""Exports a model whose parameters DeepSpeed partitions (ZeRO stage 3).

DeepSpeed is never imported: it is there if the model comes from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from weightcast.exporters.gathered import GatheredExporter, GatheredTensors, refuse_adapters
from weightcast.exporters.mapping import Family
from weightcast.exporters.module_tensors import places_of
from weightcast.wire.box import Box


def is_partitioned(model: nn.Module) -> bool:
    """True if DeepSpeed has partitioned a parameter of the model."""
    return any(_whole_shape(parameter) is not None for parameter in model.parameters())


class Zero3Exporter(GatheredExporter):
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

    framework: ClassVar[str] = "ZeRO stage 3"

    def __init__(
        self,
        model: nn.Module,
        *,
        wire_dtype: torch.dtype | None = None,
        names: Callable[[str], str] | None = None,
        family: Family | str | None = None,
    ) -> None:
        if type(model).__name__ == "DeepSpeedEngine":
            model = model.module  # pyright: ignore[reportAssignmentType]
        refuse_adapters(model, self.framework)
        super().__init__(model, _PartitionedTensors(model), wire_dtype=wire_dtype, names=names, family=family)


class _PartitionedTensors(GatheredTensors):
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

    def gathered(self, numbers: Sequence[int]) -> AbstractContextManager[object]:
        """Implements ``GatheredTensors.gathered``."""
        deepspeed: Any = sys.modules["deepspeed"]
        tensors = [self.tensor(number) for number in numbers]
        return deepspeed.zero.GatheredParameters([one for one in tensors if _whole_shape(one) is not None])


def _whole_shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The unpartitioned shape, which DeepSpeed notes at a parameter that it partitions; None for other tensors."""
    shape = getattr(tensor, "ds_shape", None)
    return tuple(shape) if shape is not None else None
