"""The parts of tensors that this rank holds, as the gatherer reads them, and the geometry of their boxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weightcast.digest.pieces import TensorPiece
from weightcast.errors import ConfigError
from weightcast.runtime.tensor_places import TensorPlaces
from weightcast.wire.box import Box, contains, slices
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import TensorSlot, TensorSpec


class Held(Protocol):
    """A part of a tensor that this rank can send."""

    @property
    def box(self) -> Box:
        """Place of the part, in elements of the whole tensor."""
        ...

    @property
    def memory(self) -> torch.Tensor | None:
        """The part as it lies in memory, shape ``box.shape``; None if its values are computed."""
        ...

    @property
    def origin(self) -> torch.Tensor:
        """Memory that the values are computed from, shape ``box.shape``; ``memory`` if nothing is computed."""
        ...

    def write(self, box: Box, out: torch.Tensor) -> None:
        """Writes a box inside the part to ``out``: shape ``box.shape``, any strides, the wire dtype."""
        ...


# A box of a part, and where its values go: the arguments of ``Held.write``.
Write = tuple[Held, Box, torch.Tensor]

# The parts that this rank holds now of the tensor with this number.
Local = Callable[[int], Sequence[Held]]


@dataclass(frozen=True, slots=True)
class Seen:
    """Tensors as they lie in memory at one moment.

    Attributes:
        layout: Stays the same object while the tensors are laid out alike, wherever they lie.
        place: Stays the same object while they also lie where they lay.
    """

    tensors: list[torch.Tensor]
    layout: object
    place: TensorPlaces

    @property
    def addresses(self) -> tuple[int, ...]:
        return self.place.addresses


class Watched(Protocol):
    """Some tensors that are looked at in update after update.  It keeps none of them alive."""

    def now(self) -> Seen:
        """The tensors as they lie now."""
        ...


# Watches the tensors with these numbers.
Watch = Callable[[Sequence[int]], Watched]


@dataclass(frozen=True, slots=True)
class InMemory:
    """A part that lies in memory.  ``source``: number, for ``Watch``, of the tensor that it views; None if unknown."""

    box: Box
    memory: torch.Tensor
    source: int | None = None

    @property
    def origin(self) -> torch.Tensor:
        return self.memory

    def write(self, box: Box, out: torch.Tensor) -> None:
        """Copies and casts."""
        out.copy_(self.memory[slices(box, self.box.offset)])


class Batch(Protocol):
    """Writes boxes into a bucket in a quicker way than one after the other.

    ``key`` stays the same object as long as they are the same boxes for the same places of the bucket, and ``writes``
    looks them up, only if that is necessary.
    """

    def prepare(self, bucket: Bucket, key: object, writes: Callable[[], list[Write]]) -> None:
        """Works out what ``write`` needs to know, without reading values.  The bucket stays as it is."""
        ...

    def write(self, bucket: Bucket, key: object, writes: Callable[[], list[Write]]) -> None:
        """Writes the boxes."""
        ...


class Computed:
    """Base of parts whose values are computed when they are written, so that they lie nowhere in memory."""

    __slots__ = ()

    @property
    def memory(self) -> torch.Tensor | None:
        return None


class HeldParts:
    """Finds the parts that this rank holds by the names of their tensors."""

    def __init__(
        self, specs: Sequence[TensorSpec], local: Local, watch: Watch | None, batch: Batch | None = None
    ) -> None:
        self._batch = batch
        self.number = {spec.name: number for number, spec in enumerate(specs)}
        self.local = local
        self.watches = watch is not None
        self._watch = watch

    def find(self, name: str, box: Box) -> Held:
        """The part of a tensor that contains a box; raises ``ConfigError`` if there is none."""
        for held in self.local(self.number[name]):
            if contains(held.box, box):
                return held
        raise ConfigError(f"{name}: the model has been sharded anew since the exporter was prepared")

    def prepare_all(self, bucket: Bucket, key: object, writes: Callable[[], list[Write]]) -> None:
        """Prepares ``write_all``, as ``Batch.prepare``."""
        if self._batch is not None:
            self._batch.prepare(bucket, key, writes)

    def write_all(self, bucket: Bucket, key: object, writes: Callable[[], list[Write]]) -> None:
        """Writes some boxes into a bucket, as ``Batch.write``."""
        if self._batch is not None:
            self._batch.write(bucket, key, writes)
            return
        for held, box, out in writes():
            held.write(box, out)

    def watch(self, sources: Sequence[int]) -> Watched:
        """Watches the sources of these numbers."""
        return self._watch(sources) if self._watch else _Nothing()


class _Nothing:
    def now(self) -> Seen:
        return _NOTHING


_NOTHING = Seen([], None, TensorPlaces([]))


def is_ready(tensor: torch.Tensor | None, spec: TensorSpec, device: torch.device) -> bool:
    """True if the tensor's memory can be sent as it is."""
    return (
        tensor is not None and tensor.is_contiguous() and tensor.dtype == spec.torch_dtype and tensor.device == device
    )


def to_sum(slot: TensorSlot, box: Box, tensor: torch.Tensor) -> TensorPiece:
    """A box of a slot's tensor, for the digest."""
    shape = slot.spec.shape
    return TensorPiece(tensor=tensor, full_shape=shape, box=box if shape else None)


def region(bucket: Bucket, slot: TensorSlot, box: Box) -> torch.Tensor:
    """A view of the bucket where a box of a slot's tensor belongs."""
    return bucket.view(slot)[slices(box, slot.box.offset)]
