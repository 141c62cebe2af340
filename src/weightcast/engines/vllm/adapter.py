"""vLLM's own weight transfer: init, start, update, finish; backends ``nccl`` and ``ipc``.

What changed between its versions is asked where that is possible: a route that is not there is left out.  Which form
of ``init_info`` comes first goes by the version, and one that is refused is followed by the next.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal

from weightcast.comm.share import Shared
from weightcast.engines.vllm import steps
from weightcast.engines.vllm.checksums import as_one, checksums, compared
from weightcast.engines.vllm.envelope import ID_KEY, ipc_handles, stored_id
from weightcast.engines.vllm.facts import Facts
from weightcast.engines.vllm.steps import if_there, post, whatever
from weightcast.errors import ConfigError, TargetRejected
from weightcast.protocols import EngineRequest, Invitation, Meeting, Sharing, Steps
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec
from weightcast.wire.messages import Ack, Close, Commit, EngineInfo, Open

SERVER_INFO = EngineRequest(method="GET", path="/server_info?config_format=json")

_ACTIVE = "already active"  # in vLLM's words for a session that somebody has left open
# What a worker says to fields that its version does not know, or lacks.
_OTHER_FORM = ("Invalid init_info", "unexpected keyword", "required positional", "required keyword")
# Up to 0.26 `packed` and its size belong to every update; 0.29 has them in `init_info`, and in between it changed.
_NEW_FORM = (0, 27)
# Before 0.32 every request takes as many new CUDA streams as it names buffers, and receives its one chunk on the first;
# torch hands out 32 in turn, and its allocator keeps for each what that once held.  With all 32 it is always the same.
_STREAMS = 32


class VllmAdapter:
    """One vLLM server with ``--weight-transfer-config``.  It cannot stage: buckets go straight into live weights."""

    packing = Packing(alignment_bytes=1, slices=False, gapless=True)
    sharing: Sharing = "torch"
    meeting: Meeting = "nccl-id"
    in_flight = 1
    proves: frozenset[Literal["received", "resident"]] = frozenset()
    leased = False

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._transport = ""
        self._bucket_bytes = 0
        self._facts = Facts()
        self._in_group = False
        self._told_packed = False
        self._old_form: Mapping[str, Any] = {}
        self._paused_s = 0.0
        self._started = False
        # Maybe parts of two versions: of ours, from the first bucket on, or of whoever left it paused before us.
        self._mixed = info.paused
        self._version = 0
        self._wants_checksums = False
        self._checksums: dict[str, str] = {}

    def specs(self) -> Sequence[TensorSpec]:
        """vLLM does not say."""
        return ()

    def check(self, specs: Sequence[TensorSpec], *, transport: str, bucket_bytes: int) -> None:
        """A bucket is one chunk of vLLM's, so a tensor must fit into it whole."""
        self._transport, self._bucket_bytes = transport, bucket_bytes

    def open(self, message: Open) -> Steps:
        """Hold still and open a session.

        Raises:
            ConfigError: This pause would leave cache of the old weights to new requests.
        """
        self._version = message.version
        self._started = False
        self._paused_s = 0.0
        self._facts = Facts.of((yield from if_there(SERVER_INFO)))
        refuse_stale_cache(message, self._facts, self._info.engine)
        self._wants_checksums = message.digest == "sha256" and message.verify != "none"
        self._checksums = (yield from checksums()) if self._wants_checksums else {}
        started = time.monotonic()
        yield from steps.pause(message.pause)
        self._paused_s = started
        if self._transport == "ipc" and not self._told_packed:
            yield from self._tell_packed()
        # Before a group is made nothing may be open: what is left of an old one can only be shut down then.
        if self._transport == "ipc" or self._in_group:
            yield from self._start()
        checksum = as_one(self._checksums)
        return Ack(ok=True, state="updating", ranks=self._info.tp_size, checksum=checksum)

    def join(self, invitation: Invitation) -> Steps:
        """Join a group by NCCL's id; the versions before 0.29 or so find it in the group's store."""
        yield from self._shut_down()
        ranks = {"rank_offset": invitation.first_rank, "world_size": invitation.world_size}
        packed = {
            "packed": True,
            "packed_buffer_size_bytes": invitation.bucket_bytes,
            "packed_num_buffers": _STREAMS,
        }
        by_id = {"nccl_unique_id_b64": base64.b64encode(invitation.unique_id).decode()}
        by_store = {"master_address": invitation.host, "master_port": invitation.port}
        forms = [(ranks | by_id | packed, {}), (ranks | by_store | packed, {}), (ranks | by_store, packed)]
        yield from self._init(forms)
        self._in_group = True
        yield from self._start()
        return Ack(ok=True, state="updating", ranks=self._info.tp_size)

    def stored(self, unique_id: bytes) -> Mapping[str, bytes]:
        """As ``protocols.Storing.stored``."""
        return {ID_KEY: stored_id(unique_id)}

    def bucket(self, session: str, layout: BucketLayout, *, group: str | None, shared: Sequence[Shared]) -> Steps:
        """One chunk; answered when it is loaded, or kept as a copy until its layer is complete."""
        body = {
            "names": [slot.spec.name for slot in layout.slots],
            "dtype_names": [slot.spec.dtype for slot in layout.slots],
            # The versions that want packed here cannot view a scalar; their loaders take one element for one.
            "shapes": [list(slot.spec.shape or ((1,) if self._old_form else ())) for slot in layout.slots],
            **self._old_form,
        }
        if group is None:
            body["tensor_sizes"] = [slot.size_bytes for slot in layout.slots]
            body["ipc_handles_pickled"] = ipc_handles(shared)
        if layout.size_bytes:  # nothing is broadcast otherwise, and an engine that waits for it would wait for ever
            self._mixed = True
            yield post("/update_weights", {"update_info": body})
        return Ack(ok=True, state="updating", ranks=self._info.tp_size)

    def close(self, message: Close) -> Steps:
        """vLLM needs no word for it."""
        yield from ()
        return Ack(ok=True, state="updating", ranks=self._info.tp_size)

    def commit(self, message: Commit) -> Steps:
        """Finish what the last layers wait for, stamp the version, go on."""
        version = str(self._version)
        if (yield from if_there(post("/finish_weight_update", {"weight_version": version}))) is not None:
            self._started = False
        # Versions that take none with the request above have a route for it, or know no versions.
        yield from if_there(post("/update_weight_version", {"new_version": version}))
        yield from steps.resume()
        self._mixed = False
        stall_s = time.monotonic() - self._paused_s
        found = (yield from checksums()) if self._wants_checksums else {}
        return Ack(
            ok=True,
            version=self._version,
            ranks=self._info.tp_size,
            stall_s=stall_s,
            not_updated=("the draft model",) if self._facts.draft else (),
            checksum=as_one(found),
            message=compared(self._checksums, found),
        )

    def abort(self, session: str, reason: str) -> Steps:
        """After a first bucket nothing brings the old weights back: it stays paused, until an update has succeeded."""
        self._in_group = False  # whoever aborts has aborted the group as well
        if self._mixed:
            return Ack(ok=True, state="quarantined", ranks=self._info.tp_size)
        if self._started and not (yield from whatever(post("/finish_weight_update"))):
            return Ack(ok=True, state="quarantined", ranks=self._info.tp_size)
        self._started = False
        if self._paused_s:
            yield from steps.resume()
        return Ack(ok=True, ranks=self._info.tp_size)

    def leave(self, group: str | None) -> Steps:
        """Let go of the communicator, or of mapped buffers."""
        self._in_group = False
        self._told_packed = False
        yield from whatever(post("/shutdown_weight_transfer_engine"))
        return Ack(ok=True, ranks=self._info.tp_size)

    def score(self, token_ids: Sequence[int]) -> Generator[EngineRequest, bytes, list[float]]:
        """By ``prompt_logprobs``."""
        return (yield from steps.score(self._info.model, token_ids))

    def _tell_packed(self) -> Generator[EngineRequest, bytes, None]:
        yield from self._init([({"packed": True}, {}), ({}, {"packed": True})])
        self._told_packed = True

    def _init(
        self, forms: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
    ) -> Generator[EngineRequest, bytes, None]:
        """Initialise.  Forms are newest first; what an old one lacks goes into every update instead."""
        order = list(forms) if version_of(self._info.engine) >= _NEW_FORM else list(reversed(forms))
        for number, (init_info, in_updates) in enumerate(order, 1):
            try:
                yield post("/init_weight_transfer_engine", {"init_info": init_info})
            except TargetRejected as error:
                if number == len(order) or not any(words in str(error) for words in _OTHER_FORM):
                    raise
                if self._info.tp_size > 1:
                    # It has read the refusal of one worker.  Those of the others wait, and would be taken for the
                    # answers to what is asked next (0.25.1: the second form got the refusal of the first).
                    raise TargetRejected(
                        str(error),
                        url=error.url,
                        hint="this vLLM takes another form of init_info; restart it and report its version",
                        status=error.status,
                    ) from error
                continue
            self._old_form = in_updates
            return

    def _start(self) -> Generator[EngineRequest, bytes, None]:
        """Open a session; end one that a trainer has left open, which is then all sent anew."""
        start = post("/start_weight_update", {"is_checkpoint_format": True})
        try:
            answer = yield from if_there(start)
        except TargetRejected as error:
            if _ACTIVE not in str(error):
                raise
            yield from whatever(post("/finish_weight_update"))
            answer = yield from if_there(start)
        self._started = answer is not None  # the versions before 0.22 know no sessions

    def _shut_down(self) -> Generator[EngineRequest, bytes, None]:
        """Let go of the group before; an open session, of a trainer that is gone, is in its way."""
        shutdown = post("/shutdown_weight_transfer_engine")
        try:
            yield from if_there(shutdown)
        except TargetRejected:
            yield from whatever(post("/finish_weight_update"))
            yield from whatever(shutdown)


def version_of(engine: str) -> tuple[int, ...]:
    """Major and minor number out of ``"vllm 0.25.1"``; what is no release (``0.1.dev7``) counts as new."""
    found = re.search(r"(\d+)\.(\d+)\.\d", engine)
    return (int(found[1]), int(found[2])) if found else _NEW_FORM


def refuse_stale_cache(message: Open, facts: Facts, engine: str) -> None:
    """``in_place`` and prefix caching do not go together.

    Raises:
        ConfigError: They would.
    """
    if message.pause == "in_place" and facts.prefix_caching:
        raise ConfigError(
            f"in_place keeps cache of the old weights, which the prefix caching of {engine} would give to new requests",
            hint="pause retract, or start vLLM with --no-enable-prefix-caching",
        )
