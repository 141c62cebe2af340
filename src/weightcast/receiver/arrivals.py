"""Counts the rows that have arrived in an update, and puts tensors together that come in several buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weightcast.errors import Refused
from weightcast.wire.layout import TensorSlot, TensorSpec


class Arrivals:
    """The rows of one update after the other.  Rows of a tensor come in order, each once."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}  # by tensor
        self._parts: dict[str, torch.Tensor] = {}
        self._abandoned = False
        # Cache for the table that was announced last, which is the same in every update.
        self._all_rows: tuple[Sequence[TensorSpec], dict[str, int]] | None = None

    def begin(self) -> None:
        """Starts an update, of which nothing has arrived."""
        self._rows.clear()
        self._parts.clear()
        self._abandoned = False

    @property
    def abandoned(self) -> bool:
        """True if the update was given up."""
        return self._abandoned

    def abandon(self) -> None:
        """Gives up this update: ``check`` refuses every other bucket of it."""
        self._abandoned = True

    def check(self, slot: TensorSlot) -> None:
        """Checks that these rows are the next ones of their tensor.

        Raises:
            Refused: They come out of order or twice, or the update was abandoned.
        """
        if self._abandoned:
            raise Refused("a bucket of this update was given up half way", hint="open another session")
        arrived = self._rows.get(slot.spec.name)
        if slot.first_row != (arrived or 0) or (slot.whole and arrived is not None):
            raise Refused(f"{slot.spec.name}: rows from {slot.first_row} arrived after {arrived or 0} rows")

    def take(self, slot: TensorSlot) -> None:
        """Counts a slot's rows; raises as ``check``."""
        self.check(slot)
        self._rows[slot.spec.name] = slot.first_row + slot.num_rows

    def take_all(self, rows: Mapping[str, int]) -> bool:
        """Counts all slots of a bucket in one step, for there may be thousands.

        Args:
            rows: Rows of each tensor; empty if some tensors are not whole.

        Returns:
            False if the slots must be counted one by one.
        """
        if not rows or self._abandoned or not self._rows.keys().isdisjoint(rows):
            return False
        self._rows.update(rows)
        return True

    def missing(self, specs: Sequence[TensorSpec]) -> list[str]:
        """Names of announced tensors that have not arrived, or not all of them."""
        if self._all_rows is None or self._all_rows[0] is not specs:
            self._all_rows = specs, {spec.name: spec.num_rows for spec in specs}
        wanted = self._all_rows[1]
        return [] if self._rows == wanted else [name for name in wanted if self._rows.get(name, -1) != wanted[name]]

    def whole(self, slot: TensorSlot, view: torch.Tensor) -> torch.Tensor | None:
        """Returns a copy of the slot's whole tensor once its last row is here, else None.

        Args:
            slot: The slot, which was counted.
            view: Its rows.
        """
        name = slot.spec.name
        if slot.whole:
            return view.clone()
        part = self._parts.setdefault(name, torch.empty(slot.spec.shape, dtype=view.dtype, device=view.device))
        part.narrow(0, slot.first_row, slot.num_rows).copy_(view)
        return self._parts.pop(name) if self._rows[name] >= slot.spec.num_rows else None
