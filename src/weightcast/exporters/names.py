"""Strips the segments that wrappers add to tensor names, and refuses names that cannot be sent."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from weightcast.errors import ConfigError

_TRAVELS = re.compile(r"[\x21-\x7e]{1,512}")
# Path segments that only wrappers have.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def strip_wrappers(model: nn.Module, path: str) -> str:
    """A path from ``model.named_modules()`` without the segments of compile, checkpoint, DDP and PEFT wrappers."""
    kept: list[str] = []
    module: Any = model
    inside = ""  # the wrapper's segment that came just before
    for segment in path.split(".") if path else ():
        wrapped = segment in _WRAPPERS or (segment == "module" and is_wrapper(module))
        if segment == "base_layer":
            wrapped = is_adapter_layer(module)
        elif segment == "token_adapter":  # PEFT's wrapper of an embedding with trained tokens
            wrapped = isinstance(getattr(module, "adapter_layer_names", None), tuple)
        elif segment == "base_model":  # PEFT's model has one, in which "model" is the model itself
            wrapped = hasattr(module, "peft_config")
        elif inside == "base_model":
            wrapped = segment == "model"
        elif (segment == "modules_to_save" and hasattr(module, "original_module")) or inside == "modules_to_save":
            wrapped = True
        elif segment == "original_module":
            wrapped = isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict)
        if not wrapped:
            kept.append(segment)
        inside = segment if wrapped else ""
        module = getattr(module, segment, None)
    return ".".join(kept)


def is_adapted(module: object) -> bool:
    """True if a module is PEFT's wrapper of another one with LoRA adapters."""
    return all(hasattr(module, part) for part in ("base_layer", "lora_A", "lora_B"))


def is_adapter_layer(module: object) -> bool:
    """True if a module is PEFT's wrapper of another one, with adapters of any kind."""
    named = isinstance(getattr(module, "adapter_layer_names", None), tuple)  # every adapter layer of PEFT has it
    return (named and isinstance(getattr(module, "base_layer", None), nn.Module)) or is_adapted(module)


def is_wrapper(module: object) -> bool:
    """True if a module's attribute ``module`` is the model itself, so that it is not part of a name."""
    return isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)


def check_names(names: Iterable[str]) -> None:
    """Refuses, with ``ConfigError``, names that are not printable ASCII, are empty or too long, or occur twice."""
    seen: set[str] = set()
    for name in names:
        if not _TRAVELS.fullmatch(name):
            raise ConfigError(f"{name!r} cannot be sent: a name is 1 to 512 printable ASCII characters, no spaces")
        if name in seen:
            raise ConfigError(f"two tensors have the name {name}")
        seen.add(name)
