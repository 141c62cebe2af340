"""Names of tensors as Hugging Face has them.

Knows what wrappers put into a path; it does not know any model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from weightcast.errors import ConfigError

_TRAVELS = re.compile(r"[\x21-\x7e]{1,512}")
# Path segments that only wrappers have, whatever they wrap.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def strip_wrappers(model: nn.Module, path: str) -> str:
    """A module's path without what ``torch.compile``, checkpointing, DDP, PEFT and the like put into it.

    Args:
        model: Where the path starts.
        path: As ``named_modules`` gives it.
    """
    kept: list[str] = []
    module: Any = model
    inside = ""  # the wrapper that the path has just entered
    for segment in path.split(".") if path else ():
        wrapped = segment in _WRAPPERS or (segment == "module" and is_wrapper(module))
        if segment == "base_layer":
            wrapped = is_adapted(module)
        elif segment == "base_model":  # PEFT's model has one, in which "model" is the model itself
            wrapped = hasattr(module, "peft_config")
        elif inside == "base_model":
            wrapped = segment == "model"
        elif (segment == "modules_to_save" and hasattr(module, "original_module")) or inside == "modules_to_save":
            wrapped = True
        if not wrapped:
            kept.append(segment)
        inside = segment if wrapped else ""
        module = getattr(module, segment, None)
    return ".".join(kept)


def is_adapted(module: object) -> bool:
    """True if a module is another one with LoRA adapters, as PEFT makes them."""
    return all(hasattr(module, part) for part in ("base_layer", "lora_A", "lora_B"))


def is_wrapper(module: object) -> bool:
    """True if a module's attribute ``module`` is the model itself and no part of its name."""
    return isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)


def check_names(names: Iterable[str]) -> None:
    """Refuse names that cannot travel.

    Raises:
        ConfigError: A name has characters other than printable ASCII, is empty or too long, or is there twice.
    """
    seen: set[str] = set()
    for name in names:
        if not _TRAVELS.fullmatch(name):
            raise ConfigError(f"{name!r} cannot be sent: a name is 1 to 512 printable ASCII characters, no spaces")
        if name in seen:
            raise ConfigError(f"two tensors have the name {name}")
        seen.add(name)
