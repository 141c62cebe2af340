"""Adapter of stock vLLM's weight transfer: init, start, update, finish; backends ``nccl`` and ``ipc``.

vLLM cannot stage: buckets go straight into live weights.

vLLM's API changed between versions.  A request to a route that the server lacks is skipped.  The version decides which
form of ``init_info`` is tried first; if the server refuses that form, the adapter tries the next one.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from weightcast.adapters.requests import if_there, post, succeeds
from weightcast.adapters.stock import StockAdapter, check_encoders
from weightcast.adapters.vllm import requests
from weightcast.adapters.vllm.payload import ID_KEY, ipc_handles, stored_id
from weightcast.adapters.vllm.server_info import SERVER_INFO, Facts
from weightcast.comm.run_steps import EngineRequest, Steps
from weightcast.comm.shared_buckets import Shared
from weightcast.errors import ConfigError, TargetRejected
from weightcast.protocols import Delivery, Invitation, Meeting, Sharing
from weightcast.wire.answers import Ack
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec
from weightcast.wire.messages import Commit, Open
from weightcast.wire.vllm_versions import vllm_version

_SHUTDOWN = post("/shutdown_weight_transfer_engine")
_ALREADY_ACTIVE = "already active"  # vLLM's words for a session that another trainer has left open
# A worker's words for fields of init_info that its version does not know or requires.
_OTHER_FORM = ("Invalid init_info", "unexpected keyword", "required positional", "required keyword")
# Up to 0.26 `packed` and its size belong to every update; from 0.29 on they belong to `init_info`.
_NEW_FORM = (0, 27)
# Before 0.32 every request takes one new CUDA stream for each buffer and receives on the first.  Torch hands out 32
# streams in turn, and its allocator keeps memory for each.  With 32 buffers the first stream is always the same.
_STREAMS = 32


class VllmAdapter(StockAdapter):
    """One vLLM server with ``--weight-transfer-config``."""

    packing = Packing(alignment_bytes=1, slices=False, gapless=True)
    sharing: Sharing = "torch"
    meeting: Meeting = "nccl-id"

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        self._facts = Facts()
        self._started = False
        self._in_group = False
        self._told_packed = False
        self._update_fields: Mapping[str, Any] = {}  # fields that this version wants in every update

    def check(self, specs: Sequence[TensorSpec], *, delivery: Delivery, bucket_bytes: int) -> None:
        """As ``Adapter.check``; keeps the delivery for ``open``."""
        check_encoders(self.info, specs)
        self.delivery = delivery

    def open(self, message: Open) -> Steps:
        """Pauses the engine and starts an update; ``ConfigError`` if a cache would give results of the old weights."""
        self.version = message.version
        self._started = False
        self.paused_at = 0.0
        self._facts = Facts.of((yield from if_there(SERVER_INFO)))
        why = self._facts.never_emptied or self._facts.no_pause().get(message.pause)
        if why:
            raise ConfigError(
                f"{self.info.engine} cannot be updated with pause={message.pause!r}: {why}; nothing was changed"
            )
        started = time.monotonic()
        yield from requests.pause(message.pause)
        self.paused_at = started
        yield from self._start_update()
        return self.updating()

    def join(self, invitation: Invitation) -> Steps:
        """Joins a group by NCCL's id; versions before 0.29 read the id from the group's store."""
        yield from self._release_old_group()
        join = invitation.join
        ranks = {"rank_offset": join.first_rank, "world_size": join.world_size}
        packed = {
            "packed": True,
            "packed_buffer_size_bytes": invitation.bucket_bytes,
            "packed_num_buffers": _STREAMS,
        }
        by_id = {"nccl_unique_id_b64": base64.b64encode(invitation.unique_id).decode()}
        by_store = {"master_address": join.host, "master_port": join.port}
        forms = [(ranks | by_id | packed, {}), (ranks | by_store | packed, {}), (ranks | by_store, packed)]
        yield from self._init(forms)
        self._in_group = True
        yield from self._start_session()
        return self.updating()

    def stored(self, unique_id: bytes) -> Mapping[str, bytes]:
        """As ``Adapter.stored``."""
        return {ID_KEY: stored_id(unique_id)}

    def bucket(self, session: str, layout: BucketLayout, *, group: str | None, shared: Sequence[Shared]) -> Steps:
        """Sends a bucket as one chunk.  vLLM answers when it has loaded the chunk or copied it for a later layer."""
        body = {
            "names": [slot.spec.name for slot in layout.slots],
            "dtype_names": [slot.spec.dtype for slot in layout.slots],
            # Versions that want `packed` in every update cannot view a scalar; their loaders accept one element.
            "shapes": [list(slot.spec.shape or ((1,) if self._update_fields else ())) for slot in layout.slots],
            **self._update_fields,
        }
        if group is None:
            body["tensor_sizes"] = [slot.size_bytes for slot in layout.slots]
            body["ipc_handles_pickled"] = ipc_handles(shared)
        if layout.size_bytes:  # an empty bucket is not broadcast, and an engine told of it would wait for ever
            self.mixed = True
            yield post("/update_weights", {"update_info": body})
        return self.updating()

    def commit(self, message: Commit) -> Steps:
        """Finishes the weight update, stamps the version and resumes."""
        version = str(self.version)
        yield from self._finish_update(version)
        # Some versions take the version with the finish, some have this route, and some have no versions.
        yield from if_there(post("/update_weight_version", {"new_version": version}))
        yield from requests.resume()
        return self.committed(not_updated=("the draft model",) if self._facts.draft else ())

    def abort(self, session: str, reason: str) -> Steps:
        """Resumes the engine if no bucket was sent; the trainer has aborted the group as well.

        vLLM cannot restore the old weights, so after a bucket it stays paused until an update succeeds.
        """
        self._in_group = False
        if self.mixed or (self._started and not (yield from self._try_finish())):
            return Ack(ok=True, state="quarantined", ranks=self.info.tp_size)
        self._started = False
        if self.paused_at:
            yield from requests.resume()
        return self.ended()

    def score(self, token_ids: Sequence[int]) -> Generator[EngineRequest, bytes, list[float]]:
        """Asks ``/v1/completions`` for ``prompt_logprobs``."""
        return (yield from requests.score(self.info.model, token_ids))

    def leave(self, group: str | None) -> Steps:
        """Releases the communicator or the mapped buffers, if this version has a route for it."""
        self._in_group = False
        self._told_packed = False
        yield from if_there(_SHUTDOWN)
        return Ack(ok=True, ranks=self.info.tp_size)

    def _start_update(self) -> Generator[EngineRequest, bytes, None]:
        if self.delivery == "memory" and not self._told_packed:
            yield from self._init([({"packed": True}, {}), ({}, {"packed": True})])
            self._told_packed = True
        # An open session would keep `join` from releasing the old group, so without a group `join` starts it.
        if self.delivery == "memory" or self._in_group:
            yield from self._start_session()

    def _finish_update(self, version: str) -> Generator[EngineRequest, bytes, None]:
        yield post("/finish_weight_update", {"weight_version": version})
        self._started = False

    def _try_finish(self) -> Generator[EngineRequest, bytes, bool]:
        return succeeds(post("/finish_weight_update"))

    def _init(
        self, forms: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
    ) -> Generator[EngineRequest, bytes, None]:
        """Initialises the backend; ``forms`` pairs ``init_info`` with fields for every update, newest version first."""
        version = vllm_version(self.info.engine.removeprefix("vllm ")) or _NEW_FORM
        order = list(forms) if version >= _NEW_FORM else list(reversed(forms))
        for number, (init_info, update_fields) in enumerate(order, 1):
            try:
                yield post("/init_weight_transfer_engine", {"init_info": init_info})
            except TargetRejected as error:
                if number == len(order) or not any(words in str(error) for words in _OTHER_FORM):
                    raise
                if self.info.tp_size > 1:
                    # vLLM has read one worker's refusal.  It would take the other workers' refusals for answers to the
                    # next requests (0.25.1: the second form got the refusal of the first).
                    raise TargetRejected(
                        str(error),
                        url=error.url,
                        hint="this vLLM takes another form of init_info; restart it and report its version",
                        status=error.status,
                    ) from error
                continue
            self._update_fields = update_fields
            return

    def _start_session(self) -> Generator[EngineRequest, bytes, None]:
        """Starts a session; first ends one that a dead trainer has left open, since all weights are sent anew."""
        start = post("/start_weight_update", {"is_checkpoint_format": True})
        try:
            yield start
        except TargetRejected as error:
            if _ALREADY_ACTIVE not in str(error):
                raise
            yield from self._try_finish()
            yield start
        self._started = True

    def _release_old_group(self) -> Generator[EngineRequest, bytes, None]:
        """Releases the previous group; first ends a session that a dead trainer has left open."""
        try:
            yield from if_there(_SHUTDOWN)
        except TargetRejected:
            yield from self._try_finish()
            yield from succeeds(_SHUTDOWN)
