"""The parts of each bucket that engines get from this trainer rank, looked at before anybody reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from weightcast.comm.trainer_group import TrainerGroup
from weightcast.exporters.held_parts import region
from weightcast.protocols import Exporter, Scattering
from weightcast.update.finite import FiniteCheck, check_parts_finite
from weightcast.wire.box import Box
from weightcast.wire.bucket import Bucket
from weightcast.wire.bucket_sources import Part
from weightcast.wire.layout import BucketLayout


@dataclass(frozen=True, slots=True)
class _Known:
    """Views of one bucket's parts in the buffer that it was filled into."""

    served: Sequence[tuple[int, Box]]
    address: int
    views: Sequence[tuple[str, torch.Tensor]]


class ServedParts:
    """The parts of one rank, in update after update.  They are described once, as long as they stay alike."""

    def __init__(self, exporter: Exporter, group: TrainerGroup, *, checks_finite: bool) -> None:
        """Looks at nothing yet; ``checks_finite`` is True if values must be finite."""
        self._exporter = exporter
        self._group = group
        self._checks_finite = checks_finite
        self._parts: dict[int, tuple[Sequence[tuple[int, Box]], tuple[Part, ...]]] = {}
        self._legs: dict[int, tuple[object, dict[str, tuple[Part, ...]]]] = {}
        self._known: dict[int, _Known] = {}
        self._wholes = FiniteCheck()

    def of(self, layout: BucketLayout) -> Sequence[tuple[int, Box]]:
        """Number of the slot and box of each part."""
        return cast(Scattering, self._exporter).serves(layout, self._group)

    def parts_of(self, layout: BucketLayout) -> tuple[Part, ...]:
        """The parts in the form of the wire."""
        served, known = self.of(layout), self._parts.get(layout.index)
        if known is None or known[0] is not served:
            known = self._parts[layout.index] = served, _as_parts(served)
        return known[1]

    def legs(self, layout: BucketLayout) -> Mapping[str, Sequence[tuple[int, Box]]]:
        """As ``of``, for the engine ranks that read memory on each host."""
        return cast(Scattering, self._exporter).serves_to(layout, self._group)

    def legs_of(self, layout: BucketLayout) -> dict[str, tuple[Part, ...]]:
        """The same in the form of the wire."""
        served, known = self.legs(layout), self._legs.get(layout.index)
        if known is None or known[0] is not served:
            known = self._legs[layout.index] = served, {host: _as_parts(own) for host, own in served.items()}
        return known[1]

    def prepare(self, layout: BucketLayout) -> None:
        """Works out what ``look`` needs before there is a buffer."""
        if self._checks_finite and self._group.world_size == 1:
            self._wholes.prepare(layout, ())

    def look(self, bucket: Bucket) -> tuple[Part, ...]:
        """The parts of a filled bucket; raises ``NotFinite`` if they must be finite and are not."""
        if self._checks_finite and self._group.world_size == 1:  # then the bucket is whole
            self._wholes.check(bucket)
        elif self._checks_finite:
            check_parts_finite(self._views(bucket))
        return self.parts_of(bucket.layout)

    def forget(self) -> None:
        """Lets go of the buffers."""
        self._known.clear()

    def _views(self, bucket: Bucket) -> Sequence[tuple[str, torch.Tensor]]:
        index, served, address = bucket.layout.index, self.of(bucket.layout), bucket.data.data_ptr()
        known = self._known.get(index)
        if known is None or known.served is not served or known.address != address or bucket.lent:
            slots = bucket.layout.slots
            views = [(slots[number].spec.name, region(bucket, slots[number], box)) for number, box in served]
            known = self._known[index] = _Known(served, address, views)
        return known.views


def _as_parts(served: Sequence[tuple[int, Box]]) -> tuple[Part, ...]:
    return tuple(Part(slot=number, offset=box.offset, shape=box.shape) for number, box in served)
