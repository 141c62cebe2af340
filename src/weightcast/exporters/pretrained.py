"""Runs transformers' own ``save_pretrained`` conversion on stand-ins of a model's tensors, without weights.

transformers 5 renames, splits and merges tensors on their way into a checkpoint (its reverse weight conversion);
transformers 4 renames them.  ``saved`` calls the library's functions for this, which are private, so a caller must
expect any exception.

This module never imports transformers: it looks in ``sys.modules``, which has the library if the model comes from it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from weightcast.exporters.names import is_wrapper, strip_wrappers
from weightcast.exporters.recording import NotRecorded

_LIBRARY = "transformers."


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile``, DDP, FSDP1 and PEFT."""
    module: Any = model
    while True:
        if hasattr(module, "_orig_mod"):
            module = module._orig_mod
        elif is_wrapper(module) or hasattr(module, "_fsdp_wrapped_module"):
            module = module.module
        elif hasattr(module, "peft_config") and hasattr(module, "base_model") and hasattr(module, "get_base_model"):
            module = module.get_base_model()
        else:
            return module


def is_pretrained(module: object) -> bool:
    """True for a ``PreTrainedModel`` of transformers."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def pretrained_inside(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Path and module of the first ``PreTrainedModel`` somewhere inside a module; None if there is none."""
    return next(((path, module) for path, module in model.named_modules() if is_pretrained(module)), None)


def class_of(module: nn.Module) -> type[nn.Module]:
    """A module's own class, not the one that ``fully_shard`` replaces it with."""
    return next(
        kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and not issubclass(kind, FSDPModule)
    )


def library_class(module: nn.Module) -> type[nn.Module] | None:
    """The model class of transformers that a module has or inherits from; None for remote code.

    ``XPreTrainedModel`` does not count, because a class derived from it has a layout of its own.
    """
    for kind in class_of(module).__mro__:
        if kind.__module__.startswith(_LIBRARY) and issubclass(kind, nn.Module):
            return None if kind.__name__.endswith("PreTrainedModel") else kind
    return None


def float32_names(model: nn.Module) -> re.Pattern[str] | None:
    """Pattern to ``search`` for in a model's names, for tensors that stay float32; None if it has no such tensors."""
    parts: set[str] = set()
    for module in model.modules():
        parts.update(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    return re.compile("|".join(rf"(?:^|\.){part}(?:$|\.)" for part in sorted(parts))) if parts else None


def saved(model: nn.Module, stand_ins: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts tensors as ``save_pretrained`` does before it writes them.

    Args:
        model: A ``PreTrainedModel``, which is not changed.
        stand_ins: A meta tensor of the unsharded shape for each name of the model's ``state_dict``, without the
            segments of wrappers; the names of a tied tensor share one.

    Returns:
        The tensors that would be written, by name, made of the stand-ins.

    Raises:
        NotRecorded: The model is quantised, or this version of transformers lacks the functions.
        Exception: Any exception that transformers raises.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        raise NotRecorded("the model is quantised")
    library: Any = sys.modules["transformers.modeling_utils"]
    conversion: Any = sys.modules.get("transformers.core_model_loading")
    twin = _twin(model, stand_ins)
    kept = dict(stand_ins)
    if conversion is None:
        return _saved_by_version_4(twin, kept, library)
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        kept.pop(name, None)
    if not hasattr(conversion, "revert_weight_conversion") or not hasattr(
        library, "remove_tied_weights_from_state_dict"
    ):
        raise NotRecorded("this version of transformers converts weights in a way that weightcast does not know")
    kept = library.remove_tied_weights_from_state_dict(kept, twin)
    return conversion.revert_weight_conversion(twin, kept)


def _saved_by_version_4(twin: Any, kept: dict[str, torch.Tensor], library: Any) -> dict[str, torch.Tensor]:
    """Renames as transformers 4 does: by the inverse of the class's mapping, for some classes.  No values move."""
    vision: Any = getattr(library, "VLMS", None)
    if vision is None or not hasattr(twin, "_checkpoint_conversion_mapping"):
        raise NotRecorded("this version of transformers names weights in a way that weightcast does not know")
    classes = [kind.__name__.lower() for kind in type(twin).__mro__[:-1]]
    turned: dict[str, str] = {}
    if any(part in kind for kind in classes for part in vision):
        turned = {new: old for old, new in twin._checkpoint_conversion_mapping.items()}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in kept.items():
        for pattern, replacement in turned.items():
            name, count = re.subn(pattern, re.sub(r"\(.*\)", "", replacement.lstrip("^")), name)
            if count:
                break
        found[name] = tensor
    for name in twin._keys_to_ignore_on_save or ():
        found.pop(name, None)
    found = twin._fix_state_dict_keys_on_save(found)
    names_of: dict[int, list[str]] = {}
    for name, tensor in found.items():
        names_of.setdefault(id(tensor), []).append(name)
    tied = [re.compile(pattern) for pattern in twin._tied_weights_keys or ()]
    for names in names_of.values():
        main = [name for name in names if not any(pattern.search(name) for pattern in tied)] or names
        for name in names:
            if name != main[0]:
                del found[name]
    return found


def _twin(model: nn.Module, stand_ins: Mapping[str, torch.Tensor]) -> Any:
    """A stand-in of the model with its true class, paths without wrappers, and unsharded shapes.

    ``fully_shard`` replaces the model's class with one made by torch.  transformers then takes the model for custom
    code and does not convert its names.  The same happens to a class derived from a model of transformers.
    """
    modules = [(strip_wrappers(model, path), _undisguised(module)) for path, module in model.named_modules()]
    kind = library_class(model) or class_of(model)
    twin: Any = kind.__new__(kind)
    object.__setattr__(twin, "__dict__", dict(model.__dict__))
    listed = [(path, twin if module.__dict__ is model.__dict__ else module) for path, module in modules]
    if model.__dict__.get("_weight_conversions") is not None:
        # Reversing a conversion changes its lists of patterns in place.
        twin.__dict__["_weight_conversions"] = deepcopy(model.__dict__["_weight_conversions"])

    def named_modules(*_: Any, **__: Any) -> Iterator[tuple[str, nn.Module]]:
        return iter(listed)

    def all_modules() -> Iterator[nn.Module]:
        return iter([module for _, module in listed])

    twin.__dict__ |= {
        "named_modules": named_modules,
        "modules": all_modules,
        "get_parameter": stand_ins.__getitem__,
        "get_parameter_or_buffer": stand_ins.__getitem__,
    }
    return twin


def _undisguised(module: nn.Module) -> nn.Module:
    if not isinstance(module, FSDPModule):
        return module
    kind = class_of(module)
    twin = kind.__new__(kind)
    object.__setattr__(twin, "__dict__", module.__dict__)
    return twin
