"""Merges PEFT's adapters that are no product of two matrices, by PEFT's own ``merge`` on a copy of one layer.

The copy belongs to the exporter, so the trainer's weights never change.  A layer needs to be whole in this process:
PEFT's ``merge`` does not know shards.  This module never imports PEFT; it recognises layers by their attributes.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weightcast.errors import ConfigError
from weightcast.exporters.module_tensors import PlacedTensors
from weightcast.exporters.names import is_adapter_layer
from weightcast.exporters.segments import Segment
from weightcast.wire.box import Box

# Packages below ``peft.tuners`` whose ``merge`` gives the weights of the forward pass; the tests compare every one.
MERGED = frozenset(
    {
        "adalora",
        "boft",
        "c3a",
        "deft",
        "delora",
        "fourierft",
        "glora",
        "gralora",
        "hra",
        "ia3",
        "ln_tuning",
        "loha",
        "lokr",
        "lora",
        "miss",
        "oft",
        "peanut",
        "psoft",
        "randlora",
        "road",
        "shira",
        "tinylora",
        "trainable_tokens",
        "unilora",
        "vblora",
        "vera",
        "waveft",
    }
)
_HINT = (
    "export a merged copy, copy.deepcopy(model).merge_and_unload(), or save it and pass CheckpointExporter(folder); "
    "weightcast merges LoRA itself"
)
_NO_MERGE = "no weights of the model itself have the effect of this kind: train a kind that has a merge, such as LoRA"


def outermost_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of each adapter layer that is not the base of another one."""
    layers = [(path, module) for path, module in model.named_modules() if is_adapter_layer(module)]
    bases = {id(getattr(module, "base_layer")) for _, module in layers}  # noqa: B009
    return [(path, module) for path, module in layers if id(module) not in bases]


def levels(layer: Any) -> list[Any]:
    """An adapter layer, and the adapter layers that it wraps, from the outside."""
    found = [layer]
    while is_adapter_layer(found[-1].base_layer):
        found.append(found[-1].base_layer)
    return found


def base_of(module: Any) -> nn.Module:
    """The adapted module itself; adapters may wrap adapters."""
    while is_adapter_layer(module):
        module = module.base_layer
    return module


def active_adapters(layer: Any) -> list[str]:
    """Adapters of a layer that the forward pass adds, without those that are merged already."""
    if getattr(layer, "disable_adapters", False):
        return []
    merged = set(getattr(layer, "merged_adapters", ()))
    every = list(getattr(layer, "lora_A", ()))
    return [adapter for adapter in getattr(layer, "active_adapters", every) if adapter not in merged]


def unused_copies(model: nn.Module) -> set[int]:
    """``id`` of each module in a copy of a module that the forward pass does not use.

    PEFT keeps a module that is trained whole (``modules_to_save``) beside the original, one for each adapter.
    """
    found: set[int] = set()
    for module in model.modules():
        inside = module.__dict__["_modules"]  # ``getattr`` takes long where a module has no such attribute
        copies, original = inside.get("modules_to_save"), inside.get("original_module")
        if not isinstance(copies, nn.ModuleDict) or not isinstance(original, nn.Module):
            continue
        used = next((copies[adapter] for adapter in active_adapters(module) if adapter in copies), original)
        every = [original, *copies.values()]
        kept = set(map(id, used.modules()))
        found |= {id(part) for copy in every for part in copy.modules()} - kept
    return found


class Switches:
    """Which adapters of each layer are active, merged or switched off, at one moment."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = list(filter(_is_switched, model.modules()))
        self._states = self._now()

    def changed(self) -> bool:
        """True if that is not so any more."""
        return self._now() != self._states

    def _now(self) -> list[tuple[Any, ...]]:
        return list(map(_state_of, self._layers))


def _is_switched(module: nn.Module) -> bool:
    return hasattr(type(module), "merged_adapters") or "base_layer" in module.__dict__["_modules"]


def _state_of(layer: Any) -> tuple[Any, ...]:
    merged = tuple(getattr(layer, "merged_adapters", ()))
    return tuple(active_adapters(layer)), merged, getattr(layer, "disable_adapters", False)


def adapter_tensors(model: nn.Module) -> set[int]:
    """``id`` of each tensor that belongs to an adapter and not to the model."""
    found: set[int] = set()
    for _, module in outermost_layers(model):
        own = {id(tensor) for tensor in _tensors(base_of(module))}
        found |= {id(tensor) for tensor in _tensors(module)} - own
    return found


def why_no_product(layer: Any) -> list[str]:
    """The parts that a layer's active adapters have besides W + scale * B A; empty if they are products."""
    found: list[str] = []
    if not all(hasattr(layer, part) for part in ("lora_A", "lora_B", "scaling")) or hasattr(layer, "lora_E"):
        return [_kind(layer)]
    if hasattr(layer, "parameter_name"):
        found.append(f"an adapter of the parameter {layer.parameter_name}")
    for adapter in active_adapters(layer):
        found += [part for part in ("lora_embedding_A", "lora_magnitude_vector") if adapter in getattr(layer, part, ())]
        if adapter in (getattr(layer, "lora_variant", None) or ()):
            found.append(type(layer.lora_variant[adapter]).__name__)
        if adapter in layer.lora_B and getattr(layer.lora_B[adapter], "bias", None) is not None:
            found.append("a bias")
        if adapter in layer.lora_A and layer.lora_A[adapter].weight.dim() != 2:
            found.append("a convolution")
    return found


def why_not_by_itself(model: nn.Module, adapter: str) -> str:
    """The part of an adapter that is neither A nor B, in words; empty if it has no other parts."""
    for path, module in model.named_modules():
        layer: Any = module
        for part in ("lora_embedding_A", "lora_magnitude_vector", "modules_to_save", "trainable_tokens_delta"):
            holder = getattr(layer, part, None)
            if isinstance(holder, nn.ModuleDict | nn.ParameterDict) and adapter in holder:
                return f"{path} has {part}"
        if adapter in (getattr(layer, "lora_variant", None) or ()):
            return f"{path} has the variant {type(layer.lora_variant[adapter]).__name__}"
        for part in ("lora_A", "lora_B"):
            holder = getattr(layer, part, None)
            if (
                isinstance(holder, nn.ModuleDict)
                and adapter in holder
                and getattr(holder[adapter], "bias", None) is not None
            ):
                return f"{path}.{part} has a bias"
    return ""


def check_adapters(model: nn.Module) -> None:
    """Refuses PEFT adapters that have no merged weights, because a checkpoint has no place for their tensors.

    Raises:
        ConfigError: The model has such an adapter; the text names the module, its class and the adapter's tensors.
    """
    for path, module in model.named_modules():
        parts: Any = getattr(module, "adapter_layer_names", None)
        if hasattr(module, "peft_config") and isinstance(getattr(module, "prompt_encoder", None), nn.Module):
            raise _refused(path, module, "prompt_encoder", hint=_NO_MERGE)
        if isinstance(parts, tuple) and is_adapter_layer(module) and _kind(module) not in MERGED:
            raise _refused(path, module, ", ".join(parts))
        if hasattr(type(module), "merged_adapters"):
            _check_merged(path, module)
        variants: Any = getattr(module, "lora_variant", None) or {}
        for adapter in active_adapters(module):
            variant = type(variants[adapter]).__name__ if adapter in variants else "Dora"
            if not variant.startswith("Dora"):
                raise _refused(path, module, variant)
    # Some kinds have no adapter layers: they wrap other modules, or sum LoRA's layers anew for each input.
    kinds = {
        _tuner_of(type(config))
        for module in model.modules()
        if isinstance(found := getattr(module, "peft_config", None), dict)
        for config in cast(dict[str, object], found).values()
    }
    for kind in sorted(kinds - MERGED - {""}):
        own = ((path, module) for path, module in model.named_modules() if _tuner_of(type(module)) == kind)
        path, module = next((found for found in own if not hasattr(found[1], "peft_config")), ("", model))
        raise _refused(path, module, kind, hint=_NO_MERGE)


def _check_merged(path: str, layer: Any) -> None:
    """Refuses a layer whose weight has adapters in it that its forward pass leaves out, or not all that it adds."""
    merged = list(map(str, layer.merged_adapters))
    if not merged:
        return
    others = [
        adapter
        for adapter in active_adapters(layer)
        if any(adapter in getattr(layer, part, ()) for part in getattr(layer, "adapter_layer_names", ()))
    ]
    if layer.disable_adapters or others:
        what = "its adapters are switched off" if layer.disable_adapters else f"{', '.join(others)} is active as well"
        raise ConfigError(
            f"{path or 'the model'} has the adapter {', '.join(merged)} merged into its weight, and {what}, so it is "
            "not clear which weight is meant. Nothing has been sent, and the engines serve what they served",
            hint="call unmerge_adapter() before the update, or merge every active adapter",
        )


@dataclass(frozen=True, slots=True)
class _Made:
    """A layer that is merged by PEFT.  ``sources``: number of each tensor of its base, by path in the base."""

    path: str
    layer: nn.Module
    sources: dict[str, int]


class LayerMerges:
    """Merged values of the weights that PEFT has to compute, for one bucket at a time.

    Extra memory: a copy of each such layer whose weights are in the bucket, and what PEFT's ``merge`` needs for it.
    Adapters of replicas are not compared with each other.

    Raises:
        ConfigError: An adapter cannot be merged; the text names the module and says why.
    """

    def __init__(self, model: nn.Module, weights: PlacedTensors) -> None:
        self._made: dict[int, _Made] = {}
        self._values: dict[int, torch.Tensor] = {}
        numbers = {(id(place.module), place.attribute): number for number, place in enumerate(weights.places)}
        tried: set[tuple[Any, ...]] = set()
        for path, layer in outermost_layers(model):
            wrapped = levels(layer)
            active = [level for level in wrapped if active_adapters(level)]
            reasons = [reason for level in active for reason in why_no_product(level)]
            if not reasons:
                continue
            if len(wrapped) > 1 and not all(hasattr(level, "parameter_name") for level in wrapped):
                raise _refused(path, layer, "several adapters around one module")
            sharded = next((tensor for tensor in _tensors(layer) if isinstance(tensor, DTensor)), None)
            if sharded is not None:
                raise _refused(path, layer, f"{', '.join(reasons)} on sharded weights")
            base = base_of(layer)
            made = _Made(path, layer, _numbers(path, layer, base, numbers, weights))
            _check_untied(model, made, base)
            key = (type(layer), *reasons)
            if key not in tried:  # one layer of each kind shows whether PEFT can merge it
                tried.add(key)
                self._merge(made)
            self._made.update(dict.fromkeys(made.sources.values(), made))

    def __contains__(self, source: int) -> bool:
        """True if the values of this weight are made by PEFT."""
        return source in self._made

    def __bool__(self) -> bool:
        return bool(self._made)

    def begin(self, sources: Sequence[int]) -> None:
        """Merges the layers of these weights; ``end`` frees them.  Raises ``ConfigError`` if PEFT cannot any more."""
        for made in {id(made): made for source in sources if (made := self._made.get(source))}.values():
            self._values |= self._merge(made)

    def end(self) -> None:
        """Frees the merged values."""
        self._values = {}

    def write(self, source: int, segment: Segment, box: Box, out: torch.Tensor) -> None:
        """Writes a box of a travelling tensor, cast to the dtype of ``out``."""
        value = self._values[source]
        out.copy_(segment.view(value, (0,) * value.dim(), box))

    def _merge(self, made: _Made) -> dict[int, torch.Tensor]:
        try:
            with torch.no_grad():
                layer: Any = copy.deepcopy(made.layer)
                for level in levels(layer):
                    level.merge()
                base = base_of(layer)
        except Exception as error:  # PEFT and its kinds of adapters raise anything
            raise _refused(made.path, made.layer, f"{type(error).__name__}: {error}") from error
        values = {path: tensor.detach() for path, tensor in _named(base)}
        before = {(path, tensor.shape) for path, tensor in _named(base_of(made.layer)) if path in made.sources}
        if other := {path for path, _ in {(path, tensor.shape) for path, tensor in values.items()} ^ before}:
            raise _refused(made.path, made.layer, f"other tensors than before: {', '.join(sorted(other))}")
        return {number: values[path] for path, number in made.sources.items()}


def _numbers(
    path: str, layer: nn.Module, base: nn.Module, numbers: dict[tuple[int, str], int], weights: PlacedTensors
) -> dict[str, int]:
    found: dict[str, int] = {}
    for prefix, module in base.named_modules():
        for attribute in _attributes(module):
            number = numbers.get((id(module), attribute))
            if number is None:
                raise _refused(path, layer, f"a tied {attribute}")
            tensor = weights.tensor(number)
            if weights.places[number].shape != tuple(tensor.shape):
                raise _refused(path, layer, "sharded weights")
            found[f"{prefix}.{attribute}" if prefix else attribute] = number
    return found


def _check_untied(model: nn.Module, made: _Made, base: nn.Module) -> None:
    """Refuses a layer whose weight is used elsewhere too, without the adapter."""
    own = {id(tensor) for tensor in base.parameters()}
    inside = {id(module) for module in base.modules()}
    for other, module in model.named_modules():
        if id(module) not in inside and any(id(tensor) in own for tensor in module.parameters(recurse=False)):
            raise _refused(made.path, made.layer, f"a weight that is tied to {other}")


def _refused(path: str, layer: nn.Module, why: str, *, hint: str = _HINT) -> ConfigError:
    return ConfigError(
        f"{path or 'the model'} has an adapter that cannot be merged on the way: PEFT's {type(layer).__name__} with "
        f"{why}. Engines have no name for these tensors, and the weight without them is not what was trained. Nothing "
        "has been sent",
        hint=hint,
    )


def _kind(layer: object) -> str:
    """Name of the package below ``peft.tuners`` that a layer's class comes from."""
    return _tuner_of(type(layer)) or type(layer).__module__


def _tuner_of(kind: type) -> str:
    """The package below ``peft.tuners`` that has a class or the first of its bases; empty for other classes."""
    for base in kind.__mro__:
        parts = base.__module__.split(".")
        if parts[:2] == ["peft", "tuners"] and len(parts) > 3:
            return parts[2]
    return ""


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _attributes(module: nn.Module) -> Collection[str]:
    """Names of a module's own parameters and persistent buffers."""
    hidden: set[str] = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
    names = [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
    return names + [name for name, _ in module.named_buffers(recurse=False) if name not in hidden]


def _named(base: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in base.named_modules():
        for attribute in _attributes(module):
            yield (f"{prefix}.{attribute}" if prefix else attribute), getattr(module, attribute)
