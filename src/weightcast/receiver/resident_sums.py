"""Digest sums of the live weights, in terms of the source tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weightcast.digest.definition import RepeatedSums
from weightcast.digest.pieces import Piece
from weightcast.wire.held import HeldPart, HeldSums, HeldTable
from weightcast.wire.layout import TensorSpec, dtype_name
from weightcast.wire.routes import Route


class ResidentSums:
    """Reads live parameters back through the routes.  The launch on a GPU is worked out once."""

    def __init__(self) -> None:
        self._repeated = RepeatedSums()
        self._table: tuple[object, HeldTable] | None = None

    def held(
        self, routes: Sequence[Route], live: Mapping[str, torch.Tensor], expected: Mapping[str, TensorSpec]
    ) -> HeldSums:
        """Sums the live part of each route.  Waits for the device.

        Args:
            routes: All routes, at least one, the same in every call.
            live: Live parameters that they write, by name.
            expected: Whole source tensors, by name.
        """

        def pieces() -> list[Piece]:
            return [
                Piece(
                    tensor=_region(live[route.parameter], route),
                    full_shape=expected[route.source].shape,
                    box=route.box,
                )
                for route in routes
            ]

        # A parameter may get other memory at any time, and has two in turn where a second set is kept.
        where = tuple(tensor.data_ptr() for tensor in live.values())
        how = tuple((tensor.dtype, tensor.stride()) for tensor in live.values())
        sums = self._repeated.sums(where, how, next(iter(live.values())).device, pieces)
        if self._table is None or self._table[0] != how:  # while the device sums
            dtypes = {name: dtype_name(tensor.dtype) for name, tensor in live.items()}
            parts = [
                HeldPart(
                    spec=TensorSpec(
                        name=route.source, dtype=dtypes[route.parameter], shape=expected[route.source].shape
                    ),
                    box_offset=route.box_offset,
                    box_shape=route.box_shape,
                )
                for route in routes
            ]
            self._table = how, HeldTable(tuple(parts))
        return HeldSums(self._table[1], sums.cpu())


def _region(tensor: torch.Tensor, route: Route) -> torch.Tensor:
    region = route.region
    return tensor.detach().as_strided(region.shape, region.stride, tensor.storage_offset() + region.offset)
