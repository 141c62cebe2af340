"""Exports a model whose trainer keeps flat partitions of its parameters, in general no boxes of the tensors.

The trainer's framework gathers the parameters of one bucket at a time, on every rank, and the bucket is filled from
them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar

import torch
from torch import nn

from weightcast.errors import ConfigError
from weightcast.exporters.mapping import Family
from weightcast.exporters.module import NamedExporter
from weightcast.exporters.module_tensors import PlacedTensors
from weightcast.exporters.peft_layers import adapter_tensors
from weightcast.wire.box import Box


class GatheredTensors(PlacedTensors, ABC):
    """Tensors that are whole while they are gathered.  ``places`` has their whole shapes."""

    _imagined: Mapping[int, torch.Tensor] = {}

    def remember(self) -> None:
        """Notes nothing: tensors change their forms whenever they are gathered."""

    def changed(self) -> bool:
        """As in the base, for ties alone."""
        return not all(map(self.is_tied, self.ties))

    @abstractmethod
    def gathered(self, numbers: Sequence[int]) -> AbstractContextManager[object]:
        """A block in which these tensors are whole on every rank.  Collective."""

    @contextmanager
    def reading(self, numbers: Sequence[int]) -> Generator[None]:
        """A block in which these tensors are whole.  Collective."""
        with self.gathered(numbers), self.looking():
            yield

    @contextmanager
    def planning(self, numbers: Sequence[int]) -> Generator[None]:
        """A block in which these tensors are as large as if they were gathered, and have no values.

        Nothing is gathered.  Their memory is as much as that of the gathered tensors, and on the host it is never
        touched.
        """
        partitioned = [number for number in numbers if tuple(self.tensor(number).shape) != self.places[number].shape]
        places = {number: self.places[number] for number in partitioned}
        self._imagined = {
            number: torch.empty(place.shape, dtype=place.dtype, device=self.tensor(number).device)
            for number, place in places.items()
        }
        try:
            with self.looking():
                yield
        finally:
            self._imagined = {}

    def tensor(self, number: int) -> torch.Tensor:
        """The tensor as the module has it now, or as it is imagined."""
        found = self._imagined.get(number)
        return super().tensor(number) if found is None else found

    def imagines(self) -> bool:
        """True inside ``planning``."""
        return bool(self._imagined)

    def part(self, number: int) -> tuple[Box, torch.Tensor] | None:
        """The whole tensor, without memory unless it is gathered."""
        place, tensor = self.places[number], self.tensor(number)
        whole = Box(offset=(0,) * len(place.shape), shape=place.shape)
        if tuple(tensor.shape) == place.shape:
            return whole, tensor.detach()
        return whole, torch.empty(place.shape, dtype=place.dtype, device="meta")


class GatheredExporter(NamedExporter, ABC):
    """Base of the exporters of such models.

    Every rank gathers the parameters of a bucket while it is filled.  Ranks sum what they have gathered, so a rank that
    got other values is found; a partition that its owner lost is not.

    Args:
        model: The module, or DeepSpeed's engine around it.
        wire_dtype: The same as for ``ModuleExporter``.
        names: The same as for ``ModuleExporter``.
        family: The same as for ``ModuleExporter``.

    Raises:
        ConfigError: The model has adapters, or tensors that cannot be sent; nothing has moved.
    """

    framework: ClassVar[str]
    _names_stay: ClassVar[bool] = False
    _tensors: GatheredTensors

    def __init__(
        self,
        model: nn.Module,
        *,
        wire_dtype: torch.dtype | None = None,
        names: Callable[[str], str] | None = None,
        family: Family | str | None = None,
    ) -> None:
        if type(model).__name__ == "DeepSpeedEngine":
            model = model.module  # pyright: ignore[reportAssignmentType]
        if adapter_tensors(model):
            raise ConfigError(
                f"the model has adapters, and {self.framework} has partitioned them, so they cannot be merged on the "
                "way",
                hint="merge the adapters into a copy of the model, or train with FSDP2 or ZeRO stage 2",
            )
        super().__init__(model, lambda: self.tensors_of(model), wire_dtype=wire_dtype, names=names, family=family)

    @abstractmethod
    def tensors_of(self, model: nn.Module) -> GatheredTensors:
        """The tensors of a model, which the framework has partitioned."""

    def look_again(self) -> None:
        """Refuses a model that has changed: the framework's partitions are those of the model that it wrapped."""
        if self.changed():
            raise ConfigError(
                f"modules or ties of the model have changed since it was connected, and {self.framework} has "
                "partitioned what it was. Nothing has been sent, and the engines serve what they served",
                hint="undo the change before the update, or close this updater and connect again",
            )
