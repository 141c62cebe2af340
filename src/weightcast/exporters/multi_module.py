"""Combines several exporters into one, such as a policy and its draft, so that one session updates all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import msgspec
import torch

from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.source_sums import Folded, Mismatch, SourceSums
from weightcast.errors import ConfigError
from weightcast.exporters.names import check_names
from weightcast.protocols import BucketUse, Casting, Exporter, Planning, Replanning, Summing
from weightcast.wire.bucket import Bucket
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


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """One part's slots of a bucket: their numbers, int64 ``[slots]``, and a layout of these slots alone."""

    part: Part
    numbers: torch.Tensor
    layout: BucketLayout


class ComposedExporter:
    """The tensors of several exporters, one after the other.

    Args:
        parts: Exporters by name (``"policy"``, ``"vision"``, ``"draft"``) in the order in which they are sent; the same
            on every rank.  Errors use the names.

    Attributes:
        parts: Every part by name.
        logprobs: The first part's forward pass, for proof at level ``behaviour``; present only if that part has one.

    Raises:
        ConfigError: There are no parts, they are on different kinds of device, or two tensors have one name.
    """

    logprobs: Callable[[Sequence[int]], list[float]]

    def __init__(self, parts: Mapping[str, Exporter | Part]) -> None:
        if not parts:
            raise ConfigError("a composed exporter needs at least one part")
        self.parts = {name: part if isinstance(part, Part) else Part(exporter=part) for name, part in parts.items()}
        kinds = {name: part.exporter.device.type for name, part in self.parts.items()}
        if len(set(kinds.values())) > 1:
            raise ConfigError(f"the parts are on different devices: {kinds}")
        self._specs: list[TensorSpec] = []
        self._cuts: dict[int, tuple[BucketLayout, list[_Cut]]] = {}
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
        first = next(iter(self.parts.values())).exporter
        if hasattr(first, "logprobs"):
            self.logprobs = getattr(first, "logprobs")  # noqa: B009  # a Scorer, which an Exporter need not be

    @property
    def device(self) -> torch.device:
        return next(iter(self.parts.values())).exporter.device

    @property
    def casts(self) -> bool:
        return all(isinstance(part.exporter, Casting) and part.exporter.casts for part in self.parts.values())

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
        """Implements ``Replanning.changed`` for the parts that do."""
        parts = [part.exporter for part in self.parts.values()]
        return any([part.changed() for part in parts if isinstance(part, Replanning)])

    def look_again(self) -> None:
        """Implements ``Replanning.look_again`` for the parts that do; the text of an error begins with the part's name.

        A part may have looked again when the next one is refused.  All of them do so in the next update.
        """
        for name, part in self.parts.items():
            if not isinstance(part.exporter, Replanning):
                continue
            try:
                part.exporter.look_again()
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}", hint=error.hint) from error

    def plan(self, layouts: Sequence[BucketLayout], group: TrainerGroup, use: BucketUse) -> None:
        """Implements ``Planning.plan`` for the parts that do."""
        cuts = [cut for layout in layouts for cut in self._cut(layout)]
        for part in self.parts.values():
            exporter = part.exporter
            inner = [cut.layout for cut in cuts if cut.part is part]
            if inner and isinstance(exporter, Planning):
                summed = use.sums and isinstance(exporter, Summing)
                exporter.plan(inner, group, replace(use, sums=summed, buffers=()))

    def fill(
        self, bucket: Bucket | None, layout: BucketLayout, group: TrainerGroup, sources: SourceSums | None = None
    ) -> None:
        """Lets every part write its tensors of the layout.  Collective.

        Args:
            bucket: This rank's bucket; None on a rank that only sends its shards.
            layout: Tensors, or rows of them, in the bucket; the same on every rank.
            group: The trainer ranks.
            sources: The same as for ``Summing.fill``; parts that cannot sum are left out.

        Raises:
            ConfigError: The layout has a tensor that no part has.
            TrainerRankFailed: Another rank failed.
        """
        for cut in self._cut(layout):
            inner = Bucket(cut.layout, bucket.data) if bucket is not None else None
            exporter = cut.part.exporter
            if sources is not None and isinstance(exporter, Summing):
                cast(Summing, exporter).fill(inner, cut.layout, group, sources)
            else:
                exporter.fill(inner, cut.layout, group)

    def source_counts(self, layout: BucketLayout, group: TrainerGroup) -> Sequence[int]:
        """Implements ``Summing.source_counts``."""
        counts = [0] * group.world_size
        for cut in self._cut(layout):
            if isinstance(cut.part.exporter, Summing):
                for rank, count in enumerate(cut.part.exporter.source_counts(cut.layout, group)):
                    counts[rank] += count
        return counts

    def fold(self, layout: BucketLayout, group: TrainerGroup, answers: Sequence[torch.Tensor]) -> Folded:
        """Implements ``Summing.fold``."""
        whole = Folded.unknown(layout)
        mismatches: list[Mismatch] = []
        for cut in self._cut(layout):
            exporter = cut.part.exporter
            if not isinstance(exporter, Summing):
                continue
            counts = exporter.source_counts(cut.layout, group)
            pairs = [answer.tensor_split([count]) for answer, count in zip(answers, counts, strict=True)]
            answers = [rest for _, rest in pairs]
            folded = exporter.fold(cut.layout, group, [mine for mine, _ in pairs])
            whole.sums[cut.numbers] = folded.sums
            whole.known[cut.numbers] = folded.known
            mismatches += [replace(found, name=f"{cut.part.prefix}{found.name}") for found in folded.mismatches]
        return replace(whole, mismatches=tuple(mismatches))

    def unsummed(self) -> Collection[str]:
        """Implements ``Summing.unsummed``."""
        found: list[str] = []
        for part in self.parts.values():
            exporter = part.exporter
            names = exporter.unsummed() if isinstance(exporter, Summing) else [spec.name for spec in exporter.specs()]
            found += [f"{part.prefix}{name}" for name in names]
        return found

    def _cut(self, layout: BucketLayout) -> list[_Cut]:
        """A bucket as buckets of the parts that have tensors in it; cut once for each layout."""
        known = self._cuts.get(layout.index)
        if known is not None and known[0] == layout:
            return known[1]
        slots: dict[str, list[int]] = {}
        for number, slot in enumerate(layout.slots):
            found = self._inner.get(slot.spec.name)
            if found is None:
                raise ConfigError(f"bucket {layout.index} carries {slot.spec.name}, which no part has")
            slots.setdefault(found[0], []).append(number)
        cuts: list[_Cut] = []
        for name, part in self.parts.items():
            if name not in slots:
                continue
            own = tuple(
                _renamed(layout.slots[number], self._inner[layout.slots[number].spec.name][1].name)
                for number in slots[name]
            )
            cuts.append(_Cut(part, torch.tensor(slots[name]), msgspec.structs.replace(layout, slots=own)))
        self._cuts[layout.index] = layout, cuts
        return cuts


def _renamed(slot: TensorSlot, name: str) -> TensorSlot:
    """A slot whose tensor has another name."""
    return msgspec.structs.replace(slot, spec=msgspec.structs.replace(slot.spec, name=name))
