"""The reference engine with the weight routes of a stock LMDeploy server (its PyTorch engine).

It imitates these behaviours:

- A request with ``finished`` that also carries tensors loads them first.
- An empty list ends an update if the request names no load format; with a load format it is an error.
- A bucket without a handle is read from the buffer that was mapped before.
- A wakeup that names a tag that is awake is ignored.
- An update does not pause generation.

LMDeploy silently loads wrong weights in three cases, which are errors here: a bucket without a handle that would be
read from a stale copy, or as another dtype than that of the mapped buffer, and an event that cannot be imported.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Receive, Scope, Send
from torch.multiprocessing.reductions import rebuild_storage_filename

from weightcast.errors import ConfigError, WeightcastError, WireError
from weightcast.lab.dialects.faults import wants_half
from weightcast.lab.dialects.live_weights import ForeignGroups, LiveWeights, NamedTensorList, cut, open_cuda, table
from weightcast.lab.dialects.unpickled import Called, dtype_named, read
from weightcast.wire.layout import total_bytes

if TYPE_CHECKING:
    from weightcast.rollout.engine import RolloutEngine

_GROUP_S = 1800.0  # LMDeploy's own deadline of a rendezvous and of a broadcast
_PAUSE_S = 60.0
_FLAT = "flattened_bucket"
_HOLDER = "lmdeploy-sleep"
_TAGS = frozenset({"weights", "kv_cache"})
_INFERENCE = frozenset({"/v1/chat/completions", "/v1/completions", "/generate"})


class UpdateParams(msgspec.Struct, frozen=True):
    """``POST /update_weights``."""

    serialized_named_tensors: str | list[str] | dict[str, Any]
    load_format: str | None = None
    finished: bool = False


class InitGroup(msgspec.Struct, frozen=True):
    """``POST /init_weights_update_group``."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str = "nccl"


class FromDistributed(msgspec.Struct, frozen=True):
    """``POST /update_weights_from_distributed``."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str
    load_format: str | None = None
    finished: bool = False


class DestroyGroup(msgspec.Struct, frozen=True):
    """``POST /destroy_weights_update_group``."""

    group_name: str


class Generate(msgspec.Struct, frozen=True):
    """Fields of ``POST /generate`` that score a prompt."""

    input_ids: list[int]
    return_logprob: bool | None = None
    logprob_start_len: int = -1
    max_tokens: int = 128


class LmdeployDialect:
    """The state of one server: sleeping tags, the mapped buffer, and the groups."""

    def __init__(self, engine: RolloutEngine) -> None:
        """Starts awake, without a mapped buffer.

        Raises:
            ConfigError: The engine has no receiver, has staging, or has GPUs that this process does not see.
        """
        if engine.receiver is None:
            raise ConfigError("a dialect needs an engine with a receiver")
        self._scheduler = engine.scheduler
        self._weights = LiveWeights(engine.receiver)
        self._groups = ForeignGroups(self._weights.devices)
        self._mapped: torch.Tensor | None = None
        self._turns: dict[torch.device, Any] = {}  # torch types an imported event as its base class
        self._is_copy = False
        self._asleep: set[str] = set()
        self._level = 1

    @property
    def is_sleeping(self) -> bool:
        """True while the server refuses inference."""
        return bool(self._asleep)

    @property
    def tags(self) -> list[str]:
        """Sleeping tags, sorted."""
        return sorted(self._asleep)

    @property
    def device_type(self) -> str:
        """Type of the device that the weights are on."""
        return self._weights.device.type

    @property
    def tp_size(self) -> int:
        """Number of ranks of the engine."""
        return self._weights.tp_size

    def update_params(self, request: UpdateParams, *, half: bool) -> None:
        """Loads a bucket from shared memory, or ends an update.  An exception becomes a 500."""
        payloads = request.serialized_named_tensors
        if isinstance(payloads, dict):
            raise ValueError("a dict is for another backend")
        if isinstance(payloads, str):
            payloads = [payloads] * self.tp_size
        if len(payloads) < self.tp_size:
            raise IndexError("list index out of range")
        # Each rank has a payload of its own. All are opened, since opening counts, and one is read.
        opened = [
            self._decode(payload, request.load_format, device)
            for payload, device in zip(payloads, self._weights.devices, strict=False)
        ]
        self._load(opened[0], half=half)
        for device, turn in self._turns.items():
            turn.record(torch.cuda.current_stream(device))
        if request.finished:
            self._forget()

    def init_group(self, request: InitGroup) -> str:
        """Joins a group; the text of an exception becomes the answer."""
        if not request.group_name:
            raise ValueError("group_name cannot be empty")
        if request.group_name in self._groups:
            raise ValueError(f"group {request.group_name!r} already initialized")
        if request.backend != self._groups.backend:
            where = self.device_type.upper()
            raise ValueError(f"Failed to initialize weights update group: no {request.backend} on a {where}")
        self._groups.join(
            request.group_name,
            host=request.master_address,
            port=request.master_port,
            first_rank=request.rank_offset,
            world_size=request.world_size,
            timeout_s=_GROUP_S,
        )
        return "Succeeded to initialize weights update group."

    def from_distributed(self, request: FromDistributed, *, half: bool) -> str:
        """Receives a bucket by broadcast, or ends an update."""
        if request.group_name not in self._groups:
            raise ValueError(f"group {request.group_name!r} not initialized. Call init_weights_update_group first.")
        if request.names:
            if request.load_format != _FLAT:
                raise ValueError("this dialect reads flattened buckets only")
            if len(set(request.dtypes)) > 1:
                raise ValueError(f"All tensors should have same dtype, but given {request.dtypes}")
            specs = table(request.names, request.dtypes, request.shapes)
            flat = self._groups.receive(request.group_name, total_bytes(specs), timeout_s=_GROUP_S)
            self._load(cut(flat, specs), half=half)
        return "Succeeded to update parameter online."

    def destroy_group(self, request: DestroyGroup) -> str:
        """Leaves a group."""
        if not self._groups.leave(request.group_name):
            raise ValueError(f"group {request.group_name!r} not initialized")
        return f"Succeeded to destroy group {request.group_name!r}."

    def sleep(self, level: int) -> None:
        """Drops every request, pauses, and closes the mapped buffer."""
        self._asleep = set(_TAGS)
        self._level = level
        self._scheduler.pause("abort", _PAUSE_S, holder=_HOLDER)
        self._forget()

    def wakeup(self, tags: list[str]) -> None:
        """Wakes some tags; if one of them is awake already, the whole call does nothing."""
        wanted = set(tags) or set(self._asleep)
        if not wanted <= self._asleep:
            return
        if "kv_cache" in wanted:
            self._scheduler.drop_caches()
        self._asleep -= wanted
        if wanted and not self._asleep:
            self._scheduler.resume(holder=_HOLDER)

    def score(self, request: Generate) -> list[tuple[float, int]]:
        """Returns the log-probability and id of each token but the first."""
        return list(zip(self._scheduler.score(request.input_ids), request.input_ids[1:], strict=True))

    def _forget(self) -> None:
        self._mapped = None
        self._turns.clear()

    def _decode(self, payload: str, load_format: str | None, device: torch.device) -> NamedTensorList:
        content = read(base64.b64decode(payload))
        if load_format != _FLAT:
            if content != []:
                raise ValueError("this dialect reads flattened buckets and the end of an update only")
            return ()
        metadata = content["metadata"]  # the end of an update is a list: a TypeError in LMDeploy, too
        if not metadata:
            return ()
        if content.get("event_ipc_handle"):
            if device.type == "cpu":
                raise ValueError("a CPU cannot wait for the event of a GPU: the buffer may not be filled yet")
            self._turns[device] = torch.cuda.Event.from_ipc_handle(device, content["event_ipc_handle"])
        if device in self._turns:
            self._turns[device].wait(torch.cuda.current_stream(device))
        if "flattened_tensor" in content:
            tensor = _open(content["flattened_tensor"], device)
            self._is_copy = bool(content.get("require_clone", True))
            self._mapped = tensor.clone() if self._is_copy else tensor
        elif self._mapped is None:
            raise ValueError("flattened_tensor is not provided in weights and no cached ipc tensor is available.")
        elif self._is_copy:
            raise ValueError("this bucket has no handle, and the buffer here is a stale copy")
        flat = self._mapped
        assert flat is not None
        found: list[tuple[str, torch.Tensor]] = []
        for entry in metadata:
            fields = cast(Called, entry).state
            if dtype_named(fields["dtype"]) != flat.dtype:
                raise ValueError(f"{fields['name']} is {fields['dtype']}, but the buffer was opened as {flat.dtype}")
            part = flat[fields["start_idx"] : fields["end_idx"]].reshape(fields["shape"])
            found.append((fields["name"], part))
        return found

    def _load(self, named: NamedTensorList, *, half: bool) -> None:
        if "weights" in self._asleep and self._level == 2:
            return  # LMDeploy writes into tensors without memory, which has no effect
        if named:
            self._weights.write(named[: len(named) // 2] if half else named)
        if half:
            raise RuntimeError("half of the bucket is loaded: a fault was injected here")


class Asleep:
    """Middleware that refuses inference while a tag sleeps."""

    def __init__(self, app: ASGIApp, *, dialect: LmdeployDialect) -> None:
        self._app = app
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers 503."""
        if scope["type"] == "http" and scope["path"] in _INFERENCE and self._dialect.is_sleeping:
            words = "Engine is sleeping; call POST /wakeup before inference (e.g. tags=weights&tags=kv_cache)."
            await _answer(503, _error(words, 503))(scope, receive, send)
            return
        await self._app(scope, receive, send)


def mount(app: FastAPI, engine: RolloutEngine) -> None:
    """Adds LMDeploy's routes in front of the app's own, and the middleware that refuses requests while it sleeps."""
    dialect = LmdeployDialect(engine)
    app.include_router(routes(dialect))
    app.add_middleware(Asleep, dialect=dialect)


def routes(dialect: LmdeployDialect) -> APIRouter:
    """Makes LMDeploy's routes for weights."""
    router = APIRouter()
    lock = asyncio.Lock()

    async def update_weights(request: Request) -> Response:
        def load(body: UpdateParams) -> Response:
            try:
                dialect.update_params(body, half=wants_half(request))
            except (WeightcastError, ValueError, TypeError, LookupError, RuntimeError):
                return PlainTextResponse("Internal Server Error", status_code=500)
            return _answer(200, None)

        return await _parsed(request, UpdateParams, load)

    async def serialised(request: Request, kind: type[Any], do: Callable[[Any], str]) -> Response:
        def answer(body: Any) -> Response:
            try:
                words = do(body)
            except (WeightcastError, ValueError, LookupError, RuntimeError) as error:
                return _answer(400, {"success": False, "message": str(error)})
            return _answer(200, {"success": True, "message": words})

        async with lock:
            return await _parsed(request, kind, answer)

    async def init_group(request: Request) -> Response:
        return await serialised(request, InitGroup, dialect.init_group)

    async def from_distributed(request: Request) -> Response:
        half = wants_half(request)
        return await serialised(request, FromDistributed, lambda body: dialect.from_distributed(body, half=half))

    async def destroy_group(request: Request) -> Response:
        return await serialised(request, DestroyGroup, dialect.destroy_group)

    async def receiver_status() -> Response:
        words = 'checkpoint-engine IPC updates require backend="pytorch" and device_type="cuda".'
        if dialect.device_type == "cuda":
            words = "checkpoint-engine is not installed."
        status = {"ready": False, "message": words, "backend": "pytorch", "device_type": dialect.device_type}
        status |= {"checkpoint_engine_version": None, "is_sleeping": dialect.is_sleeping}
        return _answer(200, status | {"sleeping_tags": dialect.tags, "device_uuids": [], "worker_ranks": []})

    async def from_ipc() -> Response:
        words = f"checkpoint-engine IPC updates require device_type=\"cuda\", got '{dialect.device_type}'."
        if dialect.device_type == "cuda":
            words = "checkpoint-engine is not installed."
        return _answer(501, _error(words, 501))

    async def sleep(request: Request) -> Response:
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            return _answer(400, _error('The "level" query parameter must be 1 or 2.', 400))
        await run_in_threadpool(dialect.sleep, int(level))
        return Response(status_code=200)

    async def wakeup(request: Request) -> Response:
        await run_in_threadpool(dialect.wakeup, request.query_params.getlist("tags"))
        return Response(status_code=200)

    async def is_sleeping() -> Response:
        return _answer(200, {"is_sleeping": dialect.is_sleeping})

    async def abort_request() -> Response:
        words = "This server does not support abort requests. Enable with --enable-abort-handling flag."
        return PlainTextResponse(words, status_code=501)

    async def engine_info() -> Response:
        sizes = {"tp_size": dialect.tp_size, "dp_size": 1, "pp_size": None, "ep_size": 1, "dp_rank": 0}
        return _answer(200, msgspec.json.encode(sizes).decode())  # JSON inside a JSON string, as there

    async def generate(request: Request) -> Response:
        def score(body: Generate) -> Response:
            if not body.return_logprob or body.logprob_start_len != 0 or body.max_tokens != 0:
                return _answer(400, _error("only prompts are scored here", 400))
            try:
                pairs = dialect.score(body)
            except WeightcastError as error:
                return _answer(400, _error(str(error), 400))
            return _answer(200, {"text": "", "output_ids": [], "meta_info": {"input_token_logprobs": pairs}})

        return await _parsed(request, Generate, score)

    router.post("/update_weights", summary="LMDeploy: weights in shared memory")(update_weights)
    router.post("/init_weights_update_group", summary="LMDeploy: join a group")(init_group)
    router.post("/update_weights_from_distributed", summary="LMDeploy: weights by broadcast")(from_distributed)
    router.post("/destroy_weights_update_group", summary="LMDeploy: leave a group")(destroy_group)
    router.get("/update_weights_from_ipc", summary="LMDeploy: state of checkpoint-engine's receiver")(receiver_status)
    router.post("/update_weights_from_ipc", summary="LMDeploy: weights by checkpoint-engine")(from_ipc)
    router.post("/sleep", summary="LMDeploy: drop requests and caches")(sleep)
    router.post("/wakeup", summary="LMDeploy: undo a part of sleep")(wakeup)
    router.get("/is_sleeping", summary="LMDeploy: is it sleeping?")(is_sleeping)
    router.post("/abort_request", summary="LMDeploy: off without its flag")(abort_request)
    router.get("/distserve/engine_info", summary="LMDeploy: parallel sizes")(engine_info)
    router.post("/generate", summary="LMDeploy: score a prompt")(generate)
    return router


async def _parsed(request: Request, kind: type[Any], do: Callable[[Any], Response]) -> Response:
    """Runs ``do`` with the parsed body on a thread; answers 400 if the body is malformed or not declared as JSON."""
    if request.headers.get("content-type", "").split(";", 1)[0].lower() != "application/json":
        return _answer(400, _error("Unsupported Media Type: Only 'application/json' is allowed", 400))
    try:
        body = msgspec.json.decode(await request.body(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return _answer(400, _error(str(error), 400))
    return await run_in_threadpool(do, body)


def _open(item: Any, device: torch.device) -> torch.Tensor:
    """Opens the memory of a CUDA handle; on a CPU, the host memory that a payload names in its place."""
    function, arguments = item
    if str(function) != "torch.multiprocessing.reductions.rebuild_cuda_tensor" or len(arguments) < 12:
        raise WireError(f"this dialect cannot open memory for {function}")
    if device.type == "cuda":
        return open_cuda(arguments, device)  # LMDeploy, too, puts its own device in the place of the payload's
    _, size, stride, offset, _, dtype, _, name, size_bytes, _, _, manager = arguments[:12]
    storage: Any = rebuild_storage_filename(torch.UntypedStorage, manager, name, size_bytes)
    return torch.empty(0, dtype=dtype_named(dtype)).set_(storage, offset, size, stride)


def _error(words: str, code: int) -> dict[str, Any]:
    return {"message": words, "type": "invalid_request_error", "code": code, "param": None, "object": "error"}


def _answer(status: int, body: Any) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")
