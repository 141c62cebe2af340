"""What LMDeploy wants to hear, with its habits.

It has no pause: the only way to hold it still is to let it sleep, which drops every request and the KV cache, and to
wake its weights alone.  Sleep and waking also rebuild captured graphs, which the end of an update through shared memory
would leave on old addresses.  It cannot stage and answers for nothing that it keeps.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any, Literal

import msgspec

from weightcast.comm.share import Shared, TorchMemory
from weightcast.engines.lmdeploy.envelope import END, bucket_payload, check_readable
from weightcast.engines.lmdeploy.kept import Kept
from weightcast.errors import ConfigError, TargetRejected, WireError
from weightcast.protocols import EngineRequest, Invitation, Meeting, Sharing, Steps
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec
from weightcast.wire.messages import Ack, Close, Commit, EngineInfo, Open

_FLAT = "flattened_bucket"
Way = Literal["", "ipc", "broadcast", "checkpoint-engine"]


class LmdeployAdapter:
    """One server: a block of attention-TP ranks behind one URL."""

    packing = Packing(alignment_bytes=1, one_dtype=True, slices=False, gapless=True)
    sharing: Sharing = "ring"
    meeting: Meeting = "torch"
    in_flight = 1
    proves: frozenset[Literal["received", "resident"]] = frozenset()
    leased = False

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._kept = Kept()
        self._group = ""
        self._way: Way = ""
        self._transport = ""
        self._version: int | None = None
        self._ours = False  # it sleeps because of us
        self._mixed = False  # maybe parts of two versions, from the first bucket on
        self._still_since: float | None = None

    def specs(self) -> Sequence[TensorSpec]:
        """It does not say."""
        return ()

    def check(self, specs: Sequence[TensorSpec], *, transport: str, bucket_bytes: int) -> None:
        """As ``Adapter.check``."""
        self._transport = transport
        if transport == "checkpoint-engine" and any(rank.device == "cuda" for rank in self._info.ranks):
            raise ConfigError(
                f"LMDeploy ({self._info.model}) does not tell the UUIDs of its GPUs, which checkpoint-engine goes by",
                hint="use broadcast, or LMDeploy 0.17 or later",
            )

    def open(self, message: Open) -> Steps:
        """Let it sleep, and wake its weights."""
        if message.pause != "abort":
            raise ConfigError(
                f"LMDeploy cannot hold still with pause={message.pause!r}: sleep is its only way, which drops requests",
                hint='use pause="abort" (--pause abort)',
            )
        self._way, self._version = "", message.version
        self._kept.nothing()
        self._still_since = time.monotonic()
        if (yield from _is_asleep()):
            status = yield from _receiver_status()
            if self._transport == "checkpoint-engine" and status.get("ready") is True:
                return Ack(ok=True, state="updating")  # empty weights are awake already, and cannot be woken
        else:
            self._ours = True
            yield EngineRequest(path="/sleep?level=1")
        # Those that are awake already stay so: the call is then ignored.
        yield EngineRequest(path="/wakeup?tags=weights")
        return Ack(ok=True, state="updating")

    def join(self, invitation: Invitation) -> Steps:
        """Join a group; answered when all have met."""
        body = {
            "master_address": invitation.host,
            "master_port": invitation.port,
            "rank_offset": invitation.first_rank,
            "world_size": invitation.world_size,
            "group_name": invitation.group,
            "backend": invitation.backend,
        }
        yield from _post("/init_weights_update_group", body)
        self._group = invitation.group
        return Ack(ok=True)

    def bucket(self, session: str, layout: BucketLayout, *, group: str | None, shared: Sequence[Shared]) -> Steps:
        """A bucket comes: the engine enters the broadcast, or reads memory that it maps."""
        if group is not None:
            self._way = "broadcast"
            self._mixed = True
            if layout.size_bytes:  # an engine that is told of nothing would wait for it all the same
                yield from _post("/update_weights_from_distributed", _table(layout, group))
            return Ack(ok=True)
        self._way = "ipc"
        self._mixed = True
        memories = self._memory_of_ranks(shared)
        dtype = check_readable(layout, memories[0])
        handle = self._kept.lacks(memories, dtype)
        body = {
            "serialized_named_tensors": [bucket_payload(layout, memory, handle=handle) for memory in memories],
            "load_format": _FLAT,
            "finished": False,
        }
        self._kept.nothing()  # what it has mapped is known only once it has answered
        yield EngineRequest(path="/update_weights", body=msgspec.json.encode(body))
        self._kept.have(memories, dtype)
        return Ack(ok=True)

    def handles(self, addresses: dict[str, str]) -> Steps:
        """Where each GPU finds its sender; answered when that one has said that all is over.

        Args:
            addresses: ZeroMQ address by UUID of the GPU.
        """
        self._way = "checkpoint-engine"
        self._mixed = True
        yield from _post("/update_weights_from_ipc", {"zmq_handles": addresses})
        return Ack(ok=True)

    def close(self, message: Close) -> Steps:
        """It counts nothing; that all buckets were taken is known from its answers."""
        yield from ()
        return Ack(ok=True, state="updating")

    def commit(self, message: Commit) -> Steps:
        """Finish what modules compute from weights, then go on generating."""
        if self._way == "broadcast":
            nothing = {"names": [], "dtypes": [], "shapes": [], "group_name": self._group, "finished": True}
            yield from _post("/update_weights_from_distributed", nothing)
        elif self._way == "ipc":
            end = {"serialized_named_tensors": [END] * self._info.tp_size, "finished": True}
            yield EngineRequest(path="/update_weights", body=msgspec.json.encode(end))
            self._kept.nothing()
        self._mixed = False
        stall_s, words = (
            0.0,
            "it was asleep before this update, and is left so: POST /wakeup?tags=kv_cache when it may run",
        )
        if self._ours:
            yield EngineRequest(path="/wakeup?tags=kv_cache")
            self._ours, words = False, ""
            assert self._still_since is not None
            stall_s = time.monotonic() - self._still_since
        return Ack(
            ok=True,
            state="serving",
            version=self._version,
            ranks=self._info.tp_size,
            stall_s=stall_s,
            message=words,
        )

    def abort(self, session: str, reason: str) -> Steps:
        """Wake it if nothing has been touched, earlier either; else it sleeps until it gets all weights."""
        self._kept.nothing()
        if self._mixed:
            if self._way == "ipc":  # what it has mapped of ours it lets go of when it falls asleep
                yield from _tidy(EngineRequest(path="/sleep?level=1"))
            return Ack(ok=True, state="quarantined")
        if self._ours:
            yield EngineRequest(path="/wakeup")
            self._ours = False
        return Ack(ok=True, state="serving")

    def leave(self, group: str | None) -> Steps:
        """Leave a group; buffers were let go of at the end of each update."""
        if group is not None:
            body = msgspec.json.encode({"group_name": group})
            yield from _tidy(EngineRequest(path="/destroy_weights_update_group", body=body))
            self._group = ""
        return Ack(ok=True)

    def score(self, token_ids: Sequence[int]) -> Generator[EngineRequest, bytes, list[float]]:
        """By its own /generate, which scores a prompt where it was started with --logprobs-mode raw_logprobs."""
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
            raise WireError(f"not an answer of LMDeploy's /generate: {error}") from None
        if [token for _, token in found] != list(token_ids[1:]):
            raise WireError(
                "it scored other tokens than it was given: LMDeploy scores prompts from 0.17 on, where it was started "
                "with --logprobs-mode raw_logprobs"
            )
        return [value for value, _ in found]

    def _memory_of_ranks(self, shared: Sequence[Shared]) -> list[TorchMemory]:
        """The buffer of each engine rank: the one on its GPU."""
        return [self._memory_of(rank.rank, rank.device, shared) for rank in self._info.ranks]

    def _memory_of(self, rank: int, device: str, shared: Sequence[Shared]) -> TorchMemory:
        offered = [item.ring[rank] for item in shared if rank < len(item.ring)]
        on_host = [memory for memory in offered if memory.kind == "shm"]
        if on_host:
            return on_host[0]
        if device == "cuda":  # it does not tell: its ranks sit where the trainer's do, in the same order
            if rank < len(offered):
                return offered[rank]
        else:
            for memory in offered:
                if memory.device == device:
                    return memory
        raise ConfigError(
            f"no trainer rank has filled a buffer on GPU {device} of rank {rank} of {self._info.model}",
            hint="ipc needs a trainer rank on each of the engine's GPUs; use broadcast for the others",
        )


class _Meta(msgspec.Struct):
    input_token_logprobs: list[tuple[float, int]] | None = None


class _Generated(msgspec.Struct):
    meta_info: _Meta


class _Said(msgspec.Struct):
    success: bool
    message: str = ""


def _table(layout: BucketLayout, group: str) -> dict[str, Any]:
    """A bucket as the engine cuts it: end to end, in this order."""
    return {
        "names": [slot.spec.name for slot in layout.slots],
        "dtypes": [slot.spec.dtype for slot in layout.slots],
        "shapes": [list(slot.spec.shape) for slot in layout.slots],
        "group_name": group,
        "load_format": _FLAT,
        "finished": False,
    }


def _post(path: str, body: dict[str, Any]) -> Generator[EngineRequest, bytes, None]:
    """A request whose answer has a word on its success, which is looked at whatever its status."""
    reply = yield EngineRequest(path=path, body=msgspec.json.encode(body))
    try:
        said = msgspec.json.decode(reply, type=_Said)
    except msgspec.MsgspecError as error:
        raise WireError(f"not an answer of LMDeploy to {path}: {error}") from None
    if not said.success:
        raise WireError(f"it did not do {path}: {said.message}")


def _tidy(request: EngineRequest) -> Generator[EngineRequest, bytes, None]:
    """Ask for what is not missed if it is refused."""
    try:
        yield request
    except TargetRejected:
        return


def _is_asleep() -> Generator[EngineRequest, bytes, bool]:
    reply = yield EngineRequest(method="GET", path="/is_sleeping")
    try:
        return msgspec.json.decode(reply, type=dict[str, bool])["is_sleeping"]
    except (msgspec.MsgspecError, KeyError) as error:
        raise WireError(f"not an answer of LMDeploy to /is_sleeping: {error}") from None


def _receiver_status() -> Generator[EngineRequest, bytes, dict[str, Any]]:
    try:
        return msgspec.json.decode(
            (yield EngineRequest(method="GET", path="/update_weights_from_ipc")), type=dict[str, Any]
        )
    except (TargetRejected, msgspec.MsgspecError):
        return {}
