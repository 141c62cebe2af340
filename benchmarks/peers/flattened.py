"""SGLang's and LMDeploy's flattened buckets: their own class, moved as their users move it.

SGLang as slime does: a bucket is concatenated, then broadcast, or handed over and answered before the next one.
LMDeploy as its persistent buffer does: one buffer, shared once; each bucket is concatenated into it and announced with
an event, and the receiver empties its allocator's cache after each.
"""

from __future__ import annotations

from typing import Any

import torch

from peers import sources
from peers.common import EngineHalf, TrainerHalf, lent

_CLASSES = ("FlattenedTensorMetadata", "FlattenedTensorBucket")


def sglang() -> Any:
    """SGLang's class."""
    return sources.module(sources.SGLANG_BUCKET).FlattenedTensorBucket


def lmdeploy() -> Any:
    """LMDeploy's class."""
    return sources.classes(sources.LMDEPLOY_BUCKET, _CLASSES).FlattenedTensorBucket


class SglangTrainer(TrainerHalf):
    """Concatenates the tensors of each bucket and sends the bucket's handle."""

    def configure(self, *, bucket_bytes: int, **_: Any) -> None:
        """Settings."""
        self._bucket_bytes = bucket_bytes

    def prepare(self) -> None:
        """Meet."""
        self._class = sglang()
        if self.apart:
            self.meet(f"sglang-{self._bucket_bytes}")

    def update(self, version: int) -> None:
        """Bucket after bucket."""
        for named in self.buckets(self._bucket_bytes):
            if not self.sends:
                continue
            bucket = self._class(named_tensors=named)
            flat = bucket.get_flattened_tensor()
            if self.group is not None:
                self.tell(bucket.get_metadata())
                self.group.broadcast(flat)
            else:
                shared = lent(flat)
                if shared.is_cuda:
                    torch.cuda.current_stream().synchronize()
                self.tell((shared, bucket.get_metadata()))
            self.hear()
        self.tell(None)


class SglangEngine(EngineHalf):
    """Take apart, load, answer."""

    def configure(self, *, bucket_bytes: int, **_: Any) -> None:
        """Settings."""
        self._bucket_bytes = bucket_bytes

    def prepare(self) -> None:
        """Meet."""
        self._class = sglang()
        if self.apart:
            self.meet(f"sglang-{self._bucket_bytes}")

    def update(self, version: int) -> None:
        """Bucket after bucket."""
        while (told := self.pipe.receive()) is not None:
            if self.group is not None:
                metadata = told
                flat = torch.empty(metadata[-1].end_idx, dtype=torch.uint8, device=self.side.device)
                self.group.broadcast(flat)
            else:
                flat, metadata = told
                self.side.count("handle_opens")
            self.load(self._class(flattened_tensor=flat, metadata=metadata).reconstruct_tensors())
            self.sync()
            del flat, told
            self.pipe.send(None)


class LmdeployTrainer(TrainerHalf):
    """Concatenates each bucket into one shared buffer, announces it and waits for the answer."""

    def configure(self, *, bucket_bytes: int, **_: Any) -> None:
        """Settings."""
        self._bucket_bytes = bucket_bytes

    def prepare(self) -> None:
        """Shares the buffer once."""
        self._class = lmdeploy()
        largest = max(2 * _numel(place.shape) for place in self.side.shape.places)
        size = max(self._bucket_bytes, largest) // 2
        self._buffer = torch.empty(size, dtype=torch.bfloat16, device=self.side.device)
        self._event: Any = None
        if self._buffer.is_cuda:
            self._event = torch.cuda.Event(interprocess=True)
            self._event.record()
        else:
            self._buffer.share_memory_()
        self.tell((self._buffer, self._event.ipc_handle() if self._event is not None else None))

    def update(self, version: int) -> None:
        """Bucket after bucket."""
        for named in self.buckets(self._bucket_bytes):
            bucket = self._class(named_tensors=named, flattened_tensor=self._buffer)
            if self._event is not None:
                self._event.record()
            self.tell(bucket.get_metadata())
            self.hear()
        self.tell(None)


class LmdeployEngine(EngineHalf):
    """Take apart, load, answer."""

    def prepare(self) -> None:
        """Maps the buffer once."""
        self._class = lmdeploy()
        self._buffer, handle = self.pipe.receive()
        self._event: Any = None
        if handle is not None:
            self._event = torch.cuda.Event.from_ipc_handle(self.side.device, handle)

    def update(self, version: int) -> None:
        """Bucket after bucket."""
        while (metadata := self.pipe.receive()) is not None:
            if self._event is not None:
                self._event.wait()
            self.load(self._class(flattened_tensor=self._buffer, metadata=metadata).reconstruct_tensors())
            self.sync()
            if self._event is not None:
                torch.cuda.empty_cache()
            self.pipe.send(None)

    def close(self) -> None:
        """Unmap."""
        del self._buffer
        super().close()


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
