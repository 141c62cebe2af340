"""Converts a caller's arguments into the updater's types: sizes, dtypes, targets and models.

Each function names the argument that it refuses.  Nothing here opens a connection.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict, cast, get_type_hints

import torch
from torch import nn

from weightcast.config import (
    AdvancedOptions,
    OnFailure,
    PauseChoice,
    Target,
    TransportName,
    UpdateConfig,
    VerifyLevel,
    check_options,
    parse_size,
)
from weightcast.errors import ConfigError
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.exporters.claims import OTHERS, claimed
from weightcast.exporters.fsdp1 import Fsdp1Exporter, is_sharded_by_fsdp1
from weightcast.exporters.lora_adapter import AdapterExporter, adapters_of
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.multi_module import ComposedExporter, Part
from weightcast.exporters.state_dict import StateDictExporter
from weightcast.exporters.zero3 import Zero3Exporter, is_partitioned
from weightcast.protocols import Exporter
from weightcast.watch.listeners import Listener
from weightcast.wire.adapters import AdapterRequest, adapter_request
from weightcast.wire.layout import DRAFT_PREFIX, DTYPES, NAMES, dtype_name

Model = nn.Module | Exporter | Mapping[str, torch.Tensor] | str | os.PathLike[str]
Targets = Target | str | Sequence[Target | str]
Listeners = Listener | Sequence[Listener] | None


class UpdateOptions(TypedDict, total=False):
    """Options of ``WeightUpdater.connect``, by name.

    Attributes:
        transport: ``"ipc"`` (same host: CUDA IPC or shared memory), ``"broadcast"`` (an nccl or gloo process group of
            trainer and engines), ``"direct"`` (shards to the engine ranks that keep them, without a gather; the report
            says by what), ``"rdma"`` (the same through NIXL, between any hosts), ``"disk"`` (a checkpoint folder, for
            engines that load one while they run), ``"checkpoint-engine"`` (that project's protocol, same host, for
            engines that have its receiver) or ``"auto"`` (direct with ``keep_mapped`` where every target is on this
            host and can read shards; else ipc to the targets on this host and broadcast to the others, in one update).
            With ``"auto"``, a target that refuses ipc gets the same update by broadcast.
        pause: Fate of the requests that run at the moment of the switch.  ``"auto"`` is ``"retract"`` on each target
            that can, so that they go on with the new weights; on another one they end (``"abort"``), and ``connect``
            logs why.
        verify: Highest level of proof to reach; the report has the level of each target.
        strict: True refuses, at ``connect``, a target that cannot reach that level for every tensor.  Otherwise it
            takes part, ``connect`` warns, and the report has the level that it reached, and for how many tensors.
        on_failure: ``"raise"``, or ``"quarantine"``, which updates the healthy targets and reports the rest.
        timeout_s: Deadline of each single wait, in seconds; at most six hours.
        wire_dtype: Dtype to which a module's floating-point tensors are cast before they are sent: a torch dtype or its
            name (``"bf16"``).  None casts a tensor to the smaller float, other than float16, in which every engine
            keeps it, if there is one.  An exporter object sets its own.
        bucket_bytes: Size of one bucket, in bytes or as text (``"512MiB"``).  A trainer rank uses at most two buckets
            for any model, and up to 64 MiB for sums and casts.  None lets ``connect`` choose: 512 MiB; by ``ipc`` to
            our receivers on GPUs an eighth of the weights of one trainer rank, from 512 MiB to 2 GiB.  It keeps two
            buckets and the scratch buffer of a gather within a quarter of the free memory of each trainer GPU, and
            chooses a larger one than 512 MiB for a tensor that an engine takes only whole.
        max_extra_bytes: Most extra memory that a trainer rank may take, in bytes or as text (``"1GiB"``); None for no
            limit.  Buckets are made smaller than ``bucket_bytes`` where it asks for that.  ``connect`` refuses a limit
            that is too low, with the bytes that it needs.  NCCL's own memory does not count.
        keep_mapped: True if the weights stay where they are between updates, so that engine ranks may keep them mapped;
            for ``direct``.  Call ``release`` before the trainer frees or moves them.
        allow_older: True accepts a lower version than the one an engine serves (a trainer resumed from a checkpoint).
        adapter: Name of a LoRA adapter that is updated instead of the weights, and under which engines serve it.  The
            model is one of PEFT's; if it has several adapters, one of them must have this name.
        draft: Draft model that is updated together with the model, for engines that were told so.
        on_event: One function or several, called with each event of ``weightcast.watch.events`` on every rank.
        advanced: Options that few runs need; see ``AdvancedOptions``.
    """

    transport: TransportName
    pause: PauseChoice
    verify: VerifyLevel
    strict: bool
    on_failure: OnFailure
    timeout_s: float
    wire_dtype: torch.dtype | str | None
    bucket_bytes: int | str | None
    max_extra_bytes: int | str | None
    keep_mapped: bool
    allow_older: bool
    adapter: str | None
    draft: Model | None
    on_event: Listeners
    advanced: AdvancedOptions | None


_SHORT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}


def config_of(options: UpdateOptions) -> UpdateConfig:
    """Returns the checked options of an update; raises ``ConfigError`` for one that is unknown, gone or malformed."""
    given: dict[str, Any] = {**options}
    advanced: dict[str, Any] = {**(given.get("advanced") or {})}
    check_options(given, tuple(UpdateOptions.__annotations__), advanced)
    for name in ("bucket_bytes", "max_extra_bytes"):
        if given.get(name) is not None:
            given[name] = bytes_of(name, given[name])
    dtype = wire_dtype_of(given.get("wire_dtype"))
    given["wire_dtype"] = None if dtype is None else dtype_name(dtype)
    own = {field.name for field in fields(UpdateConfig)}
    return UpdateConfig(**{name: value for name, value in given.items() if name in own}, **advanced)


def signature_of_connect() -> inspect.Signature:
    """The signature of ``WeightUpdater.connect`` with each option and its default, for ``help()`` and notebooks."""
    defaults = {field.name: field.default for field in fields(UpdateConfig)}
    ordered = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=hint)
        for name, hint in get_type_hints(UpdateOptions).items()
    ]
    first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("cls", "model", "targets")]
    return inspect.Signature([*first, *ordered])


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


def source_of(
    model: Model, options: UpdateOptions, wire_dtype: str | None
) -> tuple[Exporter, Callable[[], None], AdapterRequest | None]:
    """Returns an exporter for what engines get, the function that closes it, and the request for an adapter, if any."""
    adapter, draft = options.get("adapter"), options.get("draft")
    if adapter is not None and draft is not None:
        raise ConfigError("an adapter has no draft", hint="give connect adapter= or draft=")
    if adapter is not None:
        return adapter_of(model, adapter, wire_dtype)
    exporter, release = exporter_of(model, wire_dtype)
    if draft is not None:
        exporter, release = with_draft(exporter, release, draft, wire_dtype)
    return exporter, release, None


def exporter_of(model: Model, wire_dtype: str | None) -> tuple[Exporter, Callable[[], None]]:
    """Returns an exporter for a model, and the function that closes it; ConfigError if there is none.

    The model is a module, a ``state_dict`` with a checkpoint's names, the path of a safetensors checkpoint, a model
    that another package claims, or an exporter, which has dtypes of its own and which the caller closes.  Floats are
    cast to ``wire_dtype``; None for no cast.
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
    if not isinstance(model, Exporter):  # pyright: ignore[reportUnnecessaryIsInstance]
        exporter = claimed(model, dtype)
        if exporter is None:
            unusable = [f"{one.name} of {one.package}: {one.error}" for one in OTHERS.load() if one.error]
            raise ConfigError(
                f"an object of type {type(model).__name__} is no model that can be exported",
                hint="pass a module, a state_dict, the path of a safetensors checkpoint, or an exporter, whose class "
                "derives from weightcast.protocols.Exporter"
                + (f"; an exporter that cannot be used is left out: {'; '.join(unusable)}" if unusable else ""),
            )
        return exporter, getattr(exporter, "close", lambda: None)
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
