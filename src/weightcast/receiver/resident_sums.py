"""Digest sums of one set of weights, in terms of the source tensors."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from weightcast.digest.definition import partial_sums
from weightcast.digest.pieces import TensorPiece, Transfer, check_piece
from weightcast.digest.templates import NOWHERE, Placed, StandIns, Template
from weightcast.digest.transfers import PlacedLaunches, can_transfer, worth_launch
from weightcast.runtime.tensor_places import TensorPlaces
from weightcast.wire.held import NOTHING_HELD, HeldPart, HeldSums, HeldTable
from weightcast.wire.layout import TensorSpec, dtype_name
from weightcast.wire.routes import Route

_MAX_PLACES = 8
_dtype_of = attrgetter("dtype")


@dataclass(frozen=True, slots=True, eq=False)
class _SumLaunches:
    """The sums of all routes wherever the parameters lie, in this form."""

    form: TensorPlaces
    template: Template
    launches: PlacedLaunches


class ResidentSums:
    """Reads parameters back through the routes.

    What does not depend on addresses is worked out once, before an update if ``prepare`` is called; and the launch for
    each place of the parameters is kept.
    """

    def __init__(
        self, routes: Sequence[Route], expected: Mapping[str, TensorSpec], constants: Sequence[Route] = ()
    ) -> None:
        """Takes the copies, and the places of constants that the loader puts over parts of sources.

        A constant is read back as if it had come: the sums agree with the source's if the source has it too.
        """
        self._routes = [*routes, *constants]
        self._constants = ResidentSums(constants, expected) if constants else None
        self._expected = expected
        self._tables: dict[Hashable, tuple[dict[str, torch.dtype], HeldTable]] = {}  # by place
        self._parameters = tuple(dict.fromkeys(route.parameter for route in self._routes))
        self._prepared: _SumLaunches | None = None

    def prepare(self, place: Hashable, device: torch.device, tensors: Mapping[str, torch.Tensor]) -> HeldTable:
        """Works out what ``held`` needs to know, without reading the parameters; returns the parts that it sums."""
        if not self._routes:
            return NOTHING_HELD.table
        if self._constants is not None:
            self._constants.prepare(place, device, tensors)
        self._prepare(tensors, device)
        return self.table(place, tensors)

    def place(self, place: Hashable, device: torch.device, tensors: Mapping[str, torch.Tensor]) -> None:
        """As ``prepare``, and works out the launch for one place too."""
        self.prepare(place, device, tensors)
        if self._prepared is not None and self._prepare(tensors, device) is self._prepared:
            prepared = self._prepared
            prepared.launches.prepare(place, lambda: self._placed(prepared, tensors))

    def held(self, place: Hashable, device: torch.device, tensors: Mapping[str, torch.Tensor]) -> HeldSums:
        """Sums the part of each route.  Waits for the device; ``place`` is a key for the memory and the dtypes read."""
        if not self._routes:
            return NOTHING_HELD
        prepared = self._prepared
        if prepared is not None and place in prepared.launches:
            sums = prepared.launches.run(place, lambda: self._placed(prepared, tensors))
            return HeldSums(self.table(place, tensors), sums.cpu())
        self._tabulate(place, tensors)
        prepared = self._prepare(tensors, device)
        if prepared is None:
            sums = partial_sums(self._pieces(tensors))
        else:
            sums = prepared.launches.run(place, lambda: self._placed(prepared, tensors))
        return HeldSums(self.table(place, tensors), sums.cpu())

    def _placed(self, prepared: _SumLaunches, tensors: Mapping[str, torch.Tensor]) -> Placed:
        return Placed(prepared.template, list(map(torch.Tensor.data_ptr, self._of(tensors))))

    def completed(
        self, sums: torch.Tensor, place: Hashable, device: torch.device, tensors: Mapping[str, torch.Tensor]
    ) -> HeldSums:
        """As ``held``, with the sums of all copies as they were made: int64 ``[copies]``; only constants are read."""
        totals = sums.cpu()
        if self._constants is not None:
            totals = torch.cat([totals, self._constants.held(place, device, tensors).totals])
        return HeldSums(self.table(place, tensors), totals)

    def table(self, place: Hashable, tensors: Mapping[str, torch.Tensor]) -> HeldTable:
        """The parts that ``held`` sums; the arguments are the same."""
        if place not in self._tables:
            self._tabulate(place, tensors)
        return self._tables[place][1]

    def _pieces(self, found: Mapping[str, torch.Tensor]) -> list[TensorPiece]:
        """The part of each route in some parameters."""
        return [
            TensorPiece(
                tensor=region_of(found[route.parameter], route),
                full_shape=self._expected[route.source].shape,
                box=route.box,
            )
            for route in self._routes
        ]

    def _prepare(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> _SumLaunches | None:
        """The launches for these parameters wherever they lie; None if they cannot be summed by a launch."""
        found = self._of(tensors)
        if self._prepared is not None and self._prepared.form.fits(found):
            return self._prepared
        if any(one.device != device for one in found):
            return None
        pieces = self._pieces(dict(zip(self._parameters, map(StandIns().of, found), strict=True)))
        transfers = [Transfer(piece=piece, total=number) for number, piece in enumerate(pieces)]
        size_bytes = sum(piece.tensor.nbytes for piece in pieces)
        if not worth_launch(size_bytes, device) or not all(map(can_transfer, transfers)):
            return None
        for number, piece in enumerate(pieces):
            check_piece(piece, number)
        numbers = {name: number for number, name in enumerate(self._parameters)}
        memories = [(numbers[route.parameter], NOWHERE) for route in self._routes]
        launches = PlacedLaunches(device, len(pieces))
        self._prepared = _SumLaunches(TensorPlaces(found), Template(transfers, memories, device), launches)
        return self._prepared

    def _of(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that are summed."""
        return list(map(tensors.__getitem__, self._parameters))

    def _tabulate(self, place: Hashable, tensors: Mapping[str, torch.Tensor]) -> None:
        dtypes = dict(zip(self._parameters, map(_dtype_of, self._of(tensors)), strict=True))
        alike = next((known for known in self._tables.values() if known[0] == dtypes), None)
        if len(self._tables) >= _MAX_PLACES:
            self._tables.clear()
        self._tables[place] = alike or (dtypes, self._made(dtypes))

    def _made(self, dtypes: Mapping[str, torch.dtype]) -> HeldTable:
        names = {name: dtype_name(dtype) for name, dtype in dtypes.items()}
        return HeldTable(
            tuple(
                HeldPart(
                    spec=TensorSpec(
                        name=route.source, dtype=names[route.parameter], shape=self._expected[route.source].shape
                    ),
                    box_offset=route.box_offset,
                    box_shape=route.box_shape,
                )
                for route in self._routes
            )
        )


def region_of(tensor: torch.Tensor, route: Route) -> torch.Tensor:
    """The place of a route's box in a parameter, with the box's shape."""
    region = route.region
    return tensor.detach().as_strided(region.shape, region.stride, tensor.storage_offset() + region.offset)
