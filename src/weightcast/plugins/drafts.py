"""Draft models that an update writes with the model: the setting for them, and which tensor is whose."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import nn

from weightcast.errors import ConfigError, EngineFailure
from weightcast.receiver.loader import residents_of
from weightcast.receiver.recorder import record_routes
from weightcast.wire.layout import DRAFT_PREFIX, TensorSpec

Weights = Iterable[tuple[str, torch.Tensor]]
TABLE = "d2t"


def draft_setting() -> bool:
    """True if an update is to write the draft model too, by ``WEIGHTCAST_DRAFT``; ``ConfigError`` for other values."""
    value = os.environ.get("WEIGHTCAST_DRAFT") or "keep"
    if value not in ("keep", "update"):
        raise ConfigError(f"WEIGHTCAST_DRAFT is {value!r}", hint="use keep or update")
    return value == "update"


def keeps_draft(engine: str) -> str:
    """The hazard of an engine whose draft model no update writes; vLLM has a setting in its own configuration."""
    setting = f"WEIGHTCAST_DRAFT=update in {engine}'s environment"
    if engine == "vLLM":
        setting = '--additional-config \'{"weightcast": {"draft": "update"}}\''
    return (
        "the draft model keeps the weights that it was started with: answers stay right, and fewer of its tokens are "
        f"accepted; {setting} updates it too"
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


class DraftModel(ABC):
    """A draft model that an update writes, whose checkpoint an engine's own loader has loaded.

    The table ``d2t`` of an EAGLE 3 head is no parameter: engines compute other numbers from it, once.

    Attributes:
        residents: Tensors that an update writes, by name, with the prefix.
    """

    residents: dict[str, torch.Tensor]

    def __init__(self, engine: str, model: nn.Module, computed: torch.Tensor | None) -> None:
        """``computed`` is what the engine made of the table, on any device; None without a table."""
        self._engine, self._model = engine, model
        self._table = None
        if computed is not None:
            computed = computed.to(next(model.parameters(), computed).device)
            self._table = computed - _places(computed)
        self._everything = residents_of(model)

    def load_weights(self, weights: Weights) -> None:
        """Gives the draft's loader its own tensors; their names have the prefix."""
        self._load_own((name.removeprefix(DRAFT_PREFIX), tensor) for name, tensor in weights)

    def check(self) -> None:
        """Checks that the engine computes with the table; raises ``EngineFailure`` if not."""
        if any(not torch.equal(numbers, self._computed().to(numbers.device)) for numbers in self._words()):
            raise EngineFailure(
                f"{self._engine} translates the draft's words by another table than {DRAFT_PREFIX}{TABLE}"
            )

    @abstractmethod
    def renew(self) -> None:
        """Computes from the table what the engine computes from it, in place.  This is a finisher."""

    @abstractmethod
    def _load_own(self, weights: Weights) -> None:
        """Calls the engine's loader."""

    @abstractmethod
    def _words(self) -> Sequence[torch.Tensor]:
        """The tensors that the engine computes with instead of the table; empty without one."""

    def _destinations(self, checkpoint: Weights) -> dict[str, set[str]]:
        """The tensors that each of the checkpoint's is loaded into; ``ConfigError`` if the loader does more."""
        specs = [TensorSpec.of(name, tensor) for name, tensor in checkpoint]
        before = _plain_tensors(self._model)
        recording = record_routes(self._load_own, specs, self._everything | self._tables())
        changed = [name for name, tensor in _plain_tensors(self._model).items() if before.get(name) is not tensor]
        if changed or recording.why:
            what = f"keeps {changed[0]}" if changed else f"computes with {next(iter(recording.why))}"
            raise self._refused(f"the loader of the draft {what}, which an update would not renew")
        return {name: {route.parameter for route in routes} for name, routes in recording.routes.items()}

    def _tables(self) -> dict[str, torch.Tensor]:
        return {} if self._table is None else {TABLE: self._table}

    def _computed(self) -> torch.Tensor:
        """The numbers that the engine is to compute with instead of the table."""
        assert self._table is not None
        return self._table + _places(self._table)

    def _without_table(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies the table, which the engine's own loader would change or replace; yields the other tensors."""
        for name, tensor in weights:
            if self._table is not None and TABLE in name:
                self._table.copy_(tensor)
            else:
                yield name, tensor

    def _refused(self, why: str) -> ConfigError:
        hint = f"start {self._engine} without WEIGHTCAST_DRAFT=update, which leaves the draft as it is"
        return ConfigError(why, hint=hint)


def _plain_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that are plain attributes of a model's modules, by name: neither parameters nor buffers."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def _places(table: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(table), device=table.device, dtype=table.dtype)
