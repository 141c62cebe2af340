"""Exports a model whose parameters DeepSpeed partitions (ZeRO stage 3).

DeepSpeed is never imported: it is there if the model comes from it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn

from weightcast.exporters.gathered import GatheredExporter, GatheredTensors
from weightcast.exporters.module_tensors import Place


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

    def tensors_of(self, model: nn.Module) -> GatheredTensors:
        """Implements ``GatheredExporter.tensors_of``."""
        return _PartitionedTensors(model)


class _PartitionedTensors(GatheredTensors):
    """Tensors of which DeepSpeed shows each whole while it is gathered, and empty otherwise."""

    def gathered_shape(self, place: Place, tensor: torch.Tensor) -> tuple[int, ...] | None:
        return _whole_shape(tensor)

    def gathered(self, numbers: Sequence[int]) -> AbstractContextManager[object]:
        deepspeed: Any = sys.modules["deepspeed"]
        tensors = [self.tensor(number) for number in numbers]
        return deepspeed.zero.GatheredParameters([one for one in tensors if _whole_shape(one) is not None])


def _whole_shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The unpartitioned shape, which DeepSpeed notes at a parameter that it partitions; None for other tensors."""
    shape = getattr(tensor, "ds_shape", None)
    return tuple(shape) if shape is not None else None
