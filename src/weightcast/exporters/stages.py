"""Exports a model of which each trainer rank has a part: pipeline stages, or experts in modules of their own.

Within a stage, tensors may be sharded further.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from weightcast.errors import ConfigError
from weightcast.exporters import casting
from weightcast.exporters.local_shard import ShardOf
from weightcast.exporters.mapping import Family
from weightcast.exporters.module import WeightsExporter
from weightcast.exporters.module_tensors import PlacedTensors, Tie, check_tensor, places_of
from weightcast.exporters.quantise import Fp8Format
from weightcast.wire.box import Box


class StagesExporter(WeightsExporter):
    """The tensors of a whole model that no rank has alone.

    Args:
        stages: This rank's modules, whose tensors have the same names as in ``whole``.  A rank may have several
            (interleaved stages), or one without tensors.  A tied weight may be in two stages, under both of its names;
            both are then replicas of one tensor, and must be equal.
        whole: The model with all tensors, in the trainer's dtypes, usually made under ``torch.device("meta")``.  Its
            memory is never read.
        wire_dtype: The same as for ``ModuleExporter``.
        names: The same as for ``ModuleExporter``.
        family: The same as for ``ModuleExporter``.
        shard_of: The same as for ``ModuleExporter``; called with the names of ``whole``.
        quantise: The same as for ``ModuleExporter``.

    Raises:
        ConfigError: A stage has a tensor that ``whole`` has not, or in another shape or dtype; or a tensor cannot be
            sent as it is.  ``prepare`` raises it if the ranks together do not hold every tensor.
    """

    def __init__(
        self,
        stages: nn.Module | Sequence[nn.Module],
        *,
        whole: nn.Module,
        wire_dtype: torch.dtype | None = None,
        names: Callable[[str], str] | None = None,
        family: Family | str | None = None,
        shard_of: ShardOf | None = None,
        quantise: Fp8Format | None = None,
    ) -> None:
        casting.check_wire_dtype(wire_dtype)
        listed = [stages] if isinstance(stages, nn.Module) else list(stages)
        super().__init__(
            whole,
            lambda: _StageTensors(listed, whole, shard_of=shard_of),
            wire_dtype=wire_dtype,
            names=names,
            family=family,
            quantise=quantise,
        )


class _StageTensors(PlacedTensors):
    """The tensors of ``whole`` by number, with the memory of the stages that have them."""

    def __init__(self, stages: Sequence[nn.Module], whole: nn.Module, *, shard_of: ShardOf | None) -> None:
        self._shard_of = shard_of
        self._fsdp_modules = [part for stage in stages for part in stage.modules() if isinstance(part, FSDPModule)]
        self._parts: dict[int, tuple[Box, torch.Tensor] | None] = {}
        self.reshard()
        self.roots = [*stages, whole]
        self.places = []
        self.ties = []
        self._whole: list[torch.Tensor] = []
        self._held: set[int] = set()
        numbers: dict[int, int] = {}
        number_of: dict[str, int] = {}
        for place, tensor in places_of(whole):
            number = numbers.setdefault(id(tensor), len(numbers))
            number_of[place.name] = number
            if number == len(self.places):
                self.places.append(place)
                self._whole.append(tensor)
        if not self.places:
            raise ConfigError("the whole model has no parameters and no persistent buffers")
        for stage in stages:
            for place, tensor in places_of(stage, shard_of=shard_of):
                number = number_of.get(place.name)
                if number is None:
                    raise ConfigError(
                        f"{place.name} is not a tensor of the whole model, which has {self.places[0].name} and "
                        f"{len(self.places) - 1} more",
                        hint="give the stage's modules the names that they have in the whole model, and merge adapters "
                        "before",
                    )
                expected = self.places[number]
                if (place.shape, place.dtype) != (expected.shape, expected.dtype):
                    raise ConfigError(
                        f"{place.name} is {place.dtype} {list(place.shape)} in its stage and {expected.dtype} "
                        f"{list(expected.shape)} in the whole model"
                    )
                check_tensor(place.name, tensor)
                if number in self._held and self.tensor(number) is not tensor:
                    raise ConfigError(
                        f"this rank has {expected.name} twice, the second time as {place.name}, in different memory",
                        hint="the whole model has one weight there: tie the two, or untie them in the whole model",
                    )
                if number in self._held:
                    self.ties.append(Tie(number, place))
                self._held.add(number)
                self.places[number] = replace(place, name=expected.name)
        self._settle()
        self.remember()

    def holds(self, number: int) -> bool:
        return number in self._held

    def model_tensor(self, number: int) -> torch.Tensor:
        return self._whole[number]

    def part(self, number: int) -> tuple[Box, torch.Tensor] | None:
        return super().part(number) if number in self._held else None
