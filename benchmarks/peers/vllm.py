"""vLLM's packed sender and receiver, its own functions.

Over a group: ``packed_nccl_broadcast_producer`` and ``..._consumer``; the communicator that vLLM builds on NCCL itself
is torch's NCCL group here. On one GPU: ``packed_ipc_producer`` and ``..._consumer``. Names, shapes and dtypes go to the
engines once for each update, as vLLM's update request does.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from typing import Any

import torch

from peers import sources
from peers.common import EngineHalf, Named, TrainerHalf


def _packed(device: torch.device) -> Any:
    """Imports vLLM's module; on a CPU its streams and events do nothing."""
    loaded = sources.module(sources.PACKED)
    if device.type == "cpu" and not isinstance(loaded.torch, _NoStreams):
        loaded.torch = _NoStreams()
        loaded._get_streams = lambda _, count: tuple(_Stream() for _ in range(count))
    return loaded


class _Stream:
    def synchronize(self) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def record_event(self, event: object = None) -> object:
        return event


class _Event:
    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, *_: object) -> None:
        pass

    def wait(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _NoStreams(types.ModuleType):
    """Stands in for torch on a CPU, where CUDA streams and events are missing."""

    Event = _Event

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = types.SimpleNamespace(
            stream=lambda _: contextlib.nullcontext(), current_stream=lambda *_: _Stream(), Stream=_Stream, Event=_Event
        )
        self.accelerator = types.SimpleNamespace(
            current_device_index=lambda: 0, current_stream=lambda *_: _Stream(), synchronize=lambda *_: None
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class PackedTrainer(TrainerHalf):
    """The producer."""

    def configure(self, *, bucket_bytes: int, **_: Any) -> None:
        """Settings."""
        self._bucket_bytes = bucket_bytes

    def prepare(self) -> None:
        """Meet."""
        warnings.filterwarnings("ignore", message="Tensor .* has size")
        self._module = _packed(self.side.device)
        self.meet(f"vllm-{self._bucket_bytes}")

    def update(self, version: int) -> None:
        """Sends the names, shapes and dtypes, then the weights."""
        places = self.side.shape.places
        self.tell([(place.name, list(place.shape), torch.bfloat16) for place in places])
        if self.group is not None:
            self._module.packed_nccl_broadcast_producer(
                self.tensors(), self.group, 0, lambda item: item[1], buffer_size_bytes=self._bucket_bytes
            )
        else:
            for _ in self.tensors():
                pass


class PackedEngine(EngineHalf):
    """The consumer."""

    def configure(self, *, bucket_bytes: int, **_: Any) -> None:
        """Settings."""
        self._bucket_bytes = bucket_bytes

    def prepare(self) -> None:
        """Meet."""
        warnings.filterwarnings("ignore", message="Tensor .* has size")
        self._module = _packed(self.side.device)
        self.meet(f"vllm-{self._bucket_bytes}")

    def update(self, version: int) -> None:
        """Receives the names, shapes and dtypes, then the weights."""
        told = self.pipe.receive()
        self._module.packed_nccl_broadcast_consumer(
            iter([(name, (shape, dtype)) for name, shape, dtype in told]),
            self.group,
            0,
            self.load,
            buffer_size_bytes=self._bucket_bytes,
            device=self.side.device,
        )
        self.sync()


class IpcTrainer(TrainerHalf):
    """Runs vLLM's producer; the engine answers each chunk before the next one is packed."""

    def configure(self, *, bucket_bytes: int, **_: Any) -> None:
        """Settings."""
        self._bucket_bytes = bucket_bytes

    def prepare(self) -> None:
        """Load the module."""
        self._module = _packed(self.side.device)

    def update(self, version: int) -> None:
        """Shares one chunk after another."""
        uuid = str(torch.cuda.get_device_properties(self.side.device).uuid)
        for chunk in self._module.packed_ipc_producer(
            self.tensors(), uuid, lambda item: item[1], buffer_size_bytes=self._bucket_bytes
        ):
            self.tell((chunk.ipc_handle, chunk.names, chunk.shapes, chunk.dtype_names, chunk.tensor_sizes))
            self.hear()
        self.tell(None)


class IpcEngine(EngineHalf):
    """The consumer."""

    def prepare(self) -> None:
        """Load the module."""
        self._module = _packed(self.side.device)
        make = getattr(self._module, "PackedBufferImporter", None)
        self._importer = make() if make is not None else None

    def update(self, version: int) -> None:
        """Loads one chunk after another."""
        index = self.side.device.index
        more: dict[str, Any] = {"importer": self._importer} if self._importer is not None else {}
        self.side.count("handle_opens")
        while (told := self.pipe.receive()) is not None:
            weights: list[Named] = self._module.packed_ipc_consumer(*told, index, **more)
            self.load(weights)
            self.sync()
            del weights
            self.pipe.send(None)

    def close(self) -> None:
        """Closes the mapping."""
        if self._importer is not None:
            self._importer.close()
        super().close()
