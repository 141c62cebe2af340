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

from weightcast.adapters.flattened import FLATTENED, bucket_body, group_body
from weightcast.adapters.lmdeploy.payload import END, bucket_payload, check_readable
from weightcast.adapters.requests import object_at, post, succeeds
from weightcast.adapters.stock import KEPT_TOWER, StockAdapter, prompt_logprobs, without_tower
from weightcast.comm.run_steps import EngineRequest, Steps
from weightcast.comm.shared_buckets import Shared, memory_of_ranks
from weightcast.errors import ConfigError, TargetRejected, WireError
from weightcast.protocols import Delivery, Invitation, Sharing
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec
from weightcast.wire.messages import Commit, Open

_SLEEP = post("/sleep?level=1")
_NO_GROUP = "not initialized"  # LMDeploy's words for a group that it does not have


class LmdeployAdapter(StockAdapter):
    """One LMDeploy server: the attention-TP ranks behind one URL."""

    packing = Packing(alignment_bytes=1, one_dtype=True, slices=False, gapless=True)
    sharing: Sharing = "ring"

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        # What the server's ranks have mapped, until an update ends or they fall asleep; None if it is not known.  A
        # bucket elsewhere must bring its handles: the server would read the old mapping and report no error.
        self._mapped: tuple[object, ...] | None = None
        self._group = ""
        self._got: Delivery | None = None  # how buckets of this session came; None before the first
        self._put_to_sleep = False  # by us; an engine that slept before is left asleep
        self.mixed = False  # also of an engine that slept before
        self._sleep_refused = False  # the engine may still map our buffers after an aborted update
        self._kept: tuple[str, ...] = ()

    def check(self, specs: Sequence[TensorSpec], *, delivery: Delivery, bucket_bytes: int) -> None:
        """As ``Adapter.check``."""
        self.delivery = delivery
        # LMDeploy does not tell whether it encodes images, and may serve the language model alone.
        self._kept = (KEPT_TOWER,) if without_tower(specs) else ()
        if delivery == "handles" and any(rank.device == "cuda" for rank in self.info.ranks):
            raise ConfigError(
                f"LMDeploy ({self.info.model}) does not tell the UUIDs of its GPUs, which checkpoint-engine needs; "
                "nothing was sent",
                hint="use broadcast, or LMDeploy 0.17 or later",
            )

    def open(self, message: Open) -> Steps:
        """Puts the engine to sleep and wakes its weights."""
        self._got, self.version = None, message.version
        self._mapped = None
        self.paused_at = time.monotonic()
        if (yield from _is_asleep()):
            status = (yield from object_at("/update_weights_from_ipc")) or {}
            if self.delivery == "handles" and status.get("ready") is True:
                return self.updating()  # empty weights are awake already, and waking them fails
        else:
            self._put_to_sleep = True
            yield _SLEEP
            self._sleep_refused = False
        # LMDeploy ignores this if its weights are awake already.
        yield post("/wakeup?tags=weights")
        return self.updating()

    def join(self, invitation: Invitation) -> Steps:
        """Joins a group; LMDeploy answers when every member has joined."""
        yield from _post("/init_weights_update_group", group_body(invitation.join))
        self._group = invitation.join.group
        return self.updating()

    def bucket(self, session: str, layout: BucketLayout, *, group: str | None, shared: Sequence[Shared]) -> Steps:
        """Sends a bucket: the engine enters the broadcast, or reads memory that it maps."""
        if group is not None:
            self._got = "group"
            self.mixed = True
            if layout.size_bytes:  # an empty bucket is not broadcast, and an engine told of it would wait for ever
                yield from _post("/update_weights_from_distributed", bucket_body(layout, group) | {"finished": False})
            return self.updating()
        self._got = "memory"
        self.mixed = True
        memories = memory_of_ranks(self.info, [item.ring for item in shared])
        dtype = check_readable(layout, memories[0])
        places = (dtype, *((one.handle, one.offset_bytes, one.size_bytes, one.turn) for one in memories))
        handle = self._mapped != places
        body = {
            "serialized_named_tensors": [bucket_payload(layout, memory, handle=handle) for memory in memories],
            "load_format": FLATTENED,
            "finished": False,
        }
        self._mapped = None  # until the engine has answered, its mappings are unknown
        yield post("/update_weights", body)
        self._mapped = places
        return self.updating()

    def handles(self, addresses: dict[str, str]) -> Steps:
        """As ``Adapter.handles``."""
        self._got = "handles"
        self.mixed = True
        yield from _post("/update_weights_from_ipc", {"zmq_handles": addresses})
        return self.updating()

    def commit(self, message: Commit) -> Steps:
        """Finishes values that modules compute from weights, then wakes the KV cache."""
        if self._got == "group":
            end = {"names": [], "dtypes": [], "shapes": [], "group_name": self._group, "finished": True}
            yield from _post("/update_weights_from_distributed", end)
        elif self._got == "memory":
            end = {"serialized_named_tensors": [END] * self.info.tp_size, "finished": True}
            yield post("/update_weights", end)
            self._mapped = None
            self._sleep_refused = False
        words = "it was asleep before this update and still sleeps: POST /wakeup?tags=kv_cache to run it"
        if self._put_to_sleep:
            yield post("/wakeup?tags=kv_cache")
            self._put_to_sleep, words = False, ""
        else:
            self.paused_at = 0.0
        return self.committed(message=words, not_updated=self._kept)

    def abort(self, session: str, reason: str) -> Steps:
        """Wakes the engine if no bucket has changed its weights; otherwise it sleeps until a full update."""
        self._mapped = None
        if self.mixed and self._got == "memory":
            # LMDeploy unmaps our buffers when it falls asleep.  If it refuses, `leave` tries again and reports it.
            self._sleep_refused = not (yield from succeeds(_SLEEP))
        elif self._put_to_sleep and not self.mixed:
            yield post("/wakeup")
            self._put_to_sleep = False
        return self.ended()

    def leave(self, group: str | None) -> Steps:
        """Leaves the group, or unmaps buffers that an aborted update has left mapped."""
        if group is None:
            if self._sleep_refused:
                yield _SLEEP
                self._sleep_refused = False
            return self.updating()
        self._group = ""
        try:
            yield post("/destroy_weights_update_group", {"group_name": group})
        except TargetRejected as error:
            if _NO_GROUP not in str(error):
                raise
        return self.updating()

    def score(self, token_ids: Sequence[int]) -> Generator[EngineRequest, bytes, list[float]]:
        """Asks ``/generate``, which scores a prompt if LMDeploy was started with ``--logprobs-mode raw_logprobs``."""
        body = {
            "input_ids": list(token_ids),
            "return_logprob": True,
            "logprob_start_len": 0,
            "max_tokens": 0,
            "temperature": 1.0,
        }
        needs = "to score a prompt it needs version 0.17 and --logprobs-mode raw_logprobs"
        return prompt_logprobs((yield post("/generate", body)), token_ids, engine="LMDeploy", needs=needs)


class _Said(msgspec.Struct):
    success: bool
    message: str = ""


def _post(path: str, body: dict[str, Any]) -> Generator[EngineRequest, bytes, None]:
    """Sends a request whose answer has a ``success`` field, and checks that field."""
    reply = yield post(path, body)
    try:
        said = msgspec.json.decode(reply, type=_Said)
    except msgspec.MsgspecError as error:
        raise WireError(f"LMDeploy's answer to {path} has another form: {error}") from None
    if not said.success:
        raise WireError(f"LMDeploy failed at {path}: {said.message}")


def _is_asleep() -> Generator[EngineRequest, bytes, bool]:
    answer = (yield from object_at("/is_sleeping")) or {}
    if not isinstance(answer.get("is_sleeping"), bool):
        raise WireError("LMDeploy's answer to /is_sleeping has another form")
    return answer["is_sleeping"]
