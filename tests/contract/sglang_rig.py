"""SGLang's own routes, schemas, decoders and weight updaters around a model that records its loads.

Runs in SGLang's environment, whichever version is first on the path.  Real: the FastAPI app, the tokenizer manager's
methods with their locks, the safe unpickler, the flattened bucket, the scheduler's weight-update manager and the model
runner's weight updater with its process groups; checkpoint-engine's receiver, with host memory in the place of a GPU's.
Not there: processes, scheduling, a model.  Prints its port as JSON.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import socket
import time
import warnings
from types import SimpleNamespace
from typing import Any

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

import host_memory  # noqa: E402
import sglang  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import uvicorn  # noqa: E402
from sglang.srt.checkpoint_engine import checkpoint_engine_worker  # noqa: E402
from sglang.srt.entrypoints import http_server  # noqa: E402
from sglang.srt.managers import tokenizer_control_mixin  # noqa: E402
from sglang.srt.managers.scheduler_components import weight_updater as scheduler_side  # noqa: E402
from sglang.srt.managers.tokenizer_manager import ServerStatus, TokenizerManager  # noqa: E402
from sglang.srt.model_executor.model_runner_components import weight_updater as runner_side  # noqa: E402
from sglang.srt.utils import common  # noqa: E402
from sglang.srt.utils.aio_rwlock import RWLock  # noqa: E402
from torch.multiprocessing import reductions  # noqa: E402

_OURS = ("/rig/clear", "/rig/refuse", "/rig/allowed", "/rig/gpu", "/rig/bare")


class Notes(torch.nn.Module):
    """A model that keeps copies of loaded tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, torch.Tensor] = {}
        self.refuses = ""

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name == self.refuses:
                raise ValueError(f"{name} is not what this model wants")
            self.kept[name] = tensor.clone()


class Manager(TokenizerManager):
    """The real manager's methods; their messages go to one weight updater in this process."""

    def __init__(self, updater: Any, journal: list[str]) -> None:
        self.server_args = SimpleNamespace(dp_size=1, enable_dp_attention=False)
        self.is_pause = False
        self.is_pause_cond = asyncio.Condition()
        self.model_update_lock = RWLock()
        self.mm_processor = None
        self.gracefully_exit = False
        self.initial_weights_loaded = True
        self.server_status = ServerStatus.Up
        self.version = "default"
        self._updater = updater
        self._journal = journal

    def auto_create_handle_loop(self) -> None:
        """Does nothing: this manager has no loop."""

    def abort_request(self, *_: object, **__: object) -> None:
        self._journal.append("abort_request")

    def _update_weight_version_if_provided(self, weight_version: str | None) -> None:
        self.version = weight_version or self.version

    def record_config_updates(self, *_: object, **updates: Any) -> None:
        """The same method under the other version's name."""
        self.version = updates.get("weight_version", self.version)

    async def _async_dispatch_to_scheduler(self, message: Any) -> None:
        self._journal.append(type(message).__name__)

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_communicator"):
            raise AttributeError(name)
        step = name.removesuffix("_communicator")
        real = getattr(self._updater, step, None) if step != "flush_cache" else None  # a scheduler's own

        async def ask(message: Any) -> list[Any]:
            self._journal.append(step)
            if real is None:
                return [SimpleNamespace(success=True, message="")]
            return [await asyncio.to_thread(real, message)]

        return ask


class Worker:
    """The tensor-parallel worker of the scheduler's manager, with the method names of both versions."""

    def __init__(self, runner: Any, deserialize: Any) -> None:
        self.model_runner = runner
        self._runner = runner
        self._deserialize = deserialize

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        return [("target", self._runner)]

    def deserialize_own_rank(self, payloads: list[bytes]) -> Any:
        return self._deserialize(payloads[0])

    def init_weights_update_group(self, message: Any) -> Any:
        return self._runner.weight_updater.init_weights_update_group(
            message.master_address,
            message.master_port,
            message.rank_offset,
            message.world_size,
            message.group_name,
            message.backend,
        )

    def destroy_weights_update_group(self, message: Any) -> Any:
        return self._runner.weight_updater.destroy_weights_update_group(message.group_name)

    def update_weights_from_distributed(self, message: Any) -> Any:
        return self._runner.weight_updater.update_weights_from_distributed(
            message.names, message.dtypes, message.shapes, message.group_name, message.load_format
        )

    def update_weights_from_ipc(self, message: Any) -> Any:
        return self._runner.weight_updater.update_weights_from_ipc(message)

    def update_weights_from_tensor(self, message: Any) -> Any:
        return self._runner.weight_updater.update_weights_from_tensor(
            named_tensors=self._deserialize(message.serialized_named_tensors[0]), load_format=message.load_format
        )


def build(journal: list[str]) -> tuple[Manager, Notes]:
    """Builds the parts and connects them as the server does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    world = dist.group.WORLD
    # These modules read a context that only a whole server has.
    parallel = SimpleNamespace(dp_size=1, tp_rank=0, tp_group=SimpleNamespace(cpu_group=world))
    for module in (tokenizer_control_mixin, scheduler_side, runner_side):
        if hasattr(module, "get_parallel"):
            module.get_parallel = lambda: parallel
        if hasattr(module, "get_model"):
            module.get_model = lambda: SimpleNamespace(weight_cache_mode="off")
    notes = Notes()
    updater = runner_side.WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=None,
        custom_weight_loaders={},
        get_model=lambda: notes,
        update_model_fields=None,
        recapture_cuda_graph=None,
        get_model_runner=lambda: SimpleNamespace(server_args=SimpleNamespace(weight_cache_mode="off"), model=notes),
    )
    runner = SimpleNamespace(weight_updater=updater)
    decode = common.MultiprocessingSerializer.deserialize
    known = set(scheduler_side.SchedulerWeightUpdaterManager.__dataclass_fields__)
    fields: dict[str, Any] = {
        "tp_worker": Worker(runner, decode),
        "draft_worker": None,
        "tp_cpu_group": world,
        "memory_saver_adapter": None,
        "flush_cache": lambda **_: journal.append("flushed by an update") or True,
        "is_fully_idle": lambda **_: True,
        "scheduler": SimpleNamespace(record_weight_version_change=lambda new_version: None),
    }
    fields = {name: value for name, value in fields.items() if name in known}
    if not scheduler_side.SchedulerWeightUpdaterManager.__dataclass_fields__["tp_cpu_group"].init:
        fields.pop("tp_cpu_group")
    return Manager(scheduler_side.SchedulerWeightUpdaterManager(**fields), journal), notes


class Outside:
    """Answers routes that need a whole server, as one rank on a CPU would; SGLang's own app answers the rest."""

    def __init__(self, manager: Manager, notes: Notes, journal: list[str]) -> None:
        self._manager = manager
        self._notes = notes
        self._journal = journal
        self._device, self._bare = "cpu", False
        self._started = time.time()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or path not in ("/server_info", "/model_info", "/rig", *_OURS):
            await http_server.app(scope, receive, send)
            return
        answer: Any = {}
        if path == "/server_info":
            answer = {"version": sglang.__version__, "tp_size": 1, "dp_size": 1, "pp_size": 1}
            answer |= {"startup_time": self._started, "random_seed": 7, "disable_radix_cache": self._bare}
            answer["device"] = self._device
        elif path == "/model_info":
            answer = {"served_model_name": "notes", "weight_version": self._manager.version}
        elif path == "/rig":
            answer = {
                "journal": self._journal,
                "paused": self._manager.is_pause,
                "kept": {
                    name: [str(tensor.dtype), list(tensor.shape), _sha256(tensor)]
                    for name, tensor in self._notes.kept.items()
                },
            }
        elif path == "/rig/allowed":
            answer = [" ".join(name) for name in getattr(common.SafeUnpickler, "ALLOWED_GLOBALS", ())]
        elif path == "/rig/gpu":
            self._device = "cuda"
        elif path == "/rig/bare":
            self._bare = True
        elif path == "/rig/clear":
            self._device, self._bare = "cpu", False
            self._journal.clear()
            self._notes.kept.clear()
            self._notes.refuses = ""
        else:
            self._notes.refuses = scope["query_string"].decode()
        body = json.dumps(answer).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})


def _sha256(tensor: torch.Tensor) -> str:
    flat = tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor
    return hashlib.sha256(bytes(flat.tolist())).hexdigest()


def pretend_gpu() -> None:
    """Replaces the accelerator that checkpoint-engine's protocol needs."""
    host_memory.receive_on_host()
    reductions.rebuild_cuda_tensor = host_memory.open_segment(lambda _: None, own_device=0)
    worker = checkpoint_engine_worker.SGLangCheckpointEngineWorkerExtensionImpl
    worker.get_device_uuid = lambda self: "GPU-cpu"
    worker.get_device_id = lambda self: 0


def main() -> None:
    torch.set_num_threads(1)
    pretend_gpu()
    journal: list[str] = []
    manager, notes = build(journal)
    http_server._global_state = SimpleNamespace(tokenizer_manager=manager)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        said = {"port": listener.getsockname()[1], "version": sglang.__version__}
        server = uvicorn.Server(
            uvicorn.Config(Outside(manager, notes, journal), log_level="error", lifespan="off", access_log=False)
        )
        print(json.dumps(said), flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the parent reads no further
        asyncio.run(server.serve(sockets=[listener]))


if __name__ == "__main__":
    main()
