"""Several exporters as one: a model of several modules, a policy and its draft, all in one session and one commit.

Knows names and order.  What each part is and how it is gathered is the part's own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from weightcast.comm.local import TrainerGroup
from weightcast.errors import ConfigError
from weightcast.exporters.names import check_names
from weightcast.protocols import Exporter, Shard
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the exporters.

    Attributes:
        exporter: Whose tensors.
        prefix: Put before its names, for engines that know a vision tower or a draft by one.
    """

    exporter: Exporter
    prefix: str = ""


class ComposedExporter:
    """The tensors of several exporters, one after the other.

    Args:
        parts: By what errors call them (``"policy"``, ``"vision"``, ``"draft"``), in the order in which they travel;
            the same on every rank.

    Attributes:
        parts: As given.
        logprobs: The first part's forward pass, for proof at level ``behaviour``; there only if that part has one.

    Raises:
        ConfigError: No parts, parts on different kinds of device, or two tensors of one name.
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
        """Where the first part's weights live."""
        return next(iter(self.parts.values())).exporter.device

    def specs(self) -> Sequence[TensorSpec]:
        """The parts' tensors, one part after the other."""
        return self._specs

    def part_of(self, name: str) -> str:
        """Which part a tensor belongs to."""
        return self._inner[name][0]

    def shards(self) -> Iterator[Shard]:
        """What this rank holds.  No communication."""
        for part in self.parts.values():
            for shard in part.exporter.shards():
                spec = msgspec.structs.replace(shard.spec, name=f"{part.prefix}{shard.spec.name}")
                yield Shard(spec=spec, box=shard.box, tensor=shard.tensor)

    def prepare(self, group: TrainerGroup) -> None:
        """Every part finds out what the other ranks hold.  Collective.

        Raises:
            ConfigError: A part cannot be exported; the text begins with its name.
        """
        for name, part in self.parts.items():
            try:
                part.exporter.prepare(group)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}", hint=error.hint) from error

    def fill(self, bucket: Bucket | None, layout: BucketLayout, group: TrainerGroup) -> None:
        """Every part writes its tensors of the layout.  Collective.

        Raises:
            ConfigError: The layout is not of these parts.
            TrainerRankFailed: Another rank failed.
        """
        slots: dict[str, list[int]] = {}
        for number, slot in enumerate(layout.slots):
            found = self._inner.get(slot.spec.name)
            if found is None:
                raise ConfigError(f"bucket {layout.index} carries {slot.spec.name}, which no part has")
            slots.setdefault(found[0], []).append(number)
        for name, part in self.parts.items():
            if name not in slots:
                continue
            own = tuple(
                msgspec.structs.replace(layout.slots[number], spec=self._inner[layout.slots[number].spec.name][1])
                for number in slots[name]
            )
            inner = msgspec.structs.replace(layout, slots=own)
            part.exporter.fill(Bucket(inner, bucket.data) if bucket is not None else None, inner, group)
