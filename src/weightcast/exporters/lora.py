"""LoRA: adapters merged into the weights on the way, or sent as what they are.

Reads the modules that PEFT makes without importing PEFT: a module that has ``base_layer``, ``lora_A`` and ``lora_B``.
The trainer's own weights are not changed, not even for a moment, so the next step trains what it trained before.
What cannot be merged by W + scale * B A is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weightcast.comm.local import TrainerGroup
from weightcast.errors import ConfigError
from weightcast.exporters.gather import Gatherer, Held, Stored, slices
from weightcast.exporters.names import is_adapted
from weightcast.exporters.placed import PlacedTensors
from weightcast.exporters.segments import Segment
from weightcast.protocols import Shard
from weightcast.wire.bucket import Bucket
from weightcast.wire.digest import Box
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec, dtype_name, plan_buckets

# Elements that are computed at once: 4 MiB of float32.
CHUNK_ELEMENTS = 1 << 20

_ADAPTER_PARTS = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"})
_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delta:
    """What is added to a weight: scale * B A.

    Attributes:
        a: Number of A among the adapters' tensors, (rank, inputs).
        b: Number of B, (outputs, rank).
        scale: Factor.
        turned: The weight is (inputs, outputs).
    """

    a: int
    b: int
    scale: float
    turned: bool


def name_of(module: nn.Module, prefix: str, attribute: str) -> str | None:
    """Names of a module's tensors without those of adapters, for ``PlacedTensors``."""
    if _adapter_part(prefix) is not None or attribute in _ADAPTER_PARTS or ".original_module." in f".{prefix}.":
        return None
    return f"{prefix}.{attribute}" if prefix else attribute


def _adapter_part(prefix: str) -> str | None:
    return next((part for part in prefix.split(".") if part in _ADAPTER_PARTS), None)


class Merger:
    """Adds adapters to the weights that they adapt, where the weights are, before these are sent.

    For each bucket the adapters that it needs are gathered to every rank first: they are small.

    Args:
        model: With adapters or without; ``bool(merger)`` says which.
        weights: Its weights, without the adapters.

    Raises:
        ConfigError: A module has an adapter that is not W + scale * B A.
    """

    def __init__(self, model: nn.Module, weights: PlacedTensors) -> None:
        self._weights = weights
        self._deltas: dict[int, list[_Delta]] = {}
        adapted = [
            (name, module, adapter, scale)
            for name, module in model.named_modules()
            if is_adapted(module)
            for adapter, scale in _active(name, module)
        ]
        if not adapted:
            return
        self._tensors = PlacedTensors(model, name_of=_adapter_name)
        numbers = {(id(place.module), place.attribute): n for n, place in enumerate(self._tensors.places)}
        bases = {(id(place.module), place.attribute): n for n, place in enumerate(weights.places)}
        for name, module, adapter, scale in adapted:
            base = bases.get((id(_innermost(module)), "weight"))
            if base is None:
                raise ConfigError(f"{name} adapts a weight that is tied to another: not to be merged on the way")
            a, b = (numbers[id(getattr(module, part)[adapter]), "weight"] for part in ("lora_A", "lora_B"))
            turned = bool(getattr(module, "fan_in_fan_out", False))
            self._check(base, a, b, turned)
            self._deltas.setdefault(base, []).append(_Delta(a=a, b=b, scale=scale, turned=turned))
        self._specs = tuple(
            TensorSpec(name=f"{n}:{place.name}"[:512], dtype=dtype_name(place.dtype), shape=place.shape)
            for n, place in enumerate(self._tensors.places)
        )
        self._gatherer = Gatherer(self._specs, self._local, self._tensors.look)
        self._whole: dict[int, torch.Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._deltas)

    def extra_bytes(self, sources: Sequence[int]) -> int:
        """Memory for the adapters of these weights, in bytes."""
        return sum(spec.size_bytes for spec in self._needed(sources))

    def prepare(self, group: TrainerGroup) -> None:
        """Find out which rank holds what of the adapters.  Collective."""
        if self:
            with self._tensors.looking():
                self._gatherer.prepare(group)

    def begin(self, layout: BucketLayout, sources: Sequence[int], group: TrainerGroup) -> None:
        """Gather the adapters of some weights to every rank.  Collective; ``end`` lets go of them.

        Args:
            layout: Of the bucket that is filled next; the steps are remembered under its index.
            sources: Numbers of the weights in it, the same on every rank.
            group: The trainer ranks.
        """
        needed = self._needed(sources)
        if not needed:
            return
        size_bytes = sum(spec.size_bytes + 64 for spec in needed)
        [adapters] = plan_buckets(needed, bucket_bytes=size_bytes, packing=Packing(alignment_bytes=16))
        adapters = BucketLayout(index=layout.index, slots=adapters.slots, size_bytes=adapters.size_bytes)
        bucket = Bucket(adapters, torch.empty(size_bytes, dtype=torch.uint8, device=group.device))
        with self._tensors.looking():
            self._gatherer.fill(bucket, adapters, group, tuple(range(group.world_size)))
        numbers = {spec.name: number for number, spec in enumerate(self._specs)}
        self._whole = {numbers[slot.spec.name]: view for slot, view in bucket.views()}

    def end(self) -> None:
        """Let go of what was gathered."""
        self._whole = {}

    def held(self, source: int, segment: Segment, box: Box, part: tuple[Box, torch.Tensor]) -> Held:
        """A part of a travelling tensor, with what is added to it if anything is.

        Args:
            source: Number of the weight.
            segment: How it travels.
            box: Where the part lies in the travelling tensor.
            part: What this rank holds of the weight.
        """
        if source not in self._deltas:
            view = segment.view(part[1][slices(segment.source_box(box), part[0].offset)])
            return Stored(box, view, source)
        return _Merged(box, segment, part, self._deltas[source], self)

    def delta(self, delta: _Delta, box: Box) -> torch.Tensor:
        """A box of scale * B A, float32."""
        a, b = self._whole[delta.a].float(), self._whole[delta.b].float()
        rows, columns = (slice(start, start + extent) for start, extent in zip(box.offset, box.shape, strict=True))
        if delta.turned:
            return (b[columns] @ a[:, rows]).t().mul_(delta.scale)
        return (b[rows] @ a[:, columns]).mul_(delta.scale)

    def _needed(self, sources: Sequence[int]) -> list[TensorSpec]:
        needed = sorted({n for source in sources for delta in self._deltas.get(source, ()) for n in (delta.a, delta.b)})
        return [self._specs[number] for number in needed]

    def _local(self, number: int) -> list[Held]:
        part = self._tensors.part(number)
        return [] if part is None else [Stored(*part, number)]

    def _check(self, base: int, a: int, b: int, turned: bool) -> None:
        weight = self._weights.places[base]
        (rank, inputs), (outputs, other) = self._tensors.places[a].shape, self._tensors.places[b].shape
        shape = (inputs, outputs) if turned else (outputs, inputs)
        if weight.shape != shape or rank != other:
            raise ConfigError(
                f"{weight.name} {list(weight.shape)} has an adapter for {list(shape)} of ranks {rank} and {other}"
            )


@dataclass(frozen=True, slots=True)
class _Merged:
    """A part of a weight with its adapters added."""

    box: Box
    segment: Segment
    part: tuple[Box, torch.Tensor]
    deltas: Sequence[_Delta]
    merger: Merger

    @property
    def memory(self) -> torch.Tensor | None:
        return None

    def write(self, box: Box, out: torch.Tensor) -> None:
        """Add and cast, some rows at a time."""
        for piece in rows_of(box, CHUNK_ELEMENTS):
            stored = self.segment.source_box(piece)
            merged = self.part[1][slices(stored, self.part[0].offset)]
            for delta in self.deltas:
                merged = merged + self.merger.delta(delta, stored).to(merged.dtype)
            out[slices(piece, box.offset)].copy_(self.segment.view(merged))


def rows_of(box: Box, max_elements: int, *, multiple: int = 1) -> Iterator[Box]:
    """Boxes of whole rows, of about so many elements, that make up a box of two dimensions or more.

    Args:
        box: What to cut along its dimension 0.
        max_elements: No box is larger, unless it has ``multiple`` rows.
        multiple: Boxes begin at multiples of this, but for the first.
    """
    row = max(1, torch.Size(box.shape[1:]).numel())
    step = max(max_elements // row // multiple, 1) * multiple
    start, end = box.offset[0], box.offset[0] + box.shape[0]
    while start < end:
        stop = min(start - start % multiple + step, end)
        yield Box(offset=(start, *box.offset[1:]), shape=(stop - start, *box.shape[1:]))
        start = stop


class AdapterExporter:
    """The adapters of a model by themselves, for engines that load them: names and tensors as PEFT saves them.

    Args:
        model: With PEFT's modules in it.
        adapter: Which of its adapters.

    Attributes:
        config: PEFT's configuration of the adapter, as its ``adapter_config.json`` has it; {} if the model has none.

    Raises:
        ConfigError: The model has no such adapter.
    """

    def __init__(self, model: nn.Module, *, adapter: str = "default") -> None:
        def name_of(module: nn.Module, prefix: str, attribute: str) -> str | None:
            matched = re.fullmatch(rf"(.*\.lora_[AB])\.{re.escape(adapter)}", prefix)
            return f"{_PEFT_PREFIX}{matched[1]}.{attribute}" if matched else None

        if not any(is_adapted(module) and adapter in getattr(module, "lora_A") for module in model.modules()):  # noqa: B009
            raise ConfigError(f"the model has no LoRA adapter {adapter!r}")
        self._tensors = PlacedTensors(model, name_of=name_of)
        self._specs = tuple(
            TensorSpec(name=place.name, dtype=dtype_name(place.dtype), shape=place.shape)
            for place in self._tensors.places
        )
        self._gatherer = Gatherer(self._specs, self._local, self._tensors.look)
        known: Any = next((c for m in model.modules() if (c := getattr(m, "peft_config", None))), {})
        self.config: dict[str, Any] = known[adapter].to_dict() if adapter in known else {}

    @property
    def device(self) -> torch.device:
        """Where the adapters live."""
        return self._tensors.device

    def specs(self) -> Sequence[TensorSpec]:
        """A and B of each adapted module."""
        return self._specs

    def shards(self) -> Iterator[Shard]:
        """What this rank holds.  No communication."""
        with self._tensors.looking():
            for number, spec in enumerate(self._specs):
                part = self._tensors.part(number)
                if part is not None:
                    yield Shard(spec=spec, box=part[0], tensor=part[1])

    def prepare(self, group: TrainerGroup) -> None:
        """Find out which rank holds what.  Collective.

        Raises:
            ConfigError: The ranks do not hold one and the same adapter.
        """
        with self._tensors.looking():
            self._gatherer.prepare(group)

    def fill(self, bucket: Bucket | None, layout: BucketLayout, group: TrainerGroup) -> torch.Tensor | None:
        """Write the layout's tensors, gathered, into the bucket of every receiver.  Collective.

        Raises:
            ConfigError: The layout is not of this adapter.
            TrainerRankFailed: Another rank failed.
        """
        with self._tensors.looking():
            return self._gatherer.fill(bucket, layout, group)

    def _local(self, number: int) -> list[Held]:
        part = self._tensors.part(number)
        return [] if part is None else [Stored(*part, number)]


def _adapter_name(module: nn.Module, prefix: str, attribute: str) -> str | None:
    return f"{prefix}.{attribute}" if _adapter_part(prefix) in {"lora_A", "lora_B"} else None


def _innermost(module: Any) -> nn.Module:
    """The module whose weight is adapted: adapters may be put on adapters."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


def _active(name: str, module: Any) -> Iterator[tuple[str, float]]:
    """The adapters that take part in the forward pass and are not in the weight already, with their scales.

    Raises:
        ConfigError: One of them is not W + scale * B A.
    """
    if getattr(module, "disable_adapters", False):
        return
    merged = set(getattr(module, "merged_adapters", ()))
    for adapter in getattr(module, "active_adapters", list(module.lora_A)):
        if adapter in merged:
            continue
        others = [
            part for part in ("lora_embedding_A", "lora_magnitude_vector") if adapter in getattr(module, part, ())
        ]
        if hasattr(module, "parameter_name"):
            others.append(f"an adapter of the parameter {module.parameter_name}")
        if getattr(module, "lora_variant", None) and adapter in module.lora_variant:
            others.append(type(module.lora_variant[adapter]).__name__)
        if adapter in module.lora_B and getattr(module.lora_B[adapter], "bias", None) is not None:
            others.append("a bias")
        if others:
            raise ConfigError(
                f"{name} has {', '.join(others)}, which is not W + scale * B A and cannot be merged on the way",
                hint="merge it into the trainer's weights, or send the adapter by itself",
            )
        if adapter in module.lora_A:
            yield adapter, float(module.scaling[adapter])
