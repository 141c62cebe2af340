"""Converts a caller's arguments into the updater's types: sizes, dtypes, targets and models.

Each function names the argument that it refuses.  Nothing here opens a connection.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from weightcast.config import Target, parse_size
from weightcast.errors import ConfigError
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.exporters.fsdp1 import Fsdp1Exporter, is_sharded_by_fsdp1
from weightcast.exporters.lora_adapter import AdapterExporter, adapters_of
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.multi_module import ComposedExporter, Part
from weightcast.exporters.state_dict import StateDictExporter
from weightcast.exporters.zero3 import Zero3Exporter, is_partitioned
from weightcast.protocols import Exporter
from weightcast.watch.listeners import Listener
from weightcast.wire.adapters import AdapterRequest, adapter_request
from weightcast.wire.layout import DRAFT_PREFIX, DTYPES, NAMES

Model = nn.Module | Exporter | Mapping[str, torch.Tensor] | str | os.PathLike[str]
Targets = Target | str | Sequence[Target | str]
Listeners = Listener | Sequence[Listener] | None

_SHORT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}


def bytes_of(option: str, value: object) -> int:
    """Returns a size in bytes, from a whole number or text like ``"512MiB"``; raises ``ConfigError`` for others."""
    if isinstance(value, str):
        try:
            return parse_size(value)
        except ConfigError as error:
            raise ConfigError(f"{option}={value!r}: {error}", hint=error.hint) from None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{option}={value!r} is not a size", hint='write a whole number of bytes, or "512MiB"')
    return value


def wire_dtype_of(value: object) -> torch.dtype | None:
    """``wire_dtype``, a torch dtype, its name or a short form (``"bf16"``), as a dtype; else ConfigError."""
    if value is None:
        return None
    if isinstance(value, torch.dtype):
        name = NAMES.get(value, str(value))
    else:
        name = value.removeprefix("torch.") if isinstance(value, str) else repr(value)
        name = _SHORT.get(name, name)
    if name not in DTYPES:
        raise ConfigError(f"wire_dtype={value!r}: choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def targets_of(targets: Targets) -> tuple[Target, ...]:
    """The targets, one or several, each a ``Target`` or a URL; ConfigError for none, a repeated or malformed one."""
    listed = (targets,) if isinstance(targets, str | Target) else tuple(targets)
    if not listed:
        raise ConfigError("no targets: an update of nothing is an error", hint="pass at least one Target(url)")
    known = tuple(Target(target) if isinstance(target, str) else target for target in listed)
    for url, count in Counter(target.url for target in known).items():
        if count > 1:
            raise ConfigError(f"{url} is named twice")
    return known


def exporter_of(model: Model, wire_dtype: str | None) -> tuple[Exporter, Callable[[], None]]:
    """Returns an exporter for a model, and the function that closes it; ConfigError if there is none.

    The model is a module, a ``state_dict`` with a checkpoint's names, the path of a safetensors checkpoint, or an
    exporter, which has dtypes of its own and which the caller closes.  Floats are cast to ``wire_dtype``; None for no
    cast.
    """
    dtype = DTYPES[wire_dtype] if wire_dtype is not None else None
    if isinstance(model, nn.Module):
        kind = ModuleExporter
        if is_partitioned(model):
            kind = Zero3Exporter
        elif is_sharded_by_fsdp1(model):
            kind = Fsdp1Exporter
        return kind(model, wire_dtype=dtype), lambda: None  # the caller owns the model
    if isinstance(model, str | os.PathLike):
        checkpoint = CheckpointExporter(os.fspath(model), wire_dtype=dtype)
        return checkpoint, checkpoint.close
    if isinstance(model, Mapping):
        return StateDictExporter(model, wire_dtype=dtype), lambda: None
    if not all(hasattr(model, part) for part in ("device", "specs", "shards", "prepare", "fill")):
        raise ConfigError(
            f"an object of type {type(model).__name__} is no model that can be exported",
            hint="pass a module, a state_dict, the path of a safetensors checkpoint, or an exporter",
        )
    if wire_dtype is not None:
        raise ConfigError(
            f"wire_dtype={wire_dtype!r} is for a module; {type(model).__name__} has dtypes of its own",
            hint=f"give it to the exporter: wire_dtype=torch.{wire_dtype}",
        )
    return model, lambda: None


def with_draft(
    exporter: Exporter, release: Callable[[], None], draft: Model, wire_dtype: str | None
) -> tuple[Exporter, Callable[[], None]]:
    """An exporter for a model and its draft, and the function that closes both; as ``exporter_of``."""
    try:
        other, close = exporter_of(draft, wire_dtype)
    except ConfigError:
        release()
        raise

    def close_both() -> None:
        close()
        release()

    try:
        return ComposedExporter({"model": exporter, "draft": Part(exporter=other, prefix=DRAFT_PREFIX)}), close_both
    except ConfigError:
        close_both()
        raise


def adapter_of(model: Model, name: str, wire_dtype: str | None) -> tuple[Exporter, Callable[[], None], AdapterRequest]:
    """Returns an exporter for a LoRA adapter, the function that closes it, and the request for a place in engines.

    The model is one of PEFT's, or an ``AdapterExporter`` with ``scaled=True``.  Engines serve the adapter as ``name``,
    which is PEFT's too if the model has several.  ConfigError says that it has none, or engines cannot take it.
    """
    if isinstance(model, nn.Module):
        known = adapters_of(model)
        if name not in known and len(known) != 1:
            raise ConfigError(
                f"adapter={name!r}: the model has {'several LoRA adapters' if known else 'no LoRA adapter'}"
                f"{': ' + ', '.join(known) if known else ''}",
                hint="name one of them" if known else "make the model with peft.get_peft_model",
            )
        dtype = DTYPES[wire_dtype] if wire_dtype is not None else None
        exporter = AdapterExporter(model, adapter=name if name in known else known[0], scaled=True, wire_dtype=dtype)
    elif isinstance(model, AdapterExporter) and model.scaled and wire_dtype is None:
        exporter = model
    else:
        raise ConfigError(
            f"adapter={name!r} needs a model of PEFT, or an AdapterExporter(..., scaled=True) with its own wire_dtype"
        )
    return exporter, lambda: None, adapter_request(name, exporter.config, tuple(exporter.specs()))


def listeners_of(listeners: Listeners) -> tuple[Listener, ...]:
    """Returns the caller's listeners, given as none, one or several; raises ``ConfigError`` if one cannot be called."""
    several = isinstance(listeners, list | tuple)
    listed: tuple[object, ...] = () if listeners is None else tuple(listeners) if several else (listeners,)
    for listener in listed:
        if not callable(listener):
            raise ConfigError(f"on_event={listener!r} cannot be called", hint="pass a function of one event")
    return cast("tuple[Listener, ...]", listed)
