"""Finds the names and layouts that a checkpoint of a model would have, or refuses the model.

A model of transformers gets the names and layouts that its ``save_pretrained`` would write: the library's own
conversion runs once on meta tensors and is recorded.  Other models use the tables of ``families.py``.

transformers 5 renames, splits and merges tensors on their way into a checkpoint (its reverse weight conversion);
transformers 4 renames them.  ``saved`` calls the library's functions for this, which are private, so a caller must
expect any exception.  Nothing here imports transformers: ``sys.modules`` has it if the model comes from it.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from weightcast.errors import ConfigError
from weightcast.exporters.families import KEEPS_DTYPE, family_of, table_for
from weightcast.exporters.mapping import Family, arrange, as_published
from weightcast.exporters.module_tensors import own_tensors
from weightcast.exporters.names import is_wrapper, strip_wrappers
from weightcast.exporters.recording import NotRecorded, Recorder
from weightcast.exporters.segments import Arranged, check_used_once

_log = logging.getLogger("weightcast.exporters")

# Path segments of PEFT's wrappers; no model of transformers has such a segment.
_ADAPTER_SEGMENT = re.compile(r"(?:^|\.)(base_layer|modules_to_save|original_module|token_adapter)(?:\.|$)")
_CHOICES = (
    "save the model and pass CheckpointExporter(folder), or give the layout yourself: "
    'ModuleExporter(model, family=Family(...)), or family="plain" with names=... to send names as they are'
)
_LIBRARY = "transformers."


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One of the trainer's tensors: name without the segments of wrappers, unsharded shape, trainer's dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def arrange_as_saved(
    model: nn.Module, stored: Sequence[Stored], numbers: Mapping[int, int], config: Any
) -> tuple[Family, list[Arranged]]:
    """Arranges a model's tensors under the names and layouts of a checkpoint, in the order of the trainer's tensors.

    Args:
        numbers: Number in ``stored`` of a tensor, by its ``id``.
        config: The model's configuration; None if it has none.

    Raises:
        ConfigError: Neither transformers nor a table knows the names of the tensors in a checkpoint.
    """
    adapter = next((tensor.name for tensor in stored if _ADAPTER_SEGMENT.search(tensor.name)), None)
    if adapter is not None:
        raise ConfigError(
            f"{adapter} is part of an adapter, and no engine has a name for it. Nothing has been sent",
            hint="merge the adapter into a copy of the model and export that, or save it and pass "
            "CheckpointExporter(folder)",
        )
    inner = unwrapped(model)
    shapes = [(tensor.name, tensor.shape) for tensor in stored]
    if not is_pretrained(inner):
        _check_nothing_inside(inner)
        family = family_of(config, shapes)
        return family, arrange(shapes, family, config)
    table = table_for(config)
    remote = library_class(inner) is None
    fused = table is not None and table.fused is not None and any(re.fullmatch(table.fused, name) for name, _ in shapes)
    if table is not None and (remote or fused):
        return table, arrange(shapes, table, config)
    if remote:
        family_of(config, shapes)  # refuses stacked experts: no published checkpoint of remote code stacks them
    try:
        arranged = _as_saved(inner, stored, numbers)
        if table is not None:
            arranged = as_published(arranged, table, config)
    except Exception as error:  # private functions of transformers may raise anything
        if table is None:
            raise ConfigError(
                f"{type(inner).__name__}: weightcast cannot find out what a checkpoint calls {stored[0].name} and the "
                f"other {len(stored) - 1} tensors. Recording transformers' own conversion failed: "
                f"{type(error).__name__}: {error}. Nothing has been sent",
                hint=_CHOICES,
            ) from error
        _log.warning(
            "%s: recording transformers' own names failed (%s: %s); weightcast uses the table %r",
            *(type(inner).__name__, type(error).__name__, error, table.name),
        )
        return table, arrange(shapes, table, config)
    return _family(inner, stored, arranged, table), arranged


def _check_nothing_inside(model: nn.Module) -> None:
    """Refuses a module that wraps a model of transformers: engines do not know the prefix that its names would get."""
    inside = pretrained_inside(model)
    if inside is not None:
        path, module = inside
        raise ConfigError(
            f"{type(model).__name__} is no model of transformers, and has one inside: {path} is a "
            f"{type(module).__name__}. Its tensors would be sent as {path}.*, and an engine does not know these names. "
            "Nothing has been sent",
            hint=f"pass model.{path} itself, several parts as ComposedExporter, or ModuleExporter(model, "
            'family="plain", names=...) to name them yourself',
        )


def _as_saved(model: nn.Module, stored: Sequence[Stored], numbers: Mapping[int, int]) -> list[Arranged]:
    """The tensors that ``save_pretrained`` would write, in the order of the trainer's tensors.

    Raises:
        NotRecorded: A tensor is computed on the way, or is missing in the model's ``state_dict``.
        ConfigError: An element would be written twice or not at all.
        Exception: Any exception that transformers raises.
    """
    recorder = Recorder()
    made: dict[int, torch.Tensor] = {}
    stand_ins: dict[str, torch.Tensor] = {}
    for path, tensor in _named_tensors(model):
        number = numbers.get(id(tensor))
        if number is None:  # an adapter's tensor, which is merged on the way
            continue
        if number not in made:
            made[number] = recorder.source(number, stored[number].shape, stored[number].dtype)
        stand_ins[strip_wrappers(model, path)] = made[number]
    missing = next((tensor.name for number, tensor in enumerate(stored) if number not in made), None)
    if missing is not None:
        raise NotRecorded(f"{missing} is not in the model's state_dict")
    with torch.no_grad(), recorder:
        written = saved(model, stand_ins)
    arranged: list[Arranged] = []
    for name, tensor in written.items():
        try:
            segments = recorder.segments(tensor)
        except NotRecorded as error:
            raise NotRecorded(f"{name}: {error}") from None
        arranged.append(Arranged(name=name, shape=tuple(tensor.shape), segments=segments))
    left_out = getattr(model, "_keys_to_ignore_on_save", None) or ()
    check_used_once([(tensor.name, tensor.shape) for tensor in stored], arranged, left_out=left_out)
    return sorted(arranged, key=lambda tensor: tensor.segments[0].source)


def _named_tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """The model's own tensors under all names that its ``state_dict`` has."""
    if not any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return model.state_dict(keep_vars=True).items()
    # FSDP1 would gather the whole model, and give copies.
    return (
        (f"{path}.{name}" if path else name, tensor)
        for path, module in model.named_modules(remove_duplicate=False)
        for name, tensor in own_tensors(module)
    )


def _family(model: nn.Module, stored: Sequence[Stored], arranged: Sequence[Arranged], table: Family | None) -> Family:
    """The ``Family`` for names from transformers, with the tensors that keep their dtype."""
    pattern = float32_names(model)
    kept = {
        number
        for number, tensor in enumerate(stored)
        if KEEPS_DTYPE.fullmatch(tensor.name) or (pattern is not None and pattern.search(tensor.name))
    }
    names = [tensor.name for tensor in arranged if any(segment.source in kept for segment in tensor.segments)]
    return Family(
        name="transformers" if table is None or not table.published else f"transformers and {table.name}",
        model_types=frozenset(),
        keeps_dtype="|".join(map(re.escape, names)) or None,
    )


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
