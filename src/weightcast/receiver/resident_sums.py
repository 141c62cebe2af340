"""Digest sums of one set of weights, in terms of the source tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weightcast.digest.copy_program import CopyProgram, CopyStep, View
from weightcast.digest.transfers import worth_launch
from weightcast.wire.held import NOTHING_HELD, HeldPart, HeldSums, HeldTable
from weightcast.wire.layout import TensorSpec, dtype_name
from weightcast.wire.routes import Route

_MAX_FORMS = 4


class ResidentSums:
    """Reads parameters back through the routes.

    What depends on the forms of parameters alone is worked out once, before an update if ``prepare`` is called.  A form
    is an object that stands for the dtypes and shapes of all parameters (``StagingSet.form``).
    """

    def __init__(
        self,
        routes: Sequence[Route],
        expected: Mapping[str, TensorSpec],
        constants: Sequence[Route] = (),
        places: Sequence[Route] = (),
    ) -> None:
        """Takes the copies, and the places of constants that the loader puts over parts of sources.

        A constant is read back as if it had come: the sums agree with the source's if the source has it too.
        ``places`` are summed too, after all others, each as a tensor of its own; see ``ComputedGroup``.
        """
        self._routes = [*routes, *constants, *places]
        self._num_places = len(places)
        self._constants = ResidentSums(constants, expected) if constants else None
        self._expected = expected
        self._parameters = tuple(dict.fromkeys(route.parameter for route in self._routes))
        self._known: dict[object, tuple[CopyProgram, HeldTable]] = {}  # by form

    def prepare(self, form: object, device: torch.device, tensors: Mapping[str, torch.Tensor]) -> HeldTable:
        """Works out what ``held`` needs to know, without reading the parameters; returns the parts that it sums."""
        if not self._routes:
            return NOTHING_HELD.table
        if self._constants is not None:
            self._constants.prepare(form, device, tensors)
        program, table = self._program(form, device, tensors)
        program.prepare(self._of(tensors))
        return table

    def held(self, form: object, device: torch.device, tensors: Mapping[str, torch.Tensor]) -> HeldSums:
        """Sums the part of each route.  Waits for the device."""
        if not self._routes:
            return NOTHING_HELD
        program, table = self._program(form, device, tensors)
        return HeldSums(table, program.sums(self._of(tensors)).cpu())

    def completed(
        self, sums: torch.Tensor, form: object, device: torch.device, tensors: Mapping[str, torch.Tensor]
    ) -> HeldSums:
        """As ``held``, with the sums of all copies as they were made: int64 ``[copies]``; only constants are read."""
        if not self._routes:
            return NOTHING_HELD
        totals = sums
        if self._constants is not None:
            totals = torch.cat([totals, self._constants.held(form, device, tensors).totals])
        return HeldSums(self._program(form, device, tensors)[1], totals)

    def _program(
        self, form: object, device: torch.device, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[CopyProgram, HeldTable]:
        """The sums of all routes wherever the parameters lie, in this form, and the parts that they are of."""
        found = self._known.get(form)
        if found is None:
            memories = self._of(tensors)
            numbers = {name: number for number, name in enumerate(self._parameters)}
            steps: list[CopyStep] = []
            for total, route in enumerate(self._routes):
                number, region = numbers[route.parameter], route.region
                source = View(number, memories[number].dtype, region.shape, region.stride, region.offset)
                steps.append(CopyStep(source, None, self._shape(total), route.box, total))
            size_bytes = sum(step.source.dtype.itemsize * step.box.numel for step in steps if step.box is not None)
            program = CopyProgram(
                steps, memories, device, num_sums=len(steps), form=form, launches=worth_launch(size_bytes, device)
            )
            if len(self._known) >= _MAX_FORMS:
                self._known.clear()
            found = self._known[form] = program, self._table(tensors)
        return found

    def _of(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that are summed."""
        return list(map(tensors.__getitem__, self._parameters))

    def _table(self, tensors: Mapping[str, torch.Tensor]) -> HeldTable:
        names = {name: dtype_name(tensors[name].dtype) for name in self._parameters}
        return tuple(
            HeldPart(
                spec=TensorSpec(name=route.source, dtype=names[route.parameter], shape=self._shape(number)),
                box_offset=route.box_offset,
                box_shape=route.box_shape,
            )
            for number, route in enumerate(self._routes)
        )

    def _shape(self, number: int) -> tuple[int, ...]:
        """Shape of the tensor that a route's box is a part of."""
        route = self._routes[number]
        is_place = number >= len(self._routes) - self._num_places
        return route.box_shape if is_place else self._expected[route.source].shape


def region_of(tensor: torch.Tensor, route: Route) -> torch.Tensor:
    """The place of a route's box in a parameter, with the box's shape."""
    region = route.region
    return tensor.detach().as_strided(region.shape, region.stride, tensor.storage_offset() + region.offset)
