"""Adapter of LMDeploy's PyTorch engine.

LMDeploy has no pause.  The adapter puts the engine to sleep, which drops every request and the KV cache, and wakes its
weights alone.  Sleep and wake-up also rebuild captured graphs, which would otherwise keep old addresses after an update
through shared memory.  The engine cannot stage and cannot prove which weights it holds.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any

import msgspec

from weightcast.adapters.lmdeploy.payload import END, bucket_payload, check_readable
from weightcast.adapters.stock import KEPT_TOWER, StockAdapter, group_body, without_tower
from weightcast.comm.run_steps import EngineRequest, Steps
from weightcast.comm.shared_buckets import Shared, TorchMemory
from weightcast.errors import ConfigError, TargetRejected, WireError
from weightcast.protocols import Delivery, Invitation, Meeting, Sharing
from weightcast.wire.answers import Ack
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec
from weightcast.wire.messages import Close, Commit, Open

_FLAT = "flattened_bucket"
_SLEEP = EngineRequest(path="/sleep?level=1")
_NO_GROUP = "not initialized"  # LMDeploy's words for a group that it does not have


class LmdeployAdapter(StockAdapter):
    """One LMDeploy server: the attention-TP ranks behind one URL."""

    packing = Packing(alignment_bytes=1, one_dtype=True, slices=False, gapless=True)
    sharing: Sharing = "ring"
    meeting: Meeting = "torch"

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        # What the server's ranks have mapped, until an update ends or they fall asleep; None if it is not known.  A
        # bucket elsewhere must bring its handles: the server would read the old mapping and report no error.
        self._mapped: tuple[object, ...] | None = None
        self._group = ""
        self._got: Delivery | None = None  # how buckets of this session came; None before the first
        self._delivery: Delivery = "group"
        self._version: int | None = None
        self._put_to_sleep = False  # by us; an engine that slept before is left asleep
        self._mixed = False  # from the first bucket on: weights may be parts of two versions
        self._sleep_refused = False  # the engine may still map our buffers after an aborted update
        self._paused_at: float | None = None
        self._kept: tuple[str, ...] = ()

    def check(self, specs: Sequence[TensorSpec], *, delivery: Delivery, bucket_bytes: int) -> None:
        """As ``Adapter.check``."""
        self._delivery = delivery
        # LMDeploy does not tell whether it encodes images, and may serve the language model alone.
        self._kept = (KEPT_TOWER,) if without_tower(specs) else ()
        if delivery == "handles" and any(rank.device == "cuda" for rank in self._info.ranks):
            raise ConfigError(
                f"LMDeploy ({self._info.model}) does not tell the UUIDs of its GPUs, which checkpoint-engine needs; "
                "nothing was sent",
                hint="use broadcast, or LMDeploy 0.17 or later",
            )

    def open(self, message: Open) -> Steps:
        """Puts the engine to sleep and wakes its weights."""
        self._got, self._version = None, message.version
        self._mapped = None
        self._paused_at = time.monotonic()
        if (yield from _is_asleep()):
            status = yield from _receiver_status()
            if self._delivery == "handles" and status.get("ready") is True:
                return Ack(ok=True, state="updating")  # empty weights are awake already, and waking them fails
        else:
            self._put_to_sleep = True
            yield _SLEEP
            self._sleep_refused = False
        # LMDeploy ignores this if its weights are awake already.
        yield EngineRequest(path="/wakeup?tags=weights")
        return Ack(ok=True, state="updating")

    def join(self, invitation: Invitation) -> Steps:
        """Joins a group; LMDeploy answers when every member has joined."""
        yield from _post("/init_weights_update_group", group_body(invitation.join))
        self._group = invitation.join.group
        return Ack(ok=True)

    def bucket(self, session: str, layout: BucketLayout, *, group: str | None, shared: Sequence[Shared]) -> Steps:
        """Sends a bucket: the engine enters the broadcast, or reads memory that it maps."""
        if group is not None:
            self._got = "group"
            self._mixed = True
            if layout.size_bytes:  # an empty bucket is not broadcast, and an engine told of it would wait for ever
                yield from _post("/update_weights_from_distributed", _table(layout, group))
            return Ack(ok=True)
        self._got = "memory"
        self._mixed = True
        memories = [self._memory_of(rank.rank, rank.device, shared) for rank in self._info.ranks]
        dtype = check_readable(layout, memories[0])
        places = (dtype, *((one.handle, one.offset_bytes, one.size_bytes, one.turn) for one in memories))
        handle = self._mapped != places
        body = {
            "serialized_named_tensors": [bucket_payload(layout, memory, handle=handle) for memory in memories],
            "load_format": _FLAT,
            "finished": False,
        }
        self._mapped = None  # until the engine has answered, its mappings are unknown
        yield EngineRequest(path="/update_weights", body=msgspec.json.encode(body))
        self._mapped = places
        return Ack(ok=True)

    def handles(self, addresses: dict[str, str]) -> Steps:
        """As ``transports.checkpoint_engine.TakesHandles.handles``."""
        self._got = "handles"
        self._mixed = True
        yield from _post("/update_weights_from_ipc", {"zmq_handles": addresses})
        return Ack(ok=True)

    def close(self, message: Close) -> Steps:
        """Sends nothing: the engine has answered for every bucket already."""
        yield from ()
        return Ack(ok=True, state="updating")

    def commit(self, message: Commit) -> Steps:
        """Finishes values that modules compute from weights, then wakes the KV cache."""
        if self._got == "group":
            end = {"names": [], "dtypes": [], "shapes": [], "group_name": self._group, "finished": True}
            yield from _post("/update_weights_from_distributed", end)
        elif self._got == "memory":
            end = {"serialized_named_tensors": [END] * self._info.tp_size, "finished": True}
            yield EngineRequest(path="/update_weights", body=msgspec.json.encode(end))
            self._mapped = None
            self._sleep_refused = False
        self._mixed = False
        stall_s = 0.0
        words = "it was asleep before this update and still sleeps: POST /wakeup?tags=kv_cache to run it"
        if self._put_to_sleep:
            yield EngineRequest(path="/wakeup?tags=kv_cache")
            self._put_to_sleep, words = False, ""
            assert self._paused_at is not None
            stall_s = time.monotonic() - self._paused_at
        return Ack(
            ok=True,
            state="serving",
            version=self._version,
            ranks=self._info.tp_size,
            stall_s=stall_s,
            message=words,
            not_updated=self._kept,
        )

    def abort(self, session: str, reason: str) -> Steps:
        """Wakes the engine if no bucket has changed its weights; otherwise it sleeps until a full update."""
        self._mapped = None
        if self._mixed:
            if self._got == "memory":
                try:
                    yield _SLEEP  # LMDeploy unmaps our buffers when it falls asleep
                    self._sleep_refused = False
                except TargetRejected:
                    self._sleep_refused = True  # `leave` tries again and reports the failure
            return Ack(ok=True, state="quarantined")
        if self._put_to_sleep:
            yield EngineRequest(path="/wakeup")
            self._put_to_sleep = False
        return Ack(ok=True, state="serving")

    def leave(self, group: str | None) -> Steps:
        """Leaves the group, or unmaps buffers that an aborted update has left mapped."""
        if group is None:
            if self._sleep_refused:
                yield _SLEEP
                self._sleep_refused = False
            return Ack(ok=True)
        self._group = ""
        body = msgspec.json.encode({"group_name": group})
        try:
            yield EngineRequest(path="/destroy_weights_update_group", body=body)
        except TargetRejected as error:
            if _NO_GROUP not in str(error):
                raise
        return Ack(ok=True)

    def score(self, token_ids: Sequence[int]) -> Generator[EngineRequest, bytes, list[float]]:
        """Asks ``/generate``, which scores a prompt if LMDeploy was started with ``--logprobs-mode raw_logprobs``."""
        body = {
            "input_ids": list(token_ids),
            "return_logprob": True,
            "logprob_start_len": 0,
            "max_tokens": 0,
            "temperature": 1.0,
        }
        reply = yield EngineRequest(path="/generate", body=msgspec.json.encode(body))
        try:
            found = msgspec.json.decode(reply, type=_Generated).meta_info.input_token_logprobs or ()
        except msgspec.MsgspecError as error:
            raise WireError(f"LMDeploy's answer to /generate has another form: {error}") from None
        if [token for _, token in found] != list(token_ids[1:]):
            raise WireError(
                "LMDeploy scored other tokens than it was given: to score a prompt it needs version 0.17 and "
                "--logprobs-mode raw_logprobs"
            )
        return [value for value, _ in found]

    def _memory_of(self, rank: int, device: str, shared: Sequence[Shared]) -> TorchMemory:
        offered = [item.ring[rank] for item in shared if rank < len(item.ring)]
        on_host = [memory for memory in offered if memory.kind == "shm"]
        if on_host:
            return on_host[0]
        if device == "cuda":  # without a UUID, the engine's ranks sit on the trainer's GPUs, in the same order
            if rank < len(offered):
                return offered[rank]
        else:
            for memory in offered:
                if memory.device == device:
                    return memory
        raise ConfigError(
            f"no trainer rank has filled a buffer on GPU {device} of rank {rank} of {self._info.model}",
            hint="ipc needs a trainer rank on each of the engine's GPUs; use broadcast otherwise",
        )


class _Meta(msgspec.Struct):
    input_token_logprobs: list[tuple[float, int]] | None = None


class _Generated(msgspec.Struct):
    meta_info: _Meta


class _Said(msgspec.Struct):
    success: bool
    message: str = ""


def _table(layout: BucketLayout, group: str) -> dict[str, Any]:
    """Fields of a bucket, which the engine cuts end to end in this order."""
    return {
        "names": [slot.spec.name for slot in layout.slots],
        "dtypes": [slot.spec.dtype for slot in layout.slots],
        "shapes": [list(slot.spec.shape) for slot in layout.slots],
        "group_name": group,
        "load_format": _FLAT,
        "finished": False,
    }


def _post(path: str, body: dict[str, Any]) -> Generator[EngineRequest, bytes, None]:
    """Sends a request whose answer has a ``success`` field, and checks that field."""
    reply = yield EngineRequest(path=path, body=msgspec.json.encode(body))
    try:
        said = msgspec.json.decode(reply, type=_Said)
    except msgspec.MsgspecError as error:
        raise WireError(f"LMDeploy's answer to {path} has another form: {error}") from None
    if not said.success:
        raise WireError(f"LMDeploy failed at {path}: {said.message}")


def _is_asleep() -> Generator[EngineRequest, bytes, bool]:
    reply = yield EngineRequest(method="GET", path="/is_sleeping")
    try:
        return msgspec.json.decode(reply, type=dict[str, bool])["is_sleeping"]
    except (msgspec.MsgspecError, KeyError) as error:
        raise WireError(f"LMDeploy's answer to /is_sleeping has another form: {error}") from None


def _receiver_status() -> Generator[EngineRequest, bytes, dict[str, Any]]:
    try:
        return msgspec.json.decode(
            (yield EngineRequest(method="GET", path="/update_weights_from_ipc")), type=dict[str, Any]
        )
    except (TargetRejected, msgspec.MsgspecError):
        return {}
