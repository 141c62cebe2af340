"""Exports a ``state_dict``: tensors by the names that engines know."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from weightcast.comm.trainer_group import TrainerGroup
from weightcast.errors import ConfigError
from weightcast.exporters.module import ModuleExporter
from weightcast.protocols import Shard
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout, TensorSpec


class _Holder(nn.Module):
    """A module whose tensors may have any names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._buffers.update(tensors)  # register_buffer takes no dots


class StateDictExporter:
    """Named tensors, plain or DTensor, sent under their own names.

    Names and layouts must be those of a checkpoint, because the exporter cannot know which model they come from.  A
    tensor with several names is sent once, under the first.  Every update reads the tensors anew: it sees values that
    an optimizer changes in place, but not a tensor that replaces another.

    Args:
        tensors: Tensors by name; the same names in the same order on every rank.
        wire_dtype: The same as for ``ModuleExporter``.

    Raises:
        ConfigError: A value is not a tensor, or a tensor or name cannot be sent.
    """

    refills = True

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, wire_dtype: torch.dtype | None = None) -> None:
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"{name} is a {type(tensor).__name__}, and only tensors can be sent",
                    hint="leave it out: {name: t for name, t in state.items() if isinstance(t, torch.Tensor)}",
                )
        self._inner = ModuleExporter(_Holder(tensors), wire_dtype=wire_dtype)

    @property
    def device(self) -> torch.device:
        """The device that holds most of the tensors' bytes."""
        return self._inner.device

    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor, in the given order."""
        return self._inner.specs()

    def computing_bytes(self) -> int | None:
        """As ``Budgeted.computing_bytes``."""
        return self._inner.computing_bytes()

    def shards(self) -> Iterator[Shard]:
        """This rank's shards: the tensors' own memory.  No communication."""
        return self._inner.shards()

    def prepare(self, group: TrainerGroup) -> None:
        """Does the same as ``ModuleExporter.prepare``.  Collective."""
        self._inner.prepare(group)

    def plan(
        self,
        layouts: Sequence[BucketLayout],
        group: TrainerGroup,
        *,
        lent: Sequence[Collection[str]],
        scattered: bool,
        copies: bool,
        sums: bool,
    ) -> None:
        """Does the same as ``ModuleExporter.plan``."""
        self._inner.plan(layouts, group, lent=lent, scattered=scattered, copies=copies, sums=sums)

    def fill(self, bucket: Bucket | None, layout: BucketLayout, group: TrainerGroup) -> torch.Tensor | None:
        """Does the same as ``ModuleExporter.fill``.  Collective."""
        return self._inner.fill(bucket, layout, group)

    def lend(self, layouts: Sequence[BucketLayout], group: TrainerGroup) -> list[dict[str, torch.Tensor]]:
        """Zero-copy tensors of each bucket, as ``Lender.lend`` describes."""
        return self._inner.lend(layouts, group)
