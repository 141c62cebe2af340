"""Digests of many named tensors at once: sums by number become digests by name, or one digest of the model.

What depends on names, dtypes and shapes alone is worked out once.  An update then costs a few vector operations.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from weightcast.digest.definition import finish_all, model_seed
from weightcast.wire.layout import TensorSpec

_KEPT_PARTS = 16


class DigestTable:
    """The names and keys of some tensors, in the order of their sums."""

    def __init__(self, names: Sequence[str], keys: torch.Tensor) -> None:
        """Takes the names of the tensors, each once, and ``key_of`` each tensor, int64 ``[tensors]``."""
        self.names = tuple(names)
        self.keys = keys
        order = sorted(range(len(self.names)), key=self.names.__getitem__)
        self._order = torch.tensor(order, dtype=torch.int64)
        self._sorted_keys = keys[self._order]
        self._seed = model_seed([self.names[number] for number in order])
        self._parts: list[_SubTable] = []

    def by_name(self, sums: torch.Tensor) -> dict[str, str]:
        """The digest of each tensor, from its sum: int64 ``[tensors]`` on the CPU."""
        digits = finish_all(sums, self.keys)
        return {name: digits[16 * number : 16 * number + 16] for number, name in enumerate(self.names)}

    def of_all(self, sums: torch.Tensor) -> str:
        """``model_digest`` of all digests; the argument is that of ``by_name``."""
        hashed = self._seed.copy()
        hashed.update(finish_all(sums[self._order], self._sorted_keys).encode())
        return hashed.hexdigest()

    def of_some(self, sums: torch.Tensor, specs: Sequence[TensorSpec], without: Collection[str]) -> str:
        """``model_digest`` of the digests of some tensors; empty if one of them is not in the table.

        ``without`` names those that are left out.  Where ``specs`` is the same object in each update, it costs nothing
        for each tensor.
        """
        left_out = frozenset(without)
        found = next((part for part in self._parts if part.specs is specs and part.without == left_out), None)
        if found is None:
            found = self._part(specs, left_out)
            self._parts = [found, *self._parts[: _KEPT_PARTS - 1]]
        if found.table is None:
            return ""
        return found.table.of_all(sums if found.numbers is None else sums[found.numbers])

    def _part(self, specs: Sequence[TensorSpec], left_out: frozenset[str]) -> _SubTable:
        numbers = {name: number for number, name in enumerate(self.names)}
        wanted = [spec.name for spec in specs if spec.name not in left_out]
        if numbers.keys() == set(wanted):
            return _SubTable(specs, left_out, None, self)
        if any(name not in numbers for name in wanted):
            return _SubTable(specs, left_out, None, None)
        chosen = torch.tensor([numbers[name] for name in wanted], dtype=torch.int64)
        return _SubTable(specs, left_out, chosen, DigestTable(wanted, self.keys[chosen]))


@dataclass(frozen=True, slots=True, eq=False)
class _SubTable:
    """Some tensors of a table: their numbers, None for all; and their own table, None if a name is unknown."""

    specs: Sequence[TensorSpec]
    without: frozenset[str]
    numbers: torch.Tensor | None
    table: DigestTable | None


class Absent:
    """Names of tensors that are in one list and not in another; costs nothing while both are the same objects."""

    def __init__(self) -> None:
        self._known: list[tuple[Sequence[TensorSpec], Sequence[TensorSpec], frozenset[str]]] = []

    def names(self, specs: Sequence[TensorSpec], present: Sequence[TensorSpec]) -> frozenset[str]:
        """Names of ``specs`` that no tensor of ``present`` has."""
        for one, other, names in self._known:
            if one is specs and other is present:
                return names
        names = frozenset({spec.name for spec in specs} - {spec.name for spec in present})
        self._known = [(specs, present, names), *self._known[: _KEPT_PARTS - 1]]
        return names


EMPTY = DigestTable((), torch.zeros(0, dtype=torch.int64))
