"""Counts the rows that have arrived in an update, and puts tensors together that come in several buckets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from weightcast.errors import Refused
from weightcast.wire.layout import BucketLayout, TensorSlot, TensorSpec


def rows_of(layout: BucketLayout, computed: Collection[str]) -> Mapping[str, int]:
    """Number of rows of each tensor by name, if every slot is a whole tensor that is not ``computed``; else empty."""
    rows = {slot.spec.name: slot.num_rows for slot in layout.slots if slot.whole}
    return {} if len(rows) != len(layout.slots) or any(name in computed for name in rows) else rows


class Arrivals:
    """The rows of one update after the other.  Rows of a tensor come in order, each once."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}  # by tensor; without the buckets in ``_followed``
        self._parts: dict[str, torch.Tensor] = {}
        # Rows of each bucket of the last complete update, in order, if all their tensors are whole; and its tensors.
        self._complete: list[Mapping[str, int]] = []
        self._specs: Sequence[TensorSpec] = ()
        # The buckets of this update, while they are those of ``_complete``; and all of them if they are whole.
        self._followed: list[Mapping[str, int]] = []
        self._whole: list[Mapping[str, int]] | None = []

    def begin(self) -> None:
        """Starts an update, of which nothing has arrived."""
        self._rows.clear()
        self._parts.clear()
        self._followed, self._whole = [], []

    def prepare(self, buckets: Sequence[Mapping[str, int]], specs: Sequence[TensorSpec]) -> None:
        """Looks, between updates, whether these rows of each bucket are all of these tensors, as ``missing`` would."""
        self.begin()
        if all(map(self.take_all, buckets)):
            self.missing(specs)
        self.begin()

    def take(self, slot: TensorSlot) -> None:
        """Counts a slot's rows; raises ``Refused`` unless they are the next ones of their tensor."""
        self._count_followed()
        arrived = self._rows.get(slot.spec.name)
        if slot.first_row != (arrived or 0) or (slot.whole and arrived is not None):
            raise Refused(f"{slot.spec.name}: rows from {slot.first_row} arrived after {arrived or 0} rows")
        self._whole = None
        self._rows[slot.spec.name] = slot.first_row + slot.num_rows

    def take_all(self, rows: Mapping[str, int]) -> bool:
        """Counts all slots of a bucket at once; False, as for empty ``rows``, if they must be counted one by one."""
        number = len(self._followed)
        if not self._rows and number < len(self._complete) and self._complete[number] is rows:
            self._followed.append(rows)  # as in the last complete update
            return True
        self._count_followed()
        if not rows or not self._rows.keys().isdisjoint(rows):
            return False
        self._rows.update(rows)
        if self._whole is not None:
            self._whole.append(rows)
        return True

    def missing(self, specs: Sequence[TensorSpec]) -> list[str]:
        """Names of announced tensors that have not arrived, or not all of them."""
        if self._followed and len(self._followed) == len(self._complete) and self._specs is specs:
            return []
        self._count_followed()
        wanted = {spec.name: spec.num_rows for spec in specs}
        if self._rows != wanted:
            return [name for name in wanted if self._rows.get(name, -1) != wanted[name]]
        if self._whole is not None:
            self._complete, self._specs = self._whole, specs
        return []

    def _count_followed(self) -> None:
        """Counts row by row from now on."""
        for rows in self._followed:
            self._rows.update(rows)
        if self._followed:
            self._whole = list(self._followed)
            self._followed = []

    def whole(self, slot: TensorSlot, view: torch.Tensor) -> torch.Tensor | None:
        """Returns a copy of a counted slot's whole tensor once its last row is here, else None."""
        name = slot.spec.name
        if slot.whole:
            return view.clone()
        part = self._parts.setdefault(name, torch.empty(slot.spec.shape, dtype=view.dtype, device=view.device))
        part.narrow(0, slot.first_row, slot.num_rows).copy_(view)
        return self._parts.pop(name) if slot.first_row + slot.num_rows >= slot.spec.num_rows else None
