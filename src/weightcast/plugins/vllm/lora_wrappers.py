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
_PREFIX = "lora_base_layer_prefix"  # of the parameters of experts, to their own loader


@contextmanager
def without_wrappers(model: nn.Module) -> Generator[None]:
    """Puts layers in the place of their wrappers, as vLLM loads a model.  The model must not compute meanwhile.

    Loaders find no parameter below the wrappers of vLLM 0.25, and none below the wrapper of experts in newer versions.
    Experts look for other names once they are wrapped.
    """
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and _is_wrapper(child)
    ]
    prefixes = {module: prefix for module in model.modules() if (prefix := vars(module).get(_PREFIX))}
    for parent, name, child in wrapped:
        parent._modules[name] = child.base_layer  # type: ignore[assignment]
    for module in prefixes:
        setattr(module, _PREFIX, "")
    try:
        yield
    finally:
        for module, prefix in prefixes.items():
            setattr(module, _PREFIX, prefix)
        for parent, name, child in wrapped:
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


def _is_wrapper(module: nn.Module) -> bool:
    layers = sys.modules.get("vllm.lora.layers")  # imported where a model has wrappers
    wrapper = getattr(layers, "BaseLayerWithLoRA", None)
    return wrapper is not None and isinstance(module, wrapper) and isinstance(module.base_layer, nn.Module)
