"""Shared parts of the peers' halves: which trainer feeds which engines, whole tensors, and buckets of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from buckets import Named, buckets_of

from weightcast.lab.bench.methods import EngineSide, TrainerSide
from weightcast.lab.bench.raw import Pipe, RawGroup, synchronize


class TrainerHalf:
    """Sender: trainer 0 feeds all engines if they have other devices, else each trainer feeds those on its device."""

    def __init__(self, side: TrainerSide, **options: Any) -> None:
        self.side = side
        layout = side.layout
        self.apart = layout.placement == "disaggregated"
        mine = range(layout.engines) if self.apart else range(side.rank, layout.engines, layout.trainers)
        self.sends = not self.apart or side.rank == 0
        self.pipes: list[Pipe] = [side.pipes[engine] for engine in mine] if self.sends else []
        self.group: RawGroup | None = None
        self.configure(**options)

    def configure(self, **options: Any) -> None:
        """Settings."""

    def prepare(self) -> None:
        """Nothing, unless a method says so."""

    def close(self) -> None:
        """Let go of the group."""
        if self.group is not None:
            self.group.close()

    def meet(self, name: str) -> None:
        """Join the group of trainer 0 and all engines, as its root."""
        if self.sends:
            self.group = self.side.group(name, rank=0, size=1 + self.side.layout.engines)
            self.group.broadcast(torch.zeros(1, device=self.side.device))
            synchronize(self.side.device)

    def tell(self, value: object) -> None:
        """Sends a message to every engine that this trainer feeds."""
        for pipe in self.pipes:
            pipe.send(value)

    def hear(self) -> None:
        """Receives one answer of each engine that this trainer feeds."""
        for pipe in self.pipes:
            pipe.receive()

    def tensors(self) -> Iterator[Named]:
        """Yields whole tensors; every trainer rank must iterate, since sharded tensors are gathered on the way."""
        for name, parameter in self.side.model.named_parameters():
            value: Any = parameter.data
            yield name, value.full_tensor() if hasattr(value, "full_tensor") else value

    def buckets(self, size_bytes: int) -> Iterator[list[Named]]:
        """Lists of whole tensors with at most that many bytes, or of one tensor."""
        return buckets_of(self.tensors(), size_bytes)


class EngineHalf:
    """Receiver: listens to the trainer that feeds this engine."""

    def __init__(self, side: EngineSide, **options: Any) -> None:
        self.side = side
        self.apart = side.layout.placement == "disaggregated"
        self.pipe: Pipe = side.pipes[0 if self.apart else side.rank % side.layout.trainers]
        self.group: RawGroup | None = None
        self.configure(**options)

    def configure(self, **options: Any) -> None:
        """Settings."""

    def prepare(self) -> None:
        """Nothing, unless a method says so."""

    def close(self) -> None:
        """Let go of the group."""
        if self.group is not None:
            self.group.close()

    def meet(self, name: str) -> None:
        """Join the group of trainer 0 and all engines."""
        self.group = self.side.group(name, rank=1 + self.side.rank, size=1 + self.side.layout.engines)
        self.group.broadcast(torch.zeros(1, device=self.side.device))
        synchronize(self.side.device)

    def load(self, weights: list[Named]) -> None:
        """Loads tensors with the engine's own loader."""
        with torch.no_grad():
            self.side.engine.load_weights(weights)

    def sync(self) -> None:
        """Waits for the device."""
        synchronize(self.side.device)


def lent(tensor: torch.Tensor) -> torch.Tensor:
    """Makes a tensor that another process can open: unchanged on a GPU, in shared memory on a CPU."""
    if tensor.is_cuda or tensor.is_shared():
        return tensor
    copy = torch.empty_like(tensor).share_memory_()
    return copy.copy_(tensor)
