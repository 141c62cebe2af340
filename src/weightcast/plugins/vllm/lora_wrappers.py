"""vLLM's LoRA wrappers around a model's layers, and the names of the layers below them, in old and new versions."""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false, reportPrivateUsage=false
from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

from weightcast.errors import Refused

# A variant of the model's own mapper of names, which keeps those of projections that vLLM fuses: 0.32 and 0.25.
_RENAMES = ("get_rename_mapper", "get_unstacked_mapper")


@contextmanager
def without_wrappers(model: nn.Module) -> Generator[None]:
    """Puts layers in the place of wrappers that hide them from ``load_weights``.  The model must not compute meanwhile.

    The loader of vLLM 0.25 finds no parameter below a wrapper.  Newer wrappers hand weights on.
    """
    hidden = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and _hides(child)
    ]
    for parent, name, child in hidden:
        parent._modules[name] = child.base_layer  # type: ignore[assignment]
    try:
        yield
    finally:
        for parent, name, child in hidden:
            parent._modules[name] = child


def renames_of(model: Any) -> Any:
    """The model's mapper from the names of its checkpoint's modules to those of its own; None if they are the same.

    Raises:
        Refused: This vLLM has no such mapper.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for name in _RENAMES:
        if hasattr(mapper, name):
            return getattr(mapper, name)()
    if getattr(mapper, "orig_to_new_stacked", None):
        raise Refused("this version of vLLM names fused projections in a way that is not known")
    return mapper


def _hides(module: nn.Module) -> bool:
    layers = sys.modules.get("vllm.lora.layers")  # imported where a model has wrappers
    wrapper = getattr(layers, "BaseLayerWithLoRA", None)
    if wrapper is None or not isinstance(module, wrapper):
        return False
    return not hasattr(type(module), "load_weights") and isinstance(getattr(module, "base_layer", None), nn.Module)
