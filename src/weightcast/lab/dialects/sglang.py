"""The reference engine with the weight routes of a stock SGLang server that has weight-update sessions.

It imitates these behaviours:

- A bucket outside a session is refused before any rank joins its broadcast.
- Every bucket flushes the cache unless it says otherwise.  With running requests it is written and then answered 400.
- Names that the model does not have are skipped.
- A tensor of another shape is refused by broadcast, and ends the whole server in shared memory.
- The path of a loaded folder becomes the model's name.
- A group whose name is in use is refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from safetensors.torch import load_file
from starlette.concurrency import run_in_threadpool

from weightcast.errors import ConfigError, WeightcastError, WireError
from weightcast.lab.dialects.faults import wants_half
from weightcast.lab.dialects.live_weights import ForeignGroups, LiveWeights, NamedTensorList, cut, table
from weightcast.lab.dialects.sglang_bodies import (
    BeginWeightUpdateReqInput,
    CheckWeightsReqInput,
    ContinueGenerationReqInput,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    GenerateReqInput,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
    bucket_of,
)
from weightcast.lab.dialects.unpickled import read
from weightcast.wire.layout import total_bytes
from weightcast.wire.messages import Readback

if TYPE_CHECKING:
    from weightcast.rollout.engine import RolloutEngine

log = logging.getLogger("weightcast.rollout")

_VERSION = "0.5.23"
_HOLDER = "sglang"
_PAUSE_S = 60.0
_GROUP_S = 1800.0  # SGLang's own deadline of a rendezvous and of a broadcast
_FLAT = "flattened_bucket"
_NO_SESSION = "{} must run between begin_weight_update() and end_weight_update()"
_NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)


class _Refused(Exception):
    """Refusal of a request; its text is answered with a 400."""


class SglangDialect:
    """Implements the routes.  Thread-safe; like SGLang's scheduler it handles one weight request at a time."""

    def __init__(self, engine: RolloutEngine) -> None:
        """Raises ``ConfigError`` if the engine has no receiver, has staging, or GPUs that this process does not see."""
        if engine.receiver is None:
            raise ConfigError("a dialect needs an engine with a receiver")
        self._engine = engine
        self._receiver = engine.receiver
        self._live = LiveWeights(engine.receiver)
        self._known = {spec.name for spec in engine.receiver.info().specs}
        self._groups = ForeignGroups(self._live.devices)
        self._busy = threading.Lock()
        self._session = False
        self._seed = int.from_bytes(os.urandom(4), "little")
        self.model_path = engine.model
        self.weight_version = "default"
        self.is_paused = False

    # -- server description

    def server_info(self) -> dict[str, Any]:
        """Returns the few of SGLang's fields that adapters read."""
        return {
            "version": _VERSION,
            "tp_size": self._live.tp_size,
            "dp_size": 1,
            "pp_size": 1,
            "device": self._live.device.type,
            "disable_radix_cache": True,  # the reference engine has no prefix cache
            "random_seed": self._seed,
            "weight_cache_mode": "off",
            "quantization": None,
            "load_format": "auto",
            "enable_memory_saver": False,
            "internal_states": [{}],
        }

    def model_info(self) -> dict[str, Any]:
        """Returns the model's description; its path is the one that it was last loaded from."""
        return {
            "model_path": self.model_path,
            "served_model_name": self.model_path,
            "is_generation": True,
            "weight_version": self.weight_version,
            "load_format": "auto",
        }

    def checksums(self, _: CheckWeightsReqInput) -> dict[str, Any]:
        """Returns checksums of the whole model for every rank; SGLang's ranks return those of their own shards."""
        ack = self._receiver.apply(Readback())
        if not ack.ok or ack.mismatched:
            raise _Refused(ack.error or f"the ranks differ in {ack.mismatched[0]}")
        whole = hashlib.sha256(msgspec.json.encode(ack.resident, order="sorted")).hexdigest()
        ranks = [{"checksums": ack.resident, "per_gpu_checksum": whole} for _ in range(self._live.tp_size)]
        return {"success": True, "message": "Success.", "ranks": ranks, "per_engine_checksum": whole}

    # -- sessions and groups

    def begin(self, _: BeginWeightUpdateReqInput) -> str:
        """Opens a weight-update session."""
        with self._busy:
            if self._session:
                raise _Refused("a weight-update session is already open; call end_weight_update() first")
            self._session = True
        return "Success"

    def end(self, _: EndWeightUpdateReqInput) -> str:
        """Closes the session."""
        with self._busy:
            if not self._session:
                raise _Refused("no weight-update session is open; call begin_weight_update() first")
            self._session = False
        return "Success"

    def init_group(self, body: InitWeightsUpdateGroupReqInput) -> str:
        """Joins the trainer's group."""
        with self._busy:
            words = "Failed to initialize custom process group: {}."
            if body.group_name in self._groups:
                raise _Refused(words.format("The specified group name has already been created"))
            if body.backend != self._groups.backend:
                raise _Refused(words.format(f"backend {body.backend} on a {self._live.device.type.upper()}"))
            try:
                self._groups.join(
                    body.group_name,
                    host=body.master_address,
                    port=body.master_port,
                    first_rank=body.rank_offset,
                    world_size=body.world_size,
                    timeout_s=_GROUP_S,
                )
            except WeightcastError as error:
                raise _Refused(words.format(error)) from error
        return "Succeeded to initialize custom process group."

    def destroy_group(self, body: DestroyWeightsUpdateGroupReqInput) -> str:
        """Leaves a group, after any broadcast that is still awaited."""
        with self._busy:
            if not self._groups.leave(body.group_name):
                raise _Refused("The group to be destroyed does not exist.")
        return "Succeeded to destroy custom process group."

    # -- weights

    def from_distributed(self, body: UpdateWeightsFromDistributedReqInput, *, half: bool) -> str:
        """Receives one bucket, or one broadcast for each tensor."""
        with self._busy:
            if not self._session:
                raise _Refused(_NO_SESSION.format("update_weights_from_distributed"))
            try:
                named = self._receive(body)
            except (WeightcastError, ValueError, LookupError) as error:
                raise _Refused(f"Failed to receive weights: {error}") from error
            try:
                self._load(named, half=half)
            except (WeightcastError, ValueError) as error:
                words = f"Failed to update parameter online: {error}. "
                words += "The full weights of the ModelRunner are partially updated. Please discard the whole weights."
                raise _Refused(words) from error
            return self._after(body, "Succeeded to update parameter online.")

    def _receive(self, body: UpdateWeightsFromDistributedReqInput) -> NamedTensorList:
        if body.group_name not in self._groups:
            raise LookupError(f"Group {body.group_name} not in []. Please call `init_weights_update_group` first.")
        specs = table(body.names, body.dtypes, body.shapes)
        if body.load_format != _FLAT:
            flat = [self._groups.receive(body.group_name, spec.size_bytes, timeout_s=_GROUP_S) for spec in specs]
            return [pair for spec, part in zip(specs, flat, strict=True) for pair in cut(part, [spec])]
        if not specs:
            raise ValueError("Cannot create empty tensor bucket")
        start = 0
        for spec in specs:
            if start % spec.torch_dtype.itemsize:
                raise ValueError(f"Unaligned received tensor {spec.name}: byte offset {start}, dtype {spec.dtype}")
            start += spec.size_bytes
        return cut(self._groups.receive(body.group_name, total_bytes(specs), timeout_s=_GROUP_S), specs)

    def from_tensor(self, body: UpdateWeightsFromTensorReqInput, *, half: bool) -> str:
        """Loads a bucket from shared memory; the request has a payload for each rank."""
        try:
            payloads = [base64.b64decode(text, validate=True) for text in body.serialized_named_tensors]
        except binascii.Error as error:
            raise _Refused(f"serialized_named_tensors is not base64: {error}") from error
        if not self.is_paused:
            self._drain()
        with self._busy:
            if not self._session:
                raise _Refused(_NO_SESSION.format("update_weights_from_tensor"))
            if len(payloads) < self._live.tp_size:
                self._die(f"{len(payloads)} payloads for {self._live.tp_size} ranks")
            try:
                # Each rank has a payload of its own with the same content. All are opened, since opening counts.
                opened = [bucket_of(read(payload)) for payload in payloads[: self._live.tp_size]]
                self._load(opened[0], half=half)
            except (WireError, ValueError) as error:
                self._die(str(error))
            return self._after(body, "Success")

    def _drain(self) -> None:
        """Waits for the running requests to end; in SGLang an update of a server that is not paused waits for them."""
        deadline = time.monotonic() + _PAUSE_S
        while (stats := self._engine.scheduler.stats()).running or stats.waiting:
            if time.monotonic() >= deadline:
                raise _Refused("requests did not end")
            time.sleep(0.02)

    def from_disk(self, body: UpdateWeightFromDiskReqInput, *, half: bool) -> str:
        """Loads a checkpoint folder.  A failed load is not rolled back: SGLang would read the same folder again."""
        with self._busy:
            try:
                files = sorted(Path(body.model_path).glob("*.safetensors"))
                if not files:
                    raise ValueError(f"Cannot find any model weights with `{body.model_path}`")
                self._load([pair for file in files for pair in load_file(file).items()], half=half)
            except (WeightcastError, ValueError, OSError) as error:
                raise _Refused(f"Failed to update weights: {error}.\nRolling back to original weights.") from error
            words = self._after(body, "Succeeded to update model weights.")
            self.model_path = body.model_path
            return words

    def _load(self, named: NamedTensorList, *, half: bool) -> None:
        known = [(name, tensor) for name, tensor in named if name in self._known]
        for name, _ in named:
            if name not in self._known:
                log.warning("%s is not a weight of this model; skipped", name)
        if half:
            self._live.write(known[: (len(known) + 1) // 2])
            raise _Refused("half of the bucket was loaded: a fault was injected here")
        if known:
            self._live.write(known)

    def _after(
        self,
        body: UpdateWeightsFromDistributedReqInput | UpdateWeightsFromTensorReqInput | UpdateWeightFromDiskReqInput,
        words: str,
    ) -> str:
        if body.weight_version is not None:
            self.stamp(body.weight_version)
        if body.flush_cache and not self.flush():
            raise _Refused(_NOT_FLUSHED)
        return words

    def _die(self, why: str) -> None:
        """Kills the server, as an unexpected exception in SGLang's scheduler does."""
        log.error("the scheduler would have ended: %s", why)
        os.kill(os.getpid(), signal.SIGKILL)

    # -- requests

    def pause(self, body: PauseGenerationReqInput) -> None:
        """Pauses generation; a second call has no effect."""
        self._engine.scheduler.pause(body.mode, _PAUSE_S, holder=_HOLDER)
        self.is_paused = True

    def resume(self) -> None:
        """Resumes generation."""
        self.is_paused = False
        self._engine.scheduler.resume(holder=_HOLDER)

    def flush(self, timeout_s: float = 0.0) -> bool:
        """Flushes the cache; returns False while requests run, or wait without a pause."""
        deadline = time.monotonic() + timeout_s
        while True:
            stats = self._engine.scheduler.stats()
            if not stats.running and (self.is_paused or not stats.waiting):
                self._engine.scheduler.drop_caches()
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)

    def set_version(self, body: UpdateWeightVersionReqInput) -> str:
        """Sets the weight version, and aborts all requests unless told not to."""
        if body.abort_all_requests and not self.is_paused:
            self._engine.scheduler.pause("abort", _PAUSE_S, holder="sglang-abort")
            self._engine.scheduler.resume(holder="sglang-abort")
        self.stamp(body.new_version)
        return f"Weight version updated to {body.new_version}"

    def stamp(self, version: str) -> None:
        """Sets the weight version that answers report."""
        self.weight_version = version
        if version.isascii() and version.isdigit():
            self._engine.scheduler.set_version(int(version))

    def score(self, body: GenerateReqInput) -> list[tuple[float | None, int, None]]:
        """As ``input_token_logprobs``."""
        found = self._engine.scheduler.score(body.input_ids)
        return [(value, token, None) for value, token in zip([None, *found], body.input_ids, strict=True)]


def mount(app: FastAPI, engine: RolloutEngine) -> None:
    """Adds SGLang's routes to an app.

    Raises:
        ConfigError: The engine has no receiver, has staging, or has GPUs that this process does not see.
    """
    app.include_router(_routes(SglangDialect(engine)))


def _routes(dialect: SglangDialect) -> APIRouter:
    router = APIRouter()

    def step(path: str, kind: type[Any], do: Callable[[Any, Request], dict[str, Any]]) -> None:
        async def answer(request: Request) -> Response:
            return await _parsed(request, kind, do)

        router.post(path, summary="SGLang: as its own route of this name")(answer)

    def told(do: Callable[[Any], str]) -> Callable[[Any, Request], dict[str, Any]]:
        return lambda body, _: {"success": True, "message": do(body)}

    def pause(body: PauseGenerationReqInput, _: Request) -> dict[str, Any]:
        dialect.pause(body)
        return {"message": "Generation paused successfully.", "status": "ok"}

    def resume(body: ContinueGenerationReqInput, _: Request) -> dict[str, Any]:
        dialect.resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    def halved(do: Callable[..., str]) -> Callable[[Any, Request], dict[str, Any]]:
        return lambda body, request: {"success": True, "message": do(body, half=wants_half(request))}

    def generate(body: GenerateReqInput, _: Request) -> dict[str, Any]:
        if not body.return_logprob or body.logprob_start_len != 0:
            raise _Refused("this dialect only scores prompts; generate with /v1/completions")
        pairs = dialect.score(body)
        return {"text": "", "output_ids": [], "meta_info": {"input_token_logprobs": pairs}}

    step("/begin_weight_update", BeginWeightUpdateReqInput, told(dialect.begin))
    step("/end_weight_update", EndWeightUpdateReqInput, told(dialect.end))
    step("/init_weights_update_group", InitWeightsUpdateGroupReqInput, told(dialect.init_group))
    step("/destroy_weights_update_group", DestroyWeightsUpdateGroupReqInput, told(dialect.destroy_group))
    step("/update_weights_from_distributed", UpdateWeightsFromDistributedReqInput, halved(dialect.from_distributed))
    step("/update_weights_from_tensor", UpdateWeightsFromTensorReqInput, halved(dialect.from_tensor))
    step("/update_weights_from_disk", UpdateWeightFromDiskReqInput, halved(dialect.from_disk))
    step("/update_weight_version", UpdateWeightVersionReqInput, told(dialect.set_version))
    step("/pause_generation", PauseGenerationReqInput, pause)
    step("/continue_generation", ContinueGenerationReqInput, resume)
    step("/weights_checker", CheckWeightsReqInput, lambda body, _: dialect.checksums(body))
    step("/generate", GenerateReqInput, generate)

    async def flush(timeout: float = 0.0) -> Response:
        if await run_in_threadpool(dialect.flush, timeout):
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("Flush cache failed.\n", status_code=400)

    async def ready() -> Response:
        return Response(status_code=503 if dialect.is_paused else 200)

    async def server_info() -> Response:
        return _json(200, dialect.server_info())

    async def model_info() -> Response:
        return _json(200, dialect.model_info())

    router.api_route("/flush_cache", methods=["GET", "POST"], summary="SGLang: flush the cache")(flush)
    router.get("/ready", summary="SGLang: 503 while paused")(ready)
    for path in ("/server_info", "/get_server_info"):
        router.get(path, summary="SGLang: settings of the server")(server_info)
    for path in ("/model_info", "/get_model_info"):
        router.get(path, summary="SGLang: model and weight version")(model_info)
    return router


async def _parsed(request: Request, kind: type[Any], do: Callable[[Any, Request], dict[str, Any]]) -> Response:
    """Runs ``do`` with the parsed body on a thread; answers 400 if the body is missing or malformed."""
    raw = await request.body()
    if not raw and request.url.path == "/weights_checker":
        raw = b"{}"
    try:
        body = msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return _json(400, {"error": {"message": str(error)}})
    try:
        return _json(200, await run_in_threadpool(do, body, request))
    except _Refused as error:
        return _json(400, {"success": False, "message": str(error)})


def _json(status: int, body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")
