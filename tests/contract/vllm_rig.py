"""Runs under a Python that has vLLM: what our adapter says goes through vLLM's real routes, worker methods, info
classes and packing.  What needs a GPU is put in from outside: streams, NCCL's broadcast, the mapping of a CUDA handle.

Prints one JSON object of cases; ``test_vllm_stock.py`` says what they have to be.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import inspect
import json
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
import vllm.v1.worker.gpu_worker as gpu_worker
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.testclient import TestClient
from vllm.distributed.weight_transfer import ipc_engine, nccl_engine, packed_tensor
from vllm.v1.engine.async_llm import AsyncLLM

from weightcast.adapters.vllm.adapter import VllmAdapter
from weightcast.adapters.vllm.detect import VllmKind
from weightcast.adapters.vllm.payload import stored_id
from weightcast.comm.run_steps import EngineRequest, converse_on_loop
from weightcast.comm.shared_buckets import Shared, TorchMemory
from weightcast.errors import TargetRejected
from weightcast.protocols import Invitation
from weightcast.runtime.deadline import Deadline
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import TensorSpec, plan_buckets
from weightcast.wire.messages import Close, Commit, Join, Open, Owner
from weightcast.wire.plans import UpdateTables

try:
    from vllm.entrypoints.rl.online.api_router import router
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
except ModuleNotFoundError:  # before 0.29 or so
    from vllm.entrypoints.serve.dev.rlhf.api_router import router
    from vllm.entrypoints.serve.utils.server_utils import exception_handler

    def init_exception_handler(app: FastAPI) -> None:
        app.exception_handler(Exception)(exception_handler)


UUID = "8c0f5a52-0000-1111-2222-333344445555"
UNIQUE_ID = bytes(range(128, 256))
BUCKET_BYTES = 600
SPECS = [
    TensorSpec(name="model.embed_tokens.weight", dtype="bfloat16", shape=(20, 7)),
    TensorSpec(name="model.layers.0.scale", dtype="float32", shape=(3, 5)),
    TensorSpec(name="model.layers.0.counts", dtype="int64", shape=(4,)),
    TensorSpec(name="model.layers.0.mlp.weight", dtype="bfloat16", shape=(9, 11)),
    TensorSpec(name="model.layers.0.mlp.weight_fp8", dtype="float8_e4m3fn", shape=(13,)),
    TensorSpec(name="model.layers.0.bias", dtype="float32", shape=()),
    TensorSpec(name="lm_head.weight", dtype="bfloat16", shape=(20, 7)),
]


class Quiet:
    """Stands in for a CUDA stream and an event."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def record(self, *_: Any) -> None: ...


class Wire:
    """The trainer's end of a broadcast; it also records the init infos of engines."""

    def __init__(self) -> None:
        self.bucket: torch.Tensor | None = None
        self.joined: list[dict[str, Any]] = []

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        assert src == 0
        assert self.bucket is not None, "the engine enters a broadcast without a sender"
        assert tensor.dtype == torch.uint8
        assert tensor.numel() == self.bucket.numel(), f"{tensor.numel()} bytes wanted, {self.bucket.numel()} sent"
        tensor.copy_(self.bucket)
        self.bucket = None

    def destroy(self) -> None: ...


class Model(torch.nn.Module):
    """A model that records its loads."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, torch.Tensor] = {}
        self.calls: list[int] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.kept.update(weights)  # not copied: vLLM keeps them too, until a layer is complete
        self.calls.append(len(self.kept))


class Worker(gpu_worker.Worker):
    """A worker with only vLLM's methods for weight transfer."""

    def __init__(self, backend: str, wire: Wire) -> None:
        self.model = Model()
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0, data_parallel_size=1)
        config = SimpleNamespace(parallel_config=parallel, model_config=None)
        kind: Any = nccl_engine.NCCLWeightTransferEngine if backend == "nccl" else ipc_engine.IPCWeightTransferEngine
        self.vllm_config, self.rank = config, 0
        self.weight_transfer_engine = kind(None, config, torch.device("cpu"), self.model)
        self._weight_update_active = self._weight_update_is_draft = False
        self.model_runner = SimpleNamespace(reset_lora_state=lambda: None)

    def __del__(self) -> None: ...


class Client(AsyncLLM):
    """vLLM's engine client, with a worker in the same process."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.said = worker, list[str]()
        self.version = "default"
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1, world_size_across_dp=1))

        async def set_version(version: str) -> None:
            self.version = version

        async def get_version() -> str:
            return self.version

        self.engine_core = SimpleNamespace(set_weight_version_async=set_version, get_weight_version_async=get_version)

    def __del__(self) -> None: ...

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        self.said.append(method)
        try:
            return [getattr(self.worker, method)(*args, **(kwargs or {}))]
        except Exception as error:
            raise Exception(f"Call to collective_rpc method failed: Worker failed with error '{error}'") from error

    async def pause_generation(self, **options: Any) -> None:
        self.said.append(f"pause {options['mode']} {options['clear_cache']}")

    async def resume_generation(self) -> None:
        self.said.append("resume")

    async def is_paused(self) -> bool:
        return False


class Rig:
    """A server, an adapter, and the trainer's end of a broadcast."""

    def __init__(self, backend: str) -> None:
        self.wire = Wire()
        self.worker = Worker(backend, self.wire)
        self.client = Client(self.worker)
        app = FastAPI()
        app.state.engine_client = self.client
        app.state.args = SimpleNamespace(log_error_stack=False)
        app.include_router(router)
        init_exception_handler(app)
        app.get("/version")(lambda: {"version": "0"})
        app.get("/v1/models")(lambda: {"data": [{"id": "m"}]})
        config = {"weight_transfer_config": {"backend": backend}, "instance_id": "1"}
        app.get("/server_info")(lambda: {"vllm_config": config | {"device_config": {"device": "cuda"}}, "vllm_env": {}})
        self.http = TestClient(app, raise_server_exceptions=False)
        info = self.ask(VllmKind().recognise("http://127.0.0.1:1"))
        assert info is not None
        self.info = info
        self.adapter = VllmAdapter(info)
        self.adapter.check(SPECS, delivery="group" if backend == "nccl" else "memory", bucket_bytes=BUCKET_BYTES)

    def ask(self, steps: Any) -> Any:
        target: Any = SimpleNamespace(target=SimpleNamespace(url="http://engine"))
        return asyncio.run(converse_on_loop(target, steps, timeout_s=60.0, send=self.send))

    async def send(self, request: EngineRequest, limit: Deadline) -> bytes:
        answer = self.http.request(
            request.method, request.path, content=request.body, headers={"content-type": "application/json"}
        )
        if answer.status_code >= 400:
            raise TargetRejected(answer.text, url="http://engine", status=answer.status_code)
        return answer.content

    def open(self, version: int, pause: str = "abort") -> None:
        owner = Owner(host="h", pid=1)
        self.ask(
            self.adapter.open(
                Open(
                    session="0" * 32,
                    owner=owner,
                    version=version,
                    timeout_s=60.0,
                    lease_s=60.0,
                    pause=pause,  # type: ignore[arg-type]
                    verify="none",
                    plan=UpdateTables(tuple(SPECS), ()),
                )
            )
        )

    def join(self) -> None:
        join = Join(
            session="0" * 32,
            group="g",
            host="10.0.0.1",
            port=4567,
            token="0" * 32,
            first_rank=3,
            world_size=5,
            backend="nccl",
            timeout_s=60.0,
        )
        invitation = Invitation(join=join, bucket_bytes=BUCKET_BYTES, unique_id=UNIQUE_ID)
        self.ask(self.adapter.join(invitation))

    def update(self, version: int, seed: int, *, pause: str = "abort") -> dict[str, Any]:
        """Runs one update with the same buffers for every bucket, wiped in between."""
        wanted = tensors(seed)
        broadcast = self.info.transports == ("broadcast",)
        self.open(version, pause)
        if broadcast and not self.wire.joined:
            self.join()
        layouts = plan_buckets(SPECS, bucket_bytes=BUCKET_BYTES, packing=self.adapter.packing)
        data = torch.empty(BUCKET_BYTES, dtype=torch.uint8)
        MAPPED[b"handle"] = data
        for layout in layouts:
            bucket = Bucket(layout, data)
            for slot, view in bucket.views():
                view.copy_(wanted[slot.spec.name])
            if broadcast:
                self.wire.bucket = data[: layout.size_bytes].clone()
            shared = [] if broadcast else [Shared(torch=(MEMORY,))]
            self.ask(self.adapter.bucket("0" * 32, layout, group="g" if broadcast else None, shared=shared))
            data.fill_(255)
        self.ask(self.adapter.close(Close(session="0" * 32, buckets=len(layouts))))
        ack = self.ask(self.adapter.commit(Commit(session="0" * 32)))
        kept = self.worker.model.kept
        equal = all(
            kept[name].dtype == tensor.dtype
            and kept[name].shape in (tensor.shape, tensor.shape or (1,))
            and torch.equal(kept[name].contiguous().view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
            for name, tensor in wanted.items()
        )
        return {"equal": equal, "buckets": len(layouts), "version": ack.version, "engine_version": self.client.version}


MAPPED: dict[bytes, torch.Tensor] = {}
MEMORY = TorchMemory(
    kind="cuda",
    device=UUID,
    size_bytes=BUCKET_BYTES,
    handle=b"handle",
    offset_bytes=512,
    ref_counter=b"/counter",
    ref_counter_offset=3,
    event=b"event",
    event_sync=True,
)
_real_rebuild = torch.multiprocessing.reductions.rebuild_cuda_tensor


def rebuild(*arguments: Any) -> torch.Tensor:
    """Takes the real function's parameters by name and returns a tensor of this process instead of a mapping."""
    given = inspect.signature(_real_rebuild).bind(*arguments).arguments
    assert given["storage_device"] == 4
    assert given["tensor_cls"] is torch.Tensor
    assert given["storage_cls"] is torch.storage.TypedStorage
    assert given["dtype"] is torch.uint8
    assert (given["tensor_size"], given["tensor_stride"], given["tensor_offset"]) == ((BUCKET_BYTES,), (1,), 0)
    assert (given["storage_size_bytes"], given["storage_offset_bytes"]) == (BUCKET_BYTES, 512)
    assert (given["ref_counter_handle"], given["ref_counter_offset"]) == (b"/counter", 3)
    assert (given["event_handle"], given["event_sync_required"]) == (b"event", True)
    assert given["requires_grad"] is False
    return MAPPED[given["storage_handle"]]


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randint(-50, 50, spec.shape, generator=generator).to(spec.torch_dtype) for spec in SPECS}


def patch() -> None:
    """Replaces the parts of torch and vLLM that need a GPU."""
    packed_tensor._get_streams = lambda device, count: tuple(Quiet() for _ in range(count))
    torch.cuda.Stream = Quiet
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid=UUID)
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.current_stream = lambda *_: Quiet()
    torch.accelerator.synchronize = lambda *_: None
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.record_stream = lambda self, stream: None
    torch.Event = Quiet
    torch.multiprocessing.reductions.rebuild_cuda_tensor = rebuild
    ipc_engine.rebuild_cuda_tensor = rebuild
    if hasattr(packed_tensor, "rebuild_cuda_tensor"):
        packed_tensor.rebuild_cuda_tensor = rebuild
    ipc_engine.IPCWeightTransferEngine.receive_weights.__globals__["torch"] = torch
    gpu_worker.set_current_vllm_config = lambda _: contextlib.nullcontext()
    import vllm.model_executor.model_loader.reload as reload

    reload.initialize_layerwise_reload = lambda model: None
    reload.finalize_layerwise_reload = lambda model, config: None


def nccl() -> dict[str, Any]:
    rig = Rig("nccl")

    def meet(init_info: Any, parallel_config: Any) -> Wire:
        rig.wire.joined.append(dict(vars(init_info)))
        return rig.wire

    nccl_engine.worker_init_process_group = meet
    first = rig.update(7, seed=1)
    second = rig.update(8, seed=2, pause="in_place")
    return {"first": first, "second": second, "joined": rig.wire.joined, "said": rig.client.said}


def ipc() -> dict[str, Any]:
    rig = Rig("ipc")
    rig.worker.weight_transfer_engine.device = SimpleNamespace(index=4)
    first = rig.update(7, seed=1)
    second = rig.update(8, seed=2, pause="retract")
    return {"first": first, "second": second, "said": rig.client.said}


def left_open() -> dict[str, Any]:
    """A trainer dies in the middle of an update."""
    rig = Rig("nccl")
    nccl_engine.worker_init_process_group = lambda init_info, parallel_config: rig.wire.joined.append({}) or rig.wire
    rig.worker.start_weight_update()
    return rig.update(3, seed=5) | {"said": rig.client.said}


def aborted() -> dict[str, Any]:
    """Aborts before a bucket, and after one."""
    rig = Rig("ipc")
    rig.worker.weight_transfer_engine.device = SimpleNamespace(index=4)
    rig.open(2)
    before = rig.ask(rig.adapter.abort("0" * 32, "no")).state
    said = list(rig.client.said)
    rig.open(2)
    layout = plan_buckets(SPECS, bucket_bytes=BUCKET_BYTES, packing=rig.adapter.packing)[0]
    MAPPED[b"handle"] = torch.zeros(BUCKET_BYTES, dtype=torch.uint8)
    rig.ask(rig.adapter.bucket("0" * 32, layout, group=None, shared=[Shared(torch=(MEMORY,))]))
    after = rig.ask(rig.adapter.abort("0" * 32, "no")).state
    paused = rig.client.said[-1] != "resume"
    again = rig.update(3, seed=9)
    return {"before": before, "after": after, "stays_paused": paused, "said": said, "again": again}


def refused() -> dict[str, Any]:
    """vLLM's refusal of a handle of another GPU."""
    rig = Rig("ipc")
    rig.worker.weight_transfer_engine.device = SimpleNamespace(index=4)
    rig.open(2)
    layout = plan_buckets(SPECS, bucket_bytes=BUCKET_BYTES, packing=rig.adapter.packing)[0]
    other = TorchMemory(kind="cuda", device="other", size_bytes=BUCKET_BYTES, handle=b"x")
    try:
        rig.ask(rig.adapter.bucket("0" * 32, layout, group=None, shared=[Shared(torch=(other,))]))
    except TargetRejected as error:
        return {"words": str(error), "status": error.status}
    return {}


def by_store() -> dict[str, Any]:
    """Reads NCCL's id as versions do that look into the group's store."""
    from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
    from vllm.distributed.utils import StatelessProcessGroup

    from weightcast.comm.rendezvous import Rendezvous

    store = Rendezvous(host="127.0.0.1", timeout_s=20.0)
    for key, value in VllmAdapter(Rig("nccl").info).stored(UNIQUE_ID).items():
        store.store.set(key, value)
    member = StatelessProcessGroup.create(host="127.0.0.1", port=store.port, rank=1, world_size=2, store_timeout=20)
    found = member.broadcast_obj(None, src=0)
    return {
        "class": isinstance(found, ncclUniqueId),
        "same": bytes(found) == UNIQUE_ID,
        "as_pickled": bytes(pickle.loads(pickle.dumps(found))) == bytes(pickle.loads(stored_id(UNIQUE_ID))),
    }


def chunks() -> dict[str, Any]:
    """vLLM's own producer cuts our bucket's tensors as we do."""
    wire: list[bytes] = []
    sender = SimpleNamespace(broadcast=lambda tensor, src: wire.append(bytes(tensor.tolist())))
    same = True
    wanted = tensors(3)
    for layout in plan_buckets(SPECS, bucket_bytes=BUCKET_BYTES, packing=VllmAdapter.packing):
        scalars = 0 if "packed" in inspect.signature(nccl_engine.NCCLWeightTransferUpdateInfo).parameters else -1
        named = [(slot.spec.name, wanted[slot.spec.name]) for slot in layout.slots if slot.spec.shape or scalars]
        packed_tensor.packed_nccl_broadcast_producer(
            iter(named), sender, 0, lambda item: item[1], buffer_size_bytes=BUCKET_BYTES
        )
        data = torch.zeros(layout.size_bytes, dtype=torch.uint8)
        for slot, view in Bucket(layout, data).views():
            view.copy_(wanted[slot.spec.name])
        sent = b"".join(
            bytes(data[slot.offset_bytes : slot.end_bytes].tolist())
            for slot in layout.slots
            if slot.spec.shape or scalars
        )
        same = same and wire == [sent]
        wire.clear()
    return {"same": same}


def plug_in() -> dict[str, Any]:
    """This version can build weightcast's backend, and a server that asks for it, and no other, gets its routes."""
    import vllm.entrypoints.openai.api_server as server
    import vllm.plugins
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from weightcast.plugins.vllm import register
    from weightcast.plugins.vllm.worker import WeightcastEngine

    os.environ.pop("VLLM_PLUGINS", None)
    register()
    register()

    def routes(backend: str) -> bool:
        app, args = FastAPI(), SimpleNamespace(weight_transfer_config=SimpleNamespace(backend=backend))
        app.state.args = args
        if hasattr(vllm.plugins, "load_endpoint_plugins"):
            for plugin in vllm.plugins.load_endpoint_plugins(("generate",)):
                plugin.attach_router(app)
        else:
            wrapped = server.build_app
            assert wrapped.__closure__ is not None
            cells = dict(zip(wrapped.__code__.co_freevars, wrapped.__closure__, strict=True))
            app.add_middleware(CORSMiddleware)
            app = server.sagemaker_standards_bootstrap(app)  # its last act, which puts the middlewares together
            cells["build"].cell_contents = lambda *arguments: app  # the rest of the server wants a model
            server.build_app(args)
        return any(getattr(route, "path", "") == "/weightcast/info" for route in app.routes)

    return {
        "registered": "weightcast" in WeightTransferEngineFactory._registry,
        "abstract": sorted(WeightcastEngine.__abstractmethods__),
        "routes": routes("weightcast"),
        "unasked": routes("nccl"),
    }


class Other:
    """A worker of another make."""

    def sleep(self, level: int) -> None: ...


def hook_points() -> dict[str, Any]:
    """This version has all that our code needs; a server that lacks something does not start with our backend."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    from weightcast.errors import ConfigError
    from weightcast.plugins.hook_points import check_worker
    from weightcast.plugins.vllm import make_endpoints

    make_endpoints()
    check_worker(CPUWorker)
    check_worker(gpu_worker.Worker)

    said: list[str] = []
    core_class = sys.modules["vllm.v1.engine.core"].EngineCore  # type: ignore[attr-defined]
    initialize = core_class._initialize_kv_caches
    del core_class._initialize_kv_caches
    for check in (make_endpoints, lambda: check_worker(Other)):
        try:
            check()
        except ConfigError as error:
            said.append(f"{error} ({error.hint})")
    core_class._initialize_kv_caches = initialize
    return {"said": said}


def around() -> dict[str, Any]:
    """A worker of this version measures, sleeps and wakes with our backend, without model or device."""
    from vllm.config import DeviceConfig, VllmConfig
    from vllm.v1.worker.cpu_worker import CPUWorker

    from weightcast.plugins.vllm.worker_hooks import wrap_worker

    told: list[Any] = []

    class Backend:
        sets = property(lambda self: self)

        def take_room(self, worker: Any, cache_bytes: int) -> int:
            told.append(["room", cache_bytes])
            return cache_bytes - 30

        def fall_asleep(self, level: int) -> None:
            told.append(["sleep", level])

        def let_go(self) -> None:
            told.append("let go")

        def restore(self, tags: Any) -> str:
            told.append(["restore", tags])
            return ""

        def wake(self, tags: Any) -> None:
            told.append(["wake", tags])

    found: dict[str, Any] = {}
    wrap_worker(CPUWorker, Backend)
    worker = object.__new__(CPUWorker)
    worker.weight_transfer_engine = Backend()
    worker.sleep(1)  # which does nothing by itself
    worker.wake_up(["weights"])
    found["sleep"] = [*told]
    # A fixed cache size lets vLLM measure without a device.
    told.clear()
    wrap_worker(gpu_worker.Worker, Backend)
    config = SimpleNamespace(multimodal_config=None)
    worker = object.__new__(gpu_worker.Worker)
    vars(worker).update(
        weight_transfer_engine=Backend(),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=1000),
        init_snapshot=SimpleNamespace(free_memory=5000),
        model_config=config,
        parallel_config=SimpleNamespace(),
        model_runner=SimpleNamespace(profile_run=lambda **how: None),
        vllm_config=VllmConfig(device_config=DeviceConfig(device="cpu")),
    )
    from vllm.v1.worker import gpu_model_runner

    found["left"] = worker.determine_available_memory()
    runs = inspect.signature(gpu_model_runner.GPUModelRunner._dummy_run).parameters
    found["warms up"] = {"num_tokens", "skip_eplb"} <= set(runs)
    found["room"] = [*told]
    return found


class Pool:
    """torch's account of a memory pool."""

    def __init__(self) -> None:
        self.segments = [
            {"address": 4096 + number * (2 << 20), "allocated_size": 1 << 20, "total_size": 2 << 20}
            for number in range(4)
        ]

    def snapshot(self, include_traces: bool = True) -> list[dict[str, int]]:
        return self.segments


def pool_of_sleep() -> dict[str, Any]:
    """This version's allocator for sleep mode, without its driver calls: what parameters have left is freed, once."""
    from vllm.device_allocator import cumem

    from weightcast.plugins.vllm.weights_pool import WeightsPool

    released: list[int] = []
    pool = Pool()

    @contextlib.contextmanager
    def own_pool(*callbacks: Any) -> Any:
        yield (pool, object())

    def nothing(*arguments: Any) -> None:
        pass

    def pool_of(**more: str) -> WeightsPool:
        return WeightsPool(
            SimpleNamespace(
                additional_config={},
                device_config=SimpleNamespace(device_type="cuda"),
                model_config=SimpleNamespace(enable_sleep_mode=True, **more),
                parallel_config=SimpleNamespace(),
            )
        )

    changed: list[tuple[Any, str, Any]] = [
        (cumem, "use_memory_pool_with_allocator", own_pool),
        (cumem, "unmap_and_release", lambda handle: released.append(handle[2])),
        (cumem, "create_and_map", nothing),
        (cumem, "libcudart", SimpleNamespace(cudaMemcpy=nothing)),
        (cumem, "PIN_MEMORY", False),
        (cumem.CuMemAllocator, "instance", None),
        *(
            (owner, name, nothing)
            for owner in (torch.cuda, torch.accelerator)
            for name in ("synchronize", "empty_cache")
        ),
    ]
    with contextlib.ExitStack() as undo:
        for owner, name, value in changed:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        without = pool_of().may_leave
        allocator = cumem.CuMemAllocator.instance = cumem.CuMemAllocator()
        with allocator.use_memory_pool("weights"):
            for segment in pool.segments:
                allocator._python_malloc_callback((0, 2 << 20, segment["address"], 0))
        weights = pool_of()
        leaves = [without, weights.may_leave, pool_of(sleep_mode_backend="another").may_leave]
        freed: list[Any] = []
        for number in (1, 2):  # parameters leave these segments
            pool.segments[number]["allocated_size"] = 0
        for _ in range(2):
            weights.free_left()
            freed.append([weights.freed_bytes, [*released]])
        allocator.sleep(("weights",))
        weights.free_left()
        freed.append([weights.freed_bytes, [*released]])
        allocator.wake_up(["weights"])
        pool.segments[0]["allocated_size"] = 0
        weights.free_left()
        freed.append([weights.freed_bytes, [*released]])
        pool.segments[3]["address"] += 1
        leaves.append(pool_of().may_leave)
    return {"leaves": leaves, "freed": freed}


def before_the_core() -> dict[str, Any]:
    """Our methods are in a core that is imported after plug-ins are loaded, as in the API server, which then forks."""
    code = (
        "import json, sys\n"
        "from weightcast.plugins.vllm import core_switch\n"
        "before = core_switch._MODULE in sys.modules\n"
        "core_switch.install()\n"
        "from vllm.v1.engine.core import EngineCoreProc\n"
        "print(json.dumps({'imported': before, 'known': hasattr(EngineCoreProc, core_switch.ASK)}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr}


def one_call() -> dict[str, Any]:
    """A core of this version takes our call: its batches in flight end, its running request waits, workers switch."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import core, core_client

    from weightcast.plugins.vllm import core_switch

    core_switch.install()
    told: list[Any] = []

    class Engine(core.EngineCoreProc):
        def __init__(self) -> None: ...
        def _process_engine_step(self) -> bool:
            told.append(["step", self.scheduler.pause_state.name])
            self.batch_queue.pop()
            return False

    inspect.signature(core.EngineCoreProc._process_engine_step).bind(None)
    for client in (core_client.AsyncMPClient, core_client.DPLBAsyncMPClient):
        inspect.signature(client._call_utility_async).bind(None, "method", 1, engine=b"")
        inspect.signature(client.pause_scheduler_async).bind(None, mode="wait", clear_cache=False)
    engine = Engine()
    engine.scheduler = scheduler = object.__new__(Scheduler)
    request = SimpleNamespace(request_id="r", num_output_placeholders=0)
    inspect.signature(Scheduler._preempt_request).bind(scheduler, request, 0.0)
    waiting: list[Any] = []

    def preempt(request: Any, *_: Any, **__: Any) -> None:
        told.append(["preempted", request.request_id])
        waiting.append(request)

    vars(scheduler).update(
        _pause_state=PauseState.UNPAUSED,
        running=[request],
        waiting=waiting,
        _preempt_request=preempt,
        prev_step_scheduled_req_ids=set(),
        kv_cache_manager=SimpleNamespace(reset_prefix_cache=lambda: True),
        connector=None,
        aux_output_connector=None,
    )
    engine.batch_queue = [1, 2]
    rpc = lambda method, **more: told.append([method, more["args"]]) or [""]  # noqa: E731
    engine.model_executor = SimpleNamespace(collective_rpc=rpc)
    kind = getattr(engine, core_switch.ASK)()
    answer = getattr(engine, core_switch.SWITCH_BETWEEN)(True, False, True, False, True, 5.0, "")
    return {"kind": kind, "answer": answer, "told": told, "after": scheduler.pause_state.name}


class Anything(ModuleType):
    """Stands in for FlashInfer, which needs CUDA: every name in it is a class without anything."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def updated_sinks(implementation: Any, dtype: torch.dtype, make_copy: Callable[[], object]) -> dict[str, Any]:
    """Puts one of vLLM's attention classes under a parameter, as gpt-oss does, and updates the parameter.

    Args:
        implementation: The object that computes attention, without its sinks.
        dtype: Dtype of the parameter.
        make_copy: Makes the object keep its own copy, after the receiver has looked at the model.
    """
    from weightcast.errors import EngineFailure
    from weightcast.plugins.vllm.weight_copies import AttentionCopies

    block, attention = torch.nn.Module(), torch.nn.Module()
    block.sinks = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=dtype), requires_grad=False)
    block.attn = attention
    attention.impl = implementation
    implementation.sinks = implementation._sinks_source = block.sinks
    copies = AttentionCopies(torch.nn.ModuleDict({"layer": block}))
    make_copy()
    made = implementation.sinks
    copies.check()
    block.sinks.copy_(torch.tensor([4.0, 5.0, 6.0]))
    stale = implementation.sinks.tolist()
    try:
        copies.check()
        noticed = False
    except EngineFailure:
        noticed = True
    copies.renew()
    copies.check()
    return {
        "own_copy": made.data_ptr() != block.sinks.data_ptr(),
        "stale": stale,
        "noticed": noticed,
        "renewed": implementation.sinks.tolist(),
        "in_place": implementation.sinks is made,
    }


def sinks() -> dict[str, Any]:
    """FlashInfer's attention class of this version makes its copy of sinks after loading."""
    for name in ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils"):
        sys.modules[name] = Anything(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    from vllm.v1.attention.backends.flashinfer import FlashInferImpl

    implementation = object.__new__(FlashInferImpl)  # its constructor asks for a device
    return updated_sinks(
        implementation, torch.bfloat16, lambda: implementation.process_weights_after_loading(torch.bfloat16)
    )


def sinks_of_float16() -> dict[str, Any]:
    """The CPU's attention class makes its copy of float16 sinks in the first forward, since 0.32 or before."""
    from vllm.v1.attention.backends import cpu_attn

    class Attention(cpu_attn.CPUAttentionBackendImpl):
        def __init__(self) -> None: ...
        def __getattr__(self, name: str) -> None:  # what a forward only passes on
            return None

    def forward() -> None:
        cpu_attn.ops = SimpleNamespace(cpu_attention_with_kv_cache=lambda **_: None)
        metadata = SimpleNamespace(num_actual_tokens=1)
        for name in ("query_start_loc", "seq_lens", "causal", "block_table", "scheduler_metadata", "dynamic_causal"):
            setattr(metadata, name, None)
        layer: Any = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0)
        query, cache = torch.zeros(1, 3, 8), torch.zeros(1, 1, 16, 16)
        implementation.forward(layer, query, None, None, cache, metadata, torch.zeros(1, 3, 8))

    implementation = Attention()
    return updated_sinks(implementation, torch.float16, forward)


CASES: tuple[Callable[[], dict[str, Any]], ...] = (
    *(nccl, ipc, left_open, aborted, refused, by_store, chunks),
    *(plug_in, hook_points, around, pool_of_sleep, before_the_core, one_call, sinks, sinks_of_float16),
)


def main() -> None:
    patch()
    found: dict[str, Any] = {}
    for case in CASES:
        try:
            found[case.__name__] = case()
        except Exception:  # noqa: BLE001  it is what the test is told
            found[case.__name__] = {"error": traceback.format_exc()}
    print("RIG " + json.dumps(found, default=lambda value: base64.b64encode(value).decode()))


if __name__ == "__main__":
    main()
