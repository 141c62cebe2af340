"""Limits of the machine: plain copies of the same bytes in the same processes, in turns with the methods.

Each limit is a method that changes no weights. ``bounds`` says which limits bound an update, by placement and device.
"""

from __future__ import annotations

from typing import Any

import torch

from weightcast.lab.bench.methods import EngineSide, Layout, Method, TrainerSide
from weightcast.lab.bench.raw import RawGroup, chunks, synchronize

_HERE = __name__
CHUNK_BYTES = 1 << 30
CHUNK_BYTES_CPU = 64 << 20


def bounds(layout: Layout) -> list[Method]:
    """Returns the limits of an update in this layout; the slowest of them is its floor."""
    chunk = CHUNK_BYTES if layout.device == "cuda" else CHUNK_BYTES_CPU
    if layout.placement == "disaggregated":
        names = ["broadcast"] if layout.device == "cpu" else ["broadcast", "peer copy"]
    elif layout.device == "cpu":
        names = ["shared memory", "shared memory, in turn"]
    else:
        names = ["device copy", "all-gather"] if layout.trainers > 1 else ["device copy"]
    return [limit(name, chunk_bytes=chunk) for name in names]


def limit(name: str, **options: Any) -> Method:
    """Makes the method of a limit."""
    half = "".join(part.strip(",").capitalize() for part in name.replace("-", " ").split())
    return Method(
        name=f"limit: {name}",
        trainer=f"{_HERE}:{half}Trainer",
        engine=f"{_HERE}:{half}Engine",
        options=options,
        writes=False,
        pauses=False,
    )


class _Half:
    def __init__(self, side: Any, *, chunk_bytes: int) -> None:
        self._side: Any = side
        self._size_bytes: int = side.shape.size_bytes
        self._chunk_bytes = min(chunk_bytes, self._size_bytes)
        self._pieces = chunks(self._size_bytes, self._chunk_bytes)

    def prepare(self) -> None:
        """Prepares nothing by default."""

    def update(self, version: int) -> dict[str, float] | None:
        """Moves nothing by default."""

    def close(self) -> None:
        """Releases nothing by default."""

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.ones(count, dtype=torch.uint8, device=self._side.device)


class BroadcastTrainer(_Half):
    """Broadcasts one buffer from trainer 0 to every engine until as many bytes as the model has are sent."""

    def __init__(self, side: TrainerSide, *, chunk_bytes: int) -> None:
        super().__init__(side, chunk_bytes=chunk_bytes)
        self._group: RawGroup | None = None

    def prepare(self) -> None:
        """Joins the group."""
        if self._side.rank == 0:
            self._buffer = self._bytes(self._chunk_bytes)
            group = self._group = self._side.group("limit-broadcast", rank=0, size=1 + self._side.layout.engines)
            group.broadcast(self._buffer[:1])

    def update(self, version: int) -> None:
        """Sends the bytes."""
        if self._group is not None:
            for count in self._pieces:
                self._group.broadcast(self._buffer[:count])
            synchronize(self._side.device)

    def close(self) -> None:
        """Leaves the group."""
        if self._group is not None:
            self._group.close()


class BroadcastEngine(_Half):
    """Receives the broadcasts of ``BroadcastTrainer``."""

    def __init__(self, side: EngineSide, *, chunk_bytes: int) -> None:
        super().__init__(side, chunk_bytes=chunk_bytes)

    def prepare(self) -> None:
        """Joins the group."""
        self._buffer = self._bytes(self._chunk_bytes)
        size = 1 + self._side.layout.engines
        self._group: RawGroup = self._side.group("limit-broadcast", rank=1 + self._side.rank, size=size)
        self._group.broadcast(self._buffer[:1])

    def update(self, version: int) -> None:
        """Receives the bytes."""
        for count in self._pieces:
            self._group.broadcast(self._buffer[:count])
        synchronize(self._side.device)

    def close(self) -> None:
        """Leaves the group."""
        self._group.close()


class DeviceCopyTrainer(_Half):
    """Does nothing: the engines copy."""


class DeviceCopyEngine(_Half):
    """Copies every byte of the model once within the engine's device, on all engines at the same time."""

    def prepare(self) -> None:
        """Allocates two buffers."""
        self._from, self._to = self._bytes(self._chunk_bytes), self._bytes(self._chunk_bytes)

    def update(self, version: int) -> None:
        """Copies the bytes."""
        for count in self._pieces:
            self._to[:count].copy_(self._from[:count], non_blocking=True)
        synchronize(self._side.device)


class AllGatherTrainer(_Half):
    """Gathers the whole model on every trainer's device from equal shards."""

    def prepare(self) -> None:
        """Joins the group."""
        size = self._side.layout.trainers
        self._share = self._chunk_bytes // size
        self._shard, self._whole = self._bytes(self._share), self._bytes(self._share * size)
        self._group: RawGroup = self._side.group("limit-all-gather", rank=self._side.rank, size=size)
        self._group.all_gather(self._whole, self._shard)
        synchronize(self._side.device)

    def update(self, version: int) -> None:
        """Gathers the shards."""
        size = self._side.layout.trainers
        for count in self._pieces:
            self._group.all_gather(self._whole[: count // size * size], self._shard[: count // size])
        synchronize(self._side.device)
        if self._side.rank == 0:
            for pipe in self._side.pipes:
                pipe.send(None)

    def close(self) -> None:
        """Leaves the group."""
        self._group.close()


class AllGatherEngine(_Half):
    """Waits for the trainers."""

    def update(self, version: int) -> None:
        """Waits until the trainers are done."""
        self._side.pipes[0].receive()


class PeerCopyTrainer(_Half):
    """Shares a buffer on its device with every engine."""

    def prepare(self) -> None:
        """Sends the handle of the buffer to every engine."""
        if self._side.rank == 0:
            self._buffer = self._bytes(self._chunk_bytes)
            synchronize(self._side.device)
            for pipe in self._side.pipes:
                pipe.send(self._buffer)


class PeerCopyEngine(_Half):
    """Copies every byte of the model once from the trainer's device, on all engines at the same time."""

    def prepare(self) -> None:
        """Maps the trainer's buffer."""
        self._from: torch.Tensor = self._side.pipes[0].receive()
        self._to = self._bytes(self._chunk_bytes)

    def update(self, version: int) -> None:
        """Copies the bytes."""
        for count in self._pieces:
            self._to[:count].copy_(self._from[:count], non_blocking=True)
        synchronize(self._side.device)

    def close(self) -> None:
        """Unmaps the trainer's buffer."""
        del self._from


class SharedMemoryTrainer(_Half):
    """Copies the model into shared memory; two slots let the engine copy out at the same time."""

    depth = 2

    def prepare(self) -> None:
        """Shares the slots; the source is as large as the model, so that no cache holds it."""
        if self._side.rank:
            return
        self._from = self._bytes(self._size_bytes)
        self._slots = [self._bytes(self._chunk_bytes).share_memory_() for _ in range(self.depth)]
        for pipe in self._side.pipes:
            pipe.send(self._slots)

    def update(self, version: int) -> None:
        """Copies into a slot, tells the engine, and waits before it uses a slot again."""
        if self._side.rank:
            return
        done = 0
        for number, count in enumerate(self._pieces):
            if number >= self.depth:
                for pipe in self._side.pipes:
                    pipe.receive()
            self._slots[number % self.depth][:count].copy_(self._from[done : done + count])
            done += count
            for pipe in self._side.pipes:
                pipe.send(number)
        for _ in self._pieces[-self.depth :]:
            for pipe in self._side.pipes:
                pipe.receive()


class SharedMemoryEngine(_Half):
    """Copies the model out of shared memory."""

    depth = 2

    def prepare(self) -> None:
        """Maps the slots."""
        self._to = self._bytes(self._size_bytes)
        self._slots: list[torch.Tensor] = self._side.pipes[0].receive()

    def update(self, version: int) -> None:
        """Copies out of a slot and tells the trainer."""
        pipe = self._side.pipes[0]
        done = 0
        for count in self._pieces:
            number = pipe.receive()
            self._to[done : done + count].copy_(self._slots[number % self.depth][:count])
            done += count
            pipe.send(number)


class SharedMemoryInTurnTrainer(SharedMemoryTrainer):
    """Copies the model into shared memory, without overlap with the engine's copy."""

    depth = 1


class SharedMemoryInTurnEngine(SharedMemoryEngine):
    """Copies the model out of shared memory, without overlap with the trainer's copy."""

    depth = 1
