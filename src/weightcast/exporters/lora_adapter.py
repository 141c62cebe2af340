"""Exports a LoRA adapter by itself, for engines that serve adapters beside the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from weightcast.errors import ConfigError
from weightcast.exporters.gather import Gatherer
from weightcast.exporters.held_parts import Computed, Held, InMemory
from weightcast.exporters.module import GatheringExporter
from weightcast.exporters.module_tensors import PlacedTensors
from weightcast.exporters.names import is_adapted
from weightcast.exporters.ownership import SharedParts, as_stored
from weightcast.exporters.peft_layers import levels, outermost_layers, why_not_by_itself
from weightcast.exporters.structure import Structure, in_planned_order
from weightcast.wire.box import Box, slices
from weightcast.wire.layout import TensorSpec, dtype_name

_PEFT_PREFIX = "base_model.model."


class AdapterExporter(GatheringExporter):
    """An adapter by itself, with the names that PEFT saves.

    Args:
        model: A model with PEFT's modules.
        adapter: Name of the adapter.
        scaled: True multiplies each B by its scale (``lora_alpha / r``), so that the adapter is B A.  The values that
            an engine keeps are then the values that were sent.
        wire_dtype: Dtype in which the tensors travel; None for the adapter's own.

    Its tensors are A and B of each adapted module.

    Attributes:
        config: Content of the adapter's ``adapter_config.json`` as plain JSON values, with a scale of 1 if ``scaled``;
            {} if the model has no such configuration.
        scaled: As the argument.

    Raises:
        ConfigError: The model has no such adapter, or the adapter has more than A and B.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        adapter: str = "default",
        scaled: bool = False,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self.scaled = scaled
        self._model = model
        self._adapter = adapter
        self._wire_dtype = wire_dtype
        self._specs = ()
        self._check()
        self._look()

    def _check(self) -> None:
        """Refuses an adapter that cannot be sent by itself, and reads its configuration."""
        model, adapter = self._model, self._adapter
        if not any(is_adapted(module) and adapter in getattr(module, "lora_A") for module in model.modules()):  # noqa: B009
            raise ConfigError(f"the model has no LoRA adapter {adapter!r}")
        why = why_not_by_itself(model, adapter)
        if why:
            raise ConfigError(
                f"the adapter {adapter!r} cannot be sent by itself: {why}",
                hint="send the merged weights: connect without adapter=",
            )
        known: Any = next((c for m in model.modules() if (c := getattr(m, "peft_config", None))), {})
        self.config: dict[str, Any] = _as_json(known[adapter].to_dict()) if adapter in known else {}
        if self.config.get("bias", "none") != "none":
            raise ConfigError(
                f"the adapter {adapter!r} cannot be sent by itself: it trains biases of the model "
                f"(bias={self.config['bias']!r})",
                hint="send the merged weights: connect without adapter=",
            )
        if self.scaled and self.config:
            self.config |= {
                "lora_alpha": self.config.get("r"),
                "use_rslora": False,
                "alpha_pattern": dict(self.config.get("rank_pattern") or {}),
            }

    def _look(self) -> None:
        """Works out everything that depends on how the model is made now."""
        model, adapter = self._model, self._adapter

        def name_of(module: nn.Module, prefix: str, attribute: str) -> str | None:
            matched = re.fullmatch(rf"(.*)(\.lora_[AB])\.{re.escape(adapter)}", prefix)
            return f"{_PEFT_PREFIX}{matched[1]}{inner.get(id(module), '')}{matched[2]}.{attribute}" if matched else None

        # PEFT wraps a module once for each of its parameters that it adapts.
        inner = {
            id(part[adapter]): ".base_layer" * depth
            for _, outermost in outermost_layers(model)
            for depth, layer in enumerate(levels(outermost))
            for part in (getattr(layer, "lora_A", {}), getattr(layer, "lora_B", {}))
            if adapter in part
        }
        planned = {spec.name: spec.dtype for spec in self._specs}
        tensors = PlacedTensors(model, name_of=name_of)
        specs = [
            TensorSpec(
                name=place.name,
                dtype=planned.get(place.name) or dtype_name(self._wire_dtype or place.dtype),
                shape=place.shape,
            )
            for place in tensors.places
        ]
        arranged = as_stored(tensors)
        if planned:
            specs, arranged = in_planned_order(self._specs, specs, arranged)
            tensors.device = self._tensors.device
        self._specs, self._arranged, self._tensors = tuple(specs), arranged, tensors
        self.device = tensors.device
        self._layers = _layers_of_b(model, adapter) if self.scaled else {}
        shared = SharedParts(tensors, arranged, specs, computed=lambda number: self._layer(number) is not None)
        self._gatherer = Gatherer(self._specs, self._local, shared, tensors.watch)
        self._structure = Structure(tensors.roots)

    def changed(self) -> bool:
        """Implements ``Exporter.changed``."""
        self._tensors.reshard()
        return not self._structure.holds() or self._tensors.changed()

    def look_again(self) -> None:
        """Implements ``Exporter.look_again``."""
        self._check()
        self._look()

    def _local(self, number: int) -> list[Held]:
        number = self._arranged[number].segments[0].source
        part = self._tensors.part(number)
        if part is None:
            return []
        layer = self._layer(number)
        return [InMemory(*part, number) if layer is None else _Scaled(*part, float(layer.scaling[self._adapter]))]

    def _layer(self, number: int) -> Any:
        """The layer whose scale a tensor is multiplied by; None for A, and for all tensors without ``scaled``."""
        return self._layers.get(id(self._tensors.places[number].module))


@dataclass(frozen=True, slots=True)
class _Scaled(Computed):
    """A part of B, which is multiplied on its way into a bucket."""

    box: Box
    origin: torch.Tensor
    scale: float

    def write(self, box: Box, out: torch.Tensor) -> None:
        out.copy_(self.origin[slices(box, self.box.offset)] * self.scale)


def adapters_of(model: nn.Module) -> tuple[str, ...]:
    """Names of a model's LoRA adapters."""
    found: dict[str, None] = {}
    for module in model.modules():
        if is_adapted(module):
            found.update(dict.fromkeys(getattr(module, "lora_A")))  # noqa: B009
    return tuple(found)


def _layers_of_b(model: nn.Module, adapter: str) -> dict[int, Any]:
    """The adapted layer of each B, by the ``id`` of B's module."""
    layers: list[Any] = [module for module in model.modules() if is_adapted(module)]
    return {id(layer.lora_B[adapter]): layer for layer in layers if adapter in layer.lora_B}


def _as_json(value: Any) -> Any:
    """PEFT's configuration as JSON: sets become sorted lists, enumerations their values."""
    if isinstance(value, Enum):
        return _as_json(value.value)
    if isinstance(value, Mapping):
        return {str(name): _as_json(item) for name, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
