"""What an unpatched SGLang server wants to hear, in which order.

It cannot stage: it is paused at ``open``, buckets go straight into what it serves with, and ``commit`` finalises,
flushes once, stamps the version and lets it go on.  An update that breaks off after a bucket leaves it paused.

Servers with weight-update sessions (``/begin_weight_update``) want every bucket inside one; older ones have no such
route and answer 404.  Which of the two it is is asked once and remembered, never concluded from a version.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence
from typing import Any, Literal

import msgspec

from weightcast.comm.share import Shared, TorchMemory
from weightcast.engines.sglang.envelope import bucket_payload
from weightcast.errors import ConfigError, TargetRejected, WireError
from weightcast.protocols import EngineRequest, Invitation, Meeting, Sharing, Steps
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec
from weightcast.wire.messages import Ack, Close, Commit, EngineInfo, Open

_ABSENT = (404, 405)
_MARGIN_S = 5.0
_BUCKET = "flattened_bucket"
_WITHOUT_SESSION = ("disk", "checkpoint-engine")
# `wait` has no word of its own there: see `_hold_still`.
_PAUSE_WORDS = {"abort": "abort", "retract": "retract", "in_place": "in_place", "wait": "retract"}


class SglangAdapter:
    """One SGLang server during its updates."""

    packing = Packing(alignment_bytes=1, one_dtype=False, slices=False, gapless=True)
    sharing: Sharing = "torch"
    meeting: Meeting = "torch"
    in_flight = 1
    proves: frozenset[Literal["received", "resident"]] = frozenset()
    leased = False

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._has_sessions: bool | None = None  # None until it was asked
        self._has_checker: bool | None = None
        self._groups: set[str] = set()
        self._session_open = False
        self._transport = ""
        self._paused_at = 0.0
        self._buckets = 0
        # Maybe parts of two versions: of ours, from the first bucket on, or of whoever left it paused before us.
        self._mixed = info.paused
        self._pause = "abort"
        self._version = 0
        self._wants_checksum = False
        self._checksum = ""

    def specs(self) -> Sequence[TensorSpec]:
        """It does not tell what a full update holds, and skips names that it does not know."""
        return ()

    def check(self, specs: Sequence[TensorSpec], *, transport: str, bucket_bytes: int) -> None:
        """As ``Adapter.check``: environment that must agree, tensors that it cannot take."""
        self._transport = transport
        empty = [spec.name for spec in specs if spec.size_bytes == 0]
        if empty:
            raise ConfigError(
                f"{self._info.engine} takes no empty tensors: {', '.join(empty[:6])}", hint="leave them out"
            )
        on_gpu = any(rank.device != "cpu" for rank in self._info.ranks)
        if transport == "broadcast" and on_gpu and "NCCL_CUMEM_ENABLE" not in os.environ:
            raise ConfigError(
                "NCCL_CUMEM_ENABLE is not set here, and SGLang sets it to 0 for itself: the two would never meet",
                hint="export NCCL_CUMEM_ENABLE=0 before the trainer starts, or what the server was started with",
            )

    # -- an update

    def open(self, message: Open) -> Steps:
        """Pause, look at what it keeps, and begin."""
        self._buckets = 0
        self._session_open = False
        self._pause = message.pause
        self._version = message.version
        self._wants_checksum = message.verify in ("resident", "behaviour")
        if self._wants_checksum:
            self._checksum = yield from self._ask_checksum()
        if self._transport == "disk":
            yield from self._all_ranks()  # before anything moves: has it a way to say so?
        yield from self._hold_still(message.timeout_s)
        if self._transport not in _WITHOUT_SESSION:
            yield from self._begin()
        return self._ack(checksum=self._checksum)

    def join(self, invitation: Invitation) -> Steps:
        """Join a group; answered when everybody is there."""
        self._groups.add(invitation.group)
        yield _post(
            "/init_weights_update_group",
            master_address=invitation.host,
            master_port=invitation.port,
            rank_offset=invitation.first_rank,
            world_size=invitation.world_size,
            group_name=invitation.group,
            backend=invitation.backend,
        )
        return self._ack()

    def bucket(self, session: str, layout: BucketLayout, *, group: str | None, shared: Sequence[Shared]) -> Steps:
        """A bucket, from the group or from shared memory.  The cache is left alone until the end."""
        self._buckets += 1
        self._mixed = True
        if group is not None:
            yield _post(
                "/update_weights_from_distributed",
                names=[slot.spec.name for slot in layout.slots],
                dtypes=[slot.spec.dtype for slot in layout.slots],
                shapes=[slot.shape for slot in layout.slots],
                group_name=group,
                load_format=_BUCKET,
                flush_cache=False,
            )
        else:
            yield _post(
                "/update_weights_from_tensor",
                serialized_named_tensors=[bucket_payload(layout, memory) for memory in self._one_for_each(shared)],
                load_format=_BUCKET,
                flush_cache=False,
            )
        return self._ack()

    def handles(self, addresses: dict[str, str]) -> Steps:
        """As ``transports.checkpoint_engine.TakesHandles``.  Without a session: SGLang wants none here."""
        self._buckets += 1
        self._mixed = True
        yield _post("/update_weights_from_ipc", zmq_handles=addresses, flush_cache=False)
        return self._ack()

    def load_folder(self, session: str, folder: str) -> Steps:
        """Load a checkpoint folder.  The server then calls its model by that path, and there is no way around that."""
        self._buckets += 1
        self._mixed = True
        yield _post("/update_weights_from_disk", model_path=folder, flush_cache=False)
        yield from self._all_ranks()  # that answer was rank 0's alone, and the folder is about to go
        return self._ack()

    def close(self, message: Close) -> Steps:
        """There is nothing to say: the next thing that it hears is the end."""
        yield from ()
        return self._ack()

    def commit(self, message: Commit) -> Steps:
        """Finalise, flush, look, stamp, go on."""
        if self._session_open:
            yield _post("/end_weight_update")
            self._session_open = False
        kept = yield from self._flush()
        words = [kept] if kept else []
        checksum = ""
        if self._wants_checksum:
            checksum = yield from self._ask_checksum()
            if checksum:
                words.append(_compared(self._checksum, checksum, self._info.tp_size))
        yield from self._stamp()
        yield _post("/continue_generation")
        self._mixed = False
        stall_s = time.monotonic() - self._paused_at
        return self._ack(version=self._version, stall_s=stall_s, message="; ".join(words), checksum=checksum)

    def abort(self, session: str, reason: str) -> Steps:
        """Before any bucket it goes on with what it has; after one, of an earlier update too, it stays paused."""
        if self._session_open:
            self._session_open = False
            try:
                yield _post("/end_weight_update")
            except TargetRejected:
                if not self._buckets:
                    raise
        if self._mixed:
            return self._ack(state="quarantined")
        yield _post("/continue_generation")
        return self._ack()

    def leave(self, group: str | None) -> Steps:
        """Leave a group; memory that it mapped it lets go by itself after each bucket."""
        if group is not None and group in self._groups:
            self._groups.discard(group)
            try:
                yield _post("/destroy_weights_update_group", group_name=group)
            except TargetRejected as error:
                if error.status != 400:  # it never got as far as joining
                    raise
        return self._ack()

    def score(self, token_ids: Sequence[int]) -> Generator[EngineRequest, bytes, list[float]]:
        """Log-probabilities of a prompt; the one token that has to be generated with it is thrown away."""
        reply = yield _post(
            "/generate",
            input_ids=list(token_ids),
            sampling_params={"temperature": 0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
        )
        try:
            scored = msgspec.json.decode(reply)["meta_info"]["input_token_logprobs"]
            found = [(float(entry[0]), int(entry[1])) for entry in scored[1:]]
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError, IndexError) as error:
            raise WireError(f"/generate answers without log-probabilities of the prompt: {error}") from None
        if [token for _, token in found] != list(token_ids[1:]):
            raise WireError("/generate answers with log-probabilities of other tokens than were sent")
        return [logprob for logprob, _ in found]

    # -- parts of a step

    def _hold_still(self, timeout_s: float) -> Generator[EngineRequest, bytes, None]:
        """Pause.  For ``wait``: wait until a moment when nothing runs, then pause, keeping what came since."""
        if self._pause == "wait":
            patience_s = max(1.0, timeout_s - _MARGIN_S)
            try:
                yield EngineRequest(path=f"/flush_cache?timeout={patience_s:g}")
            except TargetRejected as error:
                error.add_note("pause=wait needs a moment without requests; retract keeps them all the same")
                raise
        self._paused_at = time.monotonic()
        yield _post("/pause_generation", mode=_PAUSE_WORDS[self._pause])

    def _all_ranks(self) -> Generator[EngineRequest, bytes, None]:
        """Answered when every rank has come to it, and so has done all that it was asked to do before."""
        if self._info.tp_size > 1:
            yield _post("/weights_checker", action="checksum")

    def _begin(self) -> Generator[EngineRequest, bytes, None]:
        if self._has_sessions is False:
            return
        try:
            yield _post("/begin_weight_update")
        except TargetRejected as error:
            if error.status in _ABSENT:
                self._has_sessions = False
                return
            if error.status != 400:
                raise
            # A trainer that is gone left one open.  All that it wrote is about to be overwritten.
            yield _post("/end_weight_update")
            yield _post("/begin_weight_update")
        self._has_sessions = True
        self._session_open = True

    def _flush(self) -> Generator[EngineRequest, bytes, str]:
        """Forget what was computed with the old weights; what could not be forgotten, in words."""
        try:
            yield EngineRequest(path="/flush_cache")
        except TargetRejected as error:
            if error.status != 400 or self._pause != "in_place":
                raise
            return "requests held in place keep their cache, and so does the prefix cache, until the next flush"
        return ""

    def _ask_checksum(self) -> Generator[EngineRequest, bytes, str]:
        """The server's own checksum over all ranks; empty if it has none to give."""
        if self._has_checker is False:
            return ""
        try:
            reply = yield _post("/weights_checker", action="checksum")
        except TargetRejected as error:
            if error.status in _ABSENT:
                self._has_checker = False
            return ""  # some models it cannot look at; that is no reason not to serve them
        self._has_checker = True
        try:
            answer: dict[str, Any] = msgspec.json.decode(reply, type=dict[str, Any])
            ranks: list[dict[str, Any]] = answer.get("ranks") or []
            if len(ranks) != self._info.tp_size:
                return ""
            return str(answer.get("per_engine_checksum") or "")[:64]
        except msgspec.MsgspecError:
            return ""

    def _stamp(self) -> Generator[EngineRequest, bytes, None]:
        try:
            yield _post("/update_weight_version", new_version=str(self._version), abort_all_requests=False)
        except TargetRejected as error:
            if error.status not in _ABSENT:
                raise

    def _one_for_each(self, shared: Sequence[Shared]) -> list[TorchMemory]:
        """For each rank the buffer on its own GPU, as exported for it alone."""
        found: list[TorchMemory] = []
        for rank in self._info.ranks:
            near = [item for item in shared if item.torch and item.torch[0].device == rank.device]
            if not near and rank.device == "cuda":  # it does not tell: as the trainer's ranks sit
                near = list(shared[rank.rank : rank.rank + 1])
            if not near:
                there = ", ".join(item.torch[0].device for item in shared if item.torch)
                raise WireError(f"rank {rank.rank} is on {rank.device}; buffers are on {there or 'no GPU'}")
            found.append(near[0].torch[rank.rank])
        return found

    def _ack(
        self,
        *,
        state: Literal["serving", "quarantined"] = "serving",
        version: int | None = None,
        stall_s: float = 0.0,
        message: str = "",
        checksum: str = "",
    ) -> Ack:
        return Ack(
            ok=True,
            state=state,
            version=version if version is not None else self._info.version,
            ranks=self._info.tp_size,
            stall_s=stall_s,
            message=message,
            checksum=checksum,
        )


def _post(path: str, **body: object) -> EngineRequest:
    return EngineRequest(path=path, body=msgspec.json.encode(body))


def _compared(before: str, after: str, ranks: int) -> str:
    of = "1 rank" if ranks == 1 else f"{ranks} ranks"
    if not before:
        return f"its own checksum over {of} is {after[:16]}"
    if before == after:
        return f"its own checksum over {of} is {after[:16]}, as before: the same weights again"
    return f"its own checksum over {of} went from {before[:16]} to {after[:16]}"
