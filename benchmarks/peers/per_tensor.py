"""The plainest ways: a broadcast for each tensor, and a handle for each tensor."""

from __future__ import annotations

from typing import Any

import torch

from peers.common import EngineHalf, Named, TrainerHalf, lent


class BroadcastTrainer(TrainerHalf):
    """Sends a message and a broadcast for each tensor."""

    def prepare(self) -> None:
        """Meet."""
        self.meet("per-tensor")

    def update(self, version: int) -> None:
        """Send."""
        for name, tensor in self.tensors():
            if self.group is not None:
                self.tell((name, tensor.dtype, tuple(tensor.shape)))
                self.group.broadcast(tensor)
        self.tell(None)


class BroadcastEngine(EngineHalf):
    """Receives each broadcast into a new tensor and loads it."""

    def prepare(self) -> None:
        """Meet."""
        self.meet("per-tensor")

    def update(self, version: int) -> None:
        """Receive."""
        assert self.group is not None
        while (told := self.pipe.receive()) is not None:
            name, dtype, shape = told
            tensor = torch.empty(shape, dtype=dtype, device=self.side.device)
            self.group.broadcast(tensor)
            self.load([(name, tensor)])
        self.sync()


class HandlesTrainer(TrainerHalf):
    """Sends a handle for each tensor and waits for answers after every ``bucket_bytes``."""

    def configure(self, *, bucket_bytes: int, **_: Any) -> None:
        """Settings."""
        self._bucket_bytes = bucket_bytes

    def update(self, version: int) -> None:
        """Lend."""
        for bucket in self.buckets(self._bucket_bytes):
            held: list[Named] = [(name, lent(tensor)) for name, tensor in bucket]
            if held[0][1].is_cuda:
                torch.cuda.current_stream().synchronize()
            self.tell(held)
            self.hear()
        self.tell(None)


class HandlesEngine(EngineHalf):
    """Opens, loads and closes each tensor."""

    def update(self, version: int) -> None:
        """Receive."""
        while (weights := self.pipe.receive()) is not None:
            self.side.count("handle_opens", len(weights))
            self.load(weights)
            self.sync()
            del weights
            self.pipe.send(None)
        if self.side.device.type == "cuda":
            torch.cuda.ipc_collect()
