"""Exports a model that is sharded with FSDP1 (``FullyShardedDataParallel``).

FSDP1 keeps a flat run of each unit's elements on a rank.  A unit is a wrapped module with the parameters that no inner
unit has.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from weightcast.errors import ConfigError
from weightcast.exporters.gathered import GatheredExporter, GatheredTensors
from weightcast.exporters.module_tensors import Place


def is_sharded_by_fsdp1(model: nn.Module) -> bool:
    """True if a module of the model is wrapped with FSDP1."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


class Fsdp1Exporter(GatheredExporter):
    """The parameters and persistent buffers of a model under FSDP1, as a checkpoint has them, in full precision.

    Every rank gathers the units of a bucket's parameters while it is filled: the extra memory on every rank is that of
    these units.  The gather is torch's own (``summon_full_params``).  A unit in several buckets is gathered for each.

    Args:
        model: The wrapped module, with ``use_orig_params=True`` throughout.
        wire_dtype: The same as for ``ModuleExporter``.
        names: The same as for ``ModuleExporter``.
        family: The same as for ``ModuleExporter``.

    Raises:
        ConfigError: The model has adapters, is wrapped without ``use_orig_params``, or has tensors that cannot be sent;
            nothing has moved.
    """

    framework: ClassVar[str] = "FSDP1"

    def tensors_of(self, model: nn.Module) -> GatheredTensors:
        """Implements ``GatheredExporter.tensors_of``."""
        return _FlatTensors(model)


class _FlatTensors(GatheredTensors):
    """Tensors that FSDP1 shows whole while their unit is gathered, and as flat runs otherwise.  Collective."""

    def __init__(self, model: nn.Module) -> None:
        self._units: list[FullyShardedDataParallel] = []
        unit_of: dict[int, FullyShardedDataParallel | None] = {}
        self._find_units(model, None, unit_of)
        self._shapes: dict[tuple[int, str], tuple[int, ...]] = {}
        # The outermost first: FSDP1 takes the first unit that gathers for the root.
        for unit in self._units:
            inside = [module for module in model.modules() if unit_of[id(module)] is unit]
            with _whole(unit):
                for module in inside:
                    for name, tensor in module.named_parameters(recurse=False, remove_duplicate=False):
                        self._shapes[id(module), name] = tuple(tensor.shape)
        super().__init__(model, fsdp1=True)
        self._unit_of = [unit_of[id(place.module)] for place in self.places]

    def gathered_shape(self, place: Place, tensor: torch.Tensor) -> tuple[int, ...] | None:
        return self._shapes.get((id(place.module), place.attribute))

    def _find_units(
        self,
        module: nn.Module,
        unit: FullyShardedDataParallel | None,
        unit_of: dict[int, FullyShardedDataParallel | None],
    ) -> None:
        if isinstance(module, FullyShardedDataParallel):
            # The attribute of the class has no other name.
            if not module._use_orig_params:  # pyright: ignore[reportPrivateUsage]
                raise ConfigError(
                    "the model is sharded with FSDP1 without use_orig_params, which hides its parameters",
                    hint="wrap it with use_orig_params=True, or with torch's fully_shard (FSDP2)",
                )
            unit = module
            self._units.append(module)
        if id(module) in unit_of and unit_of[id(module)] is not unit:
            raise ConfigError(
                f"a {type(module).__name__} is in two units of FSDP1", hint="wrap both of its parents as one unit"
            )
        unit_of[id(module)] = unit
        for child in module.children():
            self._find_units(child, unit, unit_of)

    @contextmanager
    def gathered(self, numbers: Sequence[int]) -> Generator[None]:
        wanted = {id(self._unit_of[number]) for number in numbers}
        with ExitStack() as stack:
            for unit in self._units:  # in one order on every rank
                if id(unit) in wanted:
                    stack.enter_context(_whole(unit))
            yield


@contextmanager
def _whole(unit: FullyShardedDataParallel) -> Generator[None]:
    with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
        yield
