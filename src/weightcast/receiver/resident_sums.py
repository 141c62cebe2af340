"""Digest sums of one set of weights, in terms of the source tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch

from weightcast.digest.pieces import Piece
from weightcast.digest.transfers import RepeatedSums
from weightcast.wire.held import NOTHING_HELD, HeldPart, HeldSums, HeldTable
from weightcast.wire.layout import TensorSpec, dtype_name
from weightcast.wire.routes import Route

_MAX_PLACES = 8


class ResidentSums:
    """Reads parameters back through the routes.  The launch on a GPU is worked out once."""

    def __init__(
        self, routes: Sequence[Route], expected: Mapping[str, TensorSpec], constants: Sequence[Route] = ()
    ) -> None:
        """Takes the copies, and the places of constants that the loader puts over parts of sources.

        A constant is read back as if it had come: the sums agree with the source's if the source has it too.
        """
        self._routes = [*routes, *constants]
        self._constants = ResidentSums(constants, expected) if constants else None
        self._expected = expected
        self._repeated = RepeatedSums()
        self._tables: dict[Hashable, tuple[dict[str, torch.dtype], HeldTable]] = {}  # by place

    def held(self, place: Hashable, device: torch.device, tensor: Callable[[str], torch.Tensor]) -> HeldSums:
        """Sums the part of each route.  Waits for the device.

        ``place`` is a key for the memory and the dtypes of the parameters: one key stands for one memory at a time.
        """

        def pieces() -> list[Piece]:
            found = {route.parameter: tensor(route.parameter) for route in self._routes}
            self._tabulate(place, {name: one.dtype for name, one in found.items()})
            return [
                Piece(
                    tensor=region_of(found[route.parameter], route),
                    full_shape=self._expected[route.source].shape,
                    box=route.box,
                )
                for route in self._routes
            ]

        if not self._routes:
            return NOTHING_HELD
        sums = self._repeated.sums(place, None, device, pieces)
        return HeldSums(self.table(place, tensor), sums.cpu())

    def completed(
        self, sums: torch.Tensor, place: Hashable, device: torch.device, tensor: Callable[[str], torch.Tensor]
    ) -> HeldSums:
        """As ``held``, with the sums of all copies as they were made; only constants are read.  Waits for the device.

        Args:
            sums: int64 ``[copies]`` on any device.
        """
        totals = sums.cpu()
        if self._constants is not None:
            totals = torch.cat([totals, self._constants.held(place, device, tensor).totals])
        return HeldSums(self.table(place, tensor), totals)

    def table(self, place: Hashable, tensor: Callable[[str], torch.Tensor]) -> HeldTable:
        """The parts that ``held`` sums; the arguments are the same."""
        if place not in self._tables:
            self._tabulate(place, {route.parameter: tensor(route.parameter).dtype for route in self._routes})
        return self._tables[place][1]

    def _tabulate(self, place: Hashable, dtypes: dict[str, torch.dtype]) -> None:
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
