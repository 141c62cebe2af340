"""checkpoint-engine: its own ``ParameterServer`` in every trainer, its own worker loop in every engine.

What a trainer pays is counted: registering copies the weights into pinned host memory first. The pool is reused from
update to update. The processes' default group is used; by its own default the server makes and destroys one for each
update, which would only cost it more. On a CPU a shim stands for the device: sharing is torch's, pinning does nothing.
"""

from __future__ import annotations

import os
import time
import types
from typing import Any

import torch

from peers import sources
from peers.common import EngineHalf, TrainerHalf
from weightcast.comm.ports import quiet_port

_GIB = 1 << 30


def _load(side: Any) -> tuple[Any, Any]:
    """``checkpoint_engine.ps`` and ``.worker``."""
    loguru = sources.package("loguru")
    loguru.logger.remove()
    ps = sources.package("checkpoint_engine.ps")
    worker = sources.package("checkpoint_engine.worker")
    if side.device.type == "cpu":
        _without_a_device(ps, worker, side.layout.trainers)
    return ps, worker


def _without_a_device(ps: Any, worker: Any, count: int) -> None:
    devices = sources.package("checkpoint_engine.device_utils")
    pin = sources.package("checkpoint_engine.pin_memory")

    def nothing(*_: object) -> int:
        return 0

    module = types.SimpleNamespace(
        device_count=lambda: count,
        set_device=nothing,
        mem_get_info=lambda: (4 * _GIB, 8 * _GIB),
        memory_allocated=nothing,
        memory_reserved=nothing,
        empty_cache=nothing,
        synchronize=nothing,
        ipc_collect=nothing,
        get_device_properties=lambda index: types.SimpleNamespace(uuid=f"cpu-{os.getppid()}-{index}"),
    )

    class Manager(devices.DeviceManager):
        backend = property(lambda _: "gloo")
        transfer_engine_protocol = property(lambda _: "tcp")

        def _detect_device_type(self) -> str:
            return "cpu"

        def _setup_device_module(self) -> None:
            self.device_module = module

    class Torch(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, *sizes: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
            return torch.empty(*sizes, **more)

    ps.DeviceManager = worker.DeviceManager = Manager
    ps.reduce_tensor = _reduce
    pin.torch = Torch("torch")


def _reduce(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    storage: Any = tensor.untyped_storage()
    manager, name, size = storage._share_filename_cpu_()
    return _rebuild, (manager, name, size, None, None, None, 0)


def _rebuild(manager: bytes, name: bytes, size: int, *_: object) -> torch.Tensor:
    storage: Any = torch.UntypedStorage
    return torch.empty(0, dtype=torch.uint8).set_(storage._new_shared_filename_cpu(manager, name, size))


class Trainer(TrainerHalf):
    """Registers the weights, gathers the other ranks' registrations, and updates the engines."""

    def configure(self, *, bucket_bytes: int, **_: Any) -> None:
        """Settings."""
        self._bucket_bytes = bucket_bytes

    def prepare(self) -> None:
        """Starts the parameter server."""
        ps, _ = _load(self.side)
        os.environ["PS_MAX_BUCKET_SIZE_GB"] = str(self._bucket_bytes / _GIB)
        os.environ.update(RANK=str(self.side.rank), WORLD_SIZE=str(self.side.layout.trainers))
        # Every trainer must know the port of the server's own store; the first one chooses it.
        port = torch.zeros(1, dtype=torch.int64)
        if self.side.rank == 0:
            port[0] = quiet_port()
        torch.distributed.broadcast(port, 0)
        self._server = ps.ParameterServer(
            rank=self.side.rank,
            world_size=self.side.layout.trainers,
            gpu_count=self.side.layout.trainers,
            auto_pg=False,
            master_addr="127.0.0.1",
            master_port=int(port[0]),
        )

    def update(self, version: int) -> dict[str, float]:
        """One checkpoint."""
        name = f"version-{version}"
        started = time.monotonic()
        trainers = self.side.layout.trainers
        # Each rank registers its share of the whole tensors.
        mine = {
            key: tensor for number, (key, tensor) in enumerate(self.tensors()) if number % trainers == self.side.rank
        }
        self._server.register_checkpoint(name, named_tensors=mine, use_shared_memory_pool=True)
        del mine
        registered = time.monotonic()
        self._server.gather_metas(name)
        self._server.update(name, lambda paths: self.tell(dict(paths)[self._server._device_uuid]))
        updated = time.monotonic()
        self._server.unregister_checkpoint(name)
        return {"register_s": registered - started, "update_s": updated - registered}

    def close(self) -> None:
        """Frees the memory pool."""
        self._server.register_checkpoint("last", named_tensors={}, use_shared_memory_pool=True)
        self._server.unregister_checkpoint("last", force=True)
        super().close()


class Engine(EngineHalf):
    """Runs checkpoint-engine's worker loop."""

    def prepare(self) -> None:
        """Load it."""
        _, self._worker = _load(self.side)
        self._context = sources.package("zmq").Context()

    def update(self, version: int) -> None:
        """One checkpoint."""
        handle = self.pipe.receive()
        self.side.count("handle_opens")
        index = self.side.device.index or 0
        self._worker.update_weights_from_ipc(self._context, handle, index, run=self.load)
        self.sync()

    def close(self) -> None:
        """Let go."""
        self._context.term()
