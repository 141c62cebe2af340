"""Finds the names and layouts that a checkpoint of a model would have, or refuses the model.

A model of transformers gets the names and layouts that its ``save_pretrained`` would write: the library's own
conversion runs once on meta tensors and is recorded.  Other models use the tables of ``families.py``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from weightcast.errors import ConfigError
from weightcast.exporters.families import KEEPS_DTYPE, family_of, table_for
from weightcast.exporters.mapping import Family, arrange, as_published
from weightcast.exporters.module_tensors import own_tensors
from weightcast.exporters.names import strip_wrappers
from weightcast.exporters.pretrained import (
    float32_names,
    is_pretrained,
    library_class,
    pretrained_inside,
    saved,
    unwrapped,
)
from weightcast.exporters.recording import NotRecorded, Recorder
from weightcast.exporters.segments import Arranged, check_used_once

_log = logging.getLogger("weightcast.exporters")

# Path segments of PEFT's wrappers; no model of transformers has such a segment.
_ADAPTER_SEGMENT = re.compile(r"(?:^|\.)(base_layer|modules_to_save|original_module|token_adapter)(?:\.|$)")
_CHOICES = (
    "save the model and pass CheckpointExporter(folder), or give the layout yourself: "
    'ModuleExporter(model, family=Family(...)), or family="plain" with names=... to send names as they are'
)


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
