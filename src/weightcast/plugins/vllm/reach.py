"""Finds all that a layer of vLLM computes with: its own tensors and numbers, and those that its kernels hold."""

# vLLM is not installed where this is checked.
# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from weightcast.plugins.vllm.layer_kinds import QUANTISATION

_DEEPEST = 8


def reach(layer: Any) -> dict[str, torch.Tensor | float]:
    """Finds the tensors and floats that a layer, its method and its kernels hold, by path from the layer.

    Scales may become floats that kernels are called with.
    """
    internal = ("_parameters", "_buffers", "_modules")
    own = {key: it for key, it in vars(layer).items() if key not in internal and not key.endswith("_hooks")}
    tables = {kind: vars(layer)[f"_{kind}"] for kind in ("parameters", "buffers")}
    return dict(_inside(tables | own, "", ()))


def _inside(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor | float]]:
    """Yields tensors and floats below a value, with their paths.  Modules and foreign objects are skipped."""
    if isinstance(value, torch.Tensor) or type(value) is float:
        yield path, value
        return
    if isinstance(value, type | nn.Module) or len(above) > _DEEPEST or id(value) in above:
        return
    home = type(value).__module__
    if home.startswith("vllm.config") or (home.startswith(QUANTISATION) and type(value).__name__.endswith("Config")):
        return  # settings of the whole model
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif home.startswith("vllm.") and hasattr(value, "__dict__"):
        items = vars(value).items()
    else:
        return
    for key, item in items:
        yield from _inside(item, f"{path}.{key}" if path else str(key), (*above, id(value)))
