"""Exports a ``state_dict``: tensors by the names that engines know."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from weightcast.errors import ConfigError
from weightcast.exporters.module import WeightsExporter
from weightcast.exporters.module_tensors import PlacedTensors


class _Holder(nn.Module):
    """A module whose tensors may have any names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._buffers.update(tensors)  # register_buffer takes no dots


class StateDictExporter(WeightsExporter):
    """Named tensors, plain or DTensor, sent under their own names.

    Names and layouts must be those of a checkpoint, because the exporter cannot know which model they come from.  A
    tensor with several names is sent once, under the first.  Every update reads the tensors anew: it sees values that
    an optimizer changes in place, but not a tensor that replaces another.

    Args:
        tensors: Tensors by name; the same names in the same order on every rank.
        wire_dtype: The same as for ``ModuleExporter``.

    Raises:
        ConfigError: A value is not a tensor, or a tensor or name cannot be sent.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, wire_dtype: torch.dtype | None = None) -> None:
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"{name} is a {type(tensor).__name__}, and only tensors can be sent",
                    hint="leave it out: {name: t for name, t in state.items() if isinstance(t, torch.Tensor)}",
                )
        holder = _Holder(tensors)
        super().__init__(holder, PlacedTensors(holder), wire_dtype=wire_dtype)
