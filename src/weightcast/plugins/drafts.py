"""Draft models that an update writes with the model: the setting for them, and which tensor is whose."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import nn

from weightcast.errors import ConfigError
from weightcast.wire.layout import DRAFT_PREFIX

Weights = Iterable[tuple[str, torch.Tensor]]


def draft_setting() -> bool:
    """True if an update is to write the draft model too, by the variable ``WEIGHTCAST_DRAFT``.

    Raises:
        ConfigError: The variable is neither ``keep`` nor ``update``.
    """
    value = os.environ.get("WEIGHTCAST_DRAFT") or "keep"
    if value not in ("keep", "update"):
        raise ConfigError(f"WEIGHTCAST_DRAFT is {value!r}", hint="use keep or update")
    return value == "update"


def keeps_draft(engine: str) -> str:
    """The hazard of an engine whose draft model no update writes."""
    return (
        "the draft model keeps the weights that it was started with: answers stay right, and fewer of its tokens are "
        f"accepted; WEIGHTCAST_DRAFT=update in {engine}'s environment updates it too"
    )


def apart(weights: Weights) -> tuple[Weights, Weights]:
    """The tensors of the model and those of its draft, which come after them.

    Each is taken from ``weights`` when it is asked for, so the first part must be used up before the second.
    """
    rest = iter(weights)
    first: list[tuple[str, torch.Tensor]] = []

    def of_model() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in rest:
            if name.startswith(DRAFT_PREFIX):
                first.append((name, tensor))
                return
            yield name, tensor

    def of_draft() -> Iterator[tuple[str, torch.Tensor]]:
        yield from chain(first, rest)

    return of_model(), of_draft()


def plain_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that are plain attributes of a model's modules, by name: neither parameters nor buffers."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }
