"""Combines several exporters into one, such as a policy and its draft, so that one session updates all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.source_sums import Taker, join
from weightcast.errors import ConfigError
from weightcast.exporters.names import check_names
from weightcast.protocols import BucketUse, Exporter, PlannedBucket
from weightcast.wire.layout import BucketLayout, TensorSlot, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the combined exporters.

    Attributes:
        exporter: The exporter.
        prefix: Prefix of its names, for engines that expect one for a vision tower or a draft.
    """

    exporter: Exporter
    prefix: str = ""


class ComposedExporter(Exporter):
    """The tensors of several exporters, one after the other.

    Args:
        parts: Exporters by name (``"policy"``, ``"vision"``, ``"draft"``) in the order in which they are sent; the same
            on every rank.  Errors use the names.

    Attributes:
        parts: Every part by name.

    Raises:
        ConfigError: There are no parts, they are on different kinds of device, or two tensors have one name.
    """

    def __init__(self, parts: Mapping[str, Exporter | Part]) -> None:
        if not parts:
            raise ConfigError("a composed exporter needs at least one part")
        self.parts = {name: part if isinstance(part, Part) else Part(exporter=part) for name, part in parts.items()}
        kinds = {name: part.exporter.device.type for name, part in self.parts.items()}
        if len(set(kinds.values())) > 1:
            raise ConfigError(f"the parts are on different devices: {kinds}")
        self._specs: list[TensorSpec] = []
        self._inner: dict[str, tuple[str, TensorSpec]] = {}
        for name, part in self.parts.items():
            for spec in part.exporter.specs():
                outer = msgspec.structs.replace(spec, name=f"{part.prefix}{spec.name}")
                if outer.name in self._inner:
                    raise ConfigError(
                        f"{outer.name} is in {self._inner[outer.name][0]!r} and in {name!r}",
                        hint="give one of them a prefix: Part(exporter=..., prefix=...)",
                    )
                self._inner[outer.name] = name, spec
                self._specs.append(outer)
        check_names(spec.name for spec in self._specs)
        self._first = next(iter(self.parts.values())).exporter
        self.device, self.scores = self._first.device, self._first.scores
        self.casts = all(part.exporter.casts for part in self.parts.values())

    def specs(self) -> Sequence[TensorSpec]:
        """The parts' tensors, one part after the other."""
        return self._specs

    def prepare(self, group: TrainerGroup) -> None:
        """Prepares every part.  Collective.

        Raises:
            ConfigError: A part cannot be exported; the text begins with the part's name.
        """
        for name, part in self.parts.items():
            try:
                part.exporter.prepare(group)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}", hint=error.hint) from error

    def changed(self) -> bool:
        """Implements ``Exporter.changed``."""
        return any([part.exporter.changed() for part in self.parts.values()])

    def look_again(self) -> None:
        """Implements ``Exporter.look_again``; the text of an error begins with the part's name.

        A part may have looked again when the next one is refused.  All of them do so in the next update.
        """
        for name, part in self.parts.items():
            try:
                part.exporter.look_again()
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}", hint=error.hint) from error

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Implements ``Exporter.logprobs``: the first part's forward pass."""
        return self._first.logprobs(token_ids)

    def plan(self, layouts: Sequence[BucketLayout], group: TrainerGroup, use: BucketUse) -> Sequence[PlannedBucket]:
        """Implements ``Exporter.plan``: each part plans its tensors of the buckets.

        Raises:
            ConfigError: A layout has a tensor that no part has.
        """
        cuts = [self._cut(layout) for layout in layouts]
        planned: list[list[tuple[Part, list[int], PlannedBucket]]] = [[] for _ in layouts]
        for name, part in self.parts.items():
            having = [number for number, cut in enumerate(cuts) if name in cut]
            inner = part.exporter.plan([self._inner_layout(layouts[n], cuts[n][name]) for n in having], group, use)
            for number, bucket in zip(having, inner, strict=True):
                planned[number].append((part, cuts[number][name], bucket))
        return [_ComposedBucket(layout, group, some) for layout, some in zip(layouts, planned, strict=True)]

    def unsummed(self) -> Collection[str]:
        """Implements ``Exporter.unsummed``."""
        return [f"{part.prefix}{name}" for part in self.parts.values() for name in part.exporter.unsummed()]

    def _cut(self, layout: BucketLayout) -> dict[str, list[int]]:
        """Numbers of each part's slots of a bucket."""
        slots: dict[str, list[int]] = {}
        for number, slot in enumerate(layout.slots):
            found = self._inner.get(slot.spec.name)
            if found is None:
                raise ConfigError(f"bucket {layout.index} carries {slot.spec.name}, which no part has")
            slots.setdefault(found[0], []).append(number)
        return slots

    def _inner_layout(self, layout: BucketLayout, numbers: Sequence[int]) -> BucketLayout:
        """The layout of some slots alone, under their names in their part."""
        slots = (layout.slots[number] for number in numbers)
        renamed = tuple(_renamed(slot, self._inner[slot.spec.name][1].name) for slot in slots)
        return msgspec.structs.replace(layout, slots=renamed)


class _ComposedBucket(PlannedBucket):
    """A bucket with tensors of several exporters, of which each fills its own."""

    def __init__(
        self, layout: BucketLayout, group: TrainerGroup, cuts: Sequence[tuple[Part, Sequence[int], PlannedBucket]]
    ) -> None:
        """Takes each part, the numbers of its slots, and its bucket of these slots alone."""
        super().__init__(layout, group)
        parts = [(bucket.sum_places, numbers, part.prefix.__add__) for part, numbers, bucket in cuts]
        self.sum_places, places = join(group.rank, len(layout.slots), parts)
        self._cuts = [(bucket, mine) for (_, _, bucket), mine in zip(cuts, places, strict=True)]

    def prepare(self, data: torch.Tensor | None) -> None:
        """Implements ``PlannedBucket.prepare``."""
        for bucket, _ in self._cuts:
            bucket.prepare(data)

    def fill(self, data: torch.Tensor | None, taker: Taker | None = None) -> None:
        """Implements ``PlannedBucket.fill``."""
        for bucket, places in self._cuts:
            bucket.fill(data, taker.part(places) if taker is not None else None)


def _renamed(slot: TensorSlot, name: str) -> TensorSlot:
    """A slot whose tensor has another name."""
    return msgspec.structs.replace(slot, spec=msgspec.structs.replace(slot.spec, name=name))
