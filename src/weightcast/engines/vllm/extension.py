"""vLLM with our worker extension: for versions that have no weight transfer of their own.

``/collective_rpc`` runs a method of every worker and takes strings only; ours (``plugins/vllm/extension.py``) take the
messages of ``wire.messages``.  It loads as vLLM's own weight transfer does, so it can no more stage or prove than that.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Literal

from weightcast.comm.share import Shared
from weightcast.engines.vllm import steps
from weightcast.engines.vllm.adapter import SERVER_INFO, refuse_stale_cache
from weightcast.engines.vllm.checksums import as_one, checksums, compared
from weightcast.engines.vllm.facts import Facts
from weightcast.engines.vllm.steps import if_there, post, whatever
from weightcast.protocols import EngineRequest, Invitation, Meeting, Sharing, Steps
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec
from weightcast.wire.messages import (
    Ack,
    Announce,
    BroadcastSource,
    Close,
    Commit,
    EngineInfo,
    IpcSource,
    Join,
    Leave,
    Message,
    Open,
    encode,
)


class ExtensionAdapter:
    """One vLLM server with ``--worker-extension-cls weightcast.plugins.vllm.extension.Extension``."""

    packing = Packing(alignment_bytes=256, slices=False)
    sharing: Sharing = "weightcast"
    meeting: Meeting = "weightcast"
    in_flight = 1
    proves: frozenset[Literal["received", "resident"]] = frozenset()
    leased = False

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._facts = Facts()
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
        """It takes what our receiver takes, but whole tensors only."""

    def open(self, message: Open) -> Steps:
        """Hold still; a session that was left open is closed."""
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
        yield _call("weightcast_start")
        self._started = True
        checksum = as_one(self._checksums)
        return Ack(ok=True, state="updating", ranks=self._info.tp_size, checksum=checksum)

    def join(self, invitation: Invitation) -> Steps:
        """Join a group as our receiver does."""
        return self._apply(
            Join(
                session=invitation.session,
                group=invitation.group,
                host=invitation.host,
                port=invitation.port,
                token=invitation.token,
                first_rank=invitation.first_rank,
                world_size=invitation.world_size,
                backend=invitation.backend,
                timeout_s=invitation.timeout_s,
            )
        )

    def bucket(self, session: str, layout: BucketLayout, *, group: str | None, shared: Sequence[Shared]) -> Steps:
        """A bucket comes, from a group or from mapped memory."""
        self._mixed = True
        if group is not None:
            return self._apply(Announce(session=session, layout=layout, source=BroadcastSource(group=group)))
        handles = tuple(item.memory for item in shared if item.memory is not None)
        return self._apply(Announce(session=session, layout=layout, source=IpcSource(handles=handles)))

    def close(self, message: Close) -> Steps:
        """Nothing to be said."""
        yield from ()
        return Ack(ok=True, state="updating", ranks=self._info.tp_size)

    def commit(self, message: Commit) -> Steps:
        """Finish what the last layers wait for, stamp the version, go on."""
        yield _call("weightcast_finish")
        self._started = False
        yield from if_there(post("/update_weight_version", {"new_version": str(self._version)}))
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
        if self._mixed:
            return Ack(ok=True, state="quarantined", ranks=self._info.tp_size)
        if self._started and not (yield from whatever(_call("weightcast_finish"))):
            return Ack(ok=True, state="quarantined", ranks=self._info.tp_size)
        self._started = False
        if self._paused_s:
            yield from steps.resume()
        return Ack(ok=True, ranks=self._info.tp_size)

    def leave(self, group: str | None) -> Steps:
        """Leave a group, let go of mapped buffers."""
        return self._apply(Leave(group=group))

    def score(self, token_ids: Sequence[int]) -> Generator[EngineRequest, bytes, list[float]]:
        """By ``prompt_logprobs``."""
        return (yield from steps.score(self._info.model, token_ids))

    def _apply(self, message: Message) -> Steps:
        yield _call("weightcast_apply", encode(message).decode())
        return Ack(ok=True, state="updating", ranks=self._info.tp_size)


def _call(method: str, *arguments: str) -> EngineRequest:
    return post("/collective_rpc", {"method": method, "args": list(arguments)})
