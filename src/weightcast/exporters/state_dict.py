"""Exports a ``state_dict``: tensors by the names that engines know."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat

import torch
from torch import nn

from weightcast.errors import ConfigError
from weightcast.exporters.module import WeightsExporter
from weightcast.exporters.module_tensors import PlacedTensors


class _Holder(nn.Module):
    """A module whose tensors may have any names."""

    def take_all(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._buffers.clear()
        self._buffers.update(tensors)  # register_buffer takes no dots


class StateDictExporter(WeightsExporter):
    """Named tensors, plain or DTensor, sent under their own names.

    Names and layouts must be those of a checkpoint, because the exporter cannot know which model they come from.  A
    tensor with several names is sent once, under the first.  Every update reads the tensors that the mapping has then,
    so it sees values that change in place, and a tensor of the same shape that replaces another.

    Args:
        tensors: Tensors by name; the same names in the same order on every rank.
        wire_dtype: The same as for ``ModuleExporter``.

    Raises:
        ConfigError: A value is not a tensor, or a tensor or name cannot be sent.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, wire_dtype: torch.dtype | None = None) -> None:
        self._given = tensors
        self._holder = _Holder()
        super().__init__(self._holder, self._take, wire_dtype=wire_dtype)

    def changed(self) -> bool:
        """Implements ``Exporter.changed``: looks at the tensors that the mapping has now."""
        if not all(map(isinstance, self._given.values(), repeat(torch.Tensor))):
            return True
        self._holder.take_all(self._given)
        return super().changed()

    def _take(self) -> PlacedTensors:
        for name, tensor in self._given.items():
            if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"{name} is a {type(tensor).__name__}, and only tensors can be sent",
                    hint="leave it out: {name: t for name, t in state.items() if isinstance(t, torch.Tensor)}",
                )
        self._holder.take_all(self._given)
        return PlacedTensors(self._holder)
