"""What an engine with our receiver wants to hear; the one to copy."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weightcast.protocols import EngineRequest
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec
from weightcast.wire.messages import (
    Abort,
    Ack,
    Announce,
    BroadcastSource,
    Close,
    Commit,
    EngineInfo,
    IpcSource,
    Join,
    Leave,
    MemoryHandle,
    Message,
    Open,
    decode_ack,
    encode,
)


class NativeAdapter:
    """The messages of ``wire.messages``, as they are."""

    packing = Packing(alignment_bytes=256, one_dtype=False, slices=True)

    def specs(self, info: EngineInfo) -> Sequence[TensorSpec]:
        """As the engine says."""
        return info.specs

    def open_request(self, message: Open) -> EngineRequest:
        """Start a session; the answer's stream is its lease."""
        return EngineRequest(path="/weightcast/open", body=encode(message), lease=True)

    def join_request(self, message: Join) -> EngineRequest:
        """Join a group."""
        return _apply(message)

    def bucket_request(
        self, session: str, layout: BucketLayout, *, group: str | None, handles: Sequence[MemoryHandle]
    ) -> EngineRequest:
        """A bucket comes, from a group or from mapped memory."""
        source = IpcSource(handles=tuple(handles)) if group is None else BroadcastSource(group=group)
        return _apply(Announce(session=session, layout=layout, source=source))

    def close_request(self, message: Close) -> EngineRequest:
        """No more buckets."""
        return _apply(message)

    def commit_request(self, message: Commit) -> EngineRequest:
        """Make it live."""
        return _apply(message)

    def abort_request(self, session: str, reason: str) -> EngineRequest:
        """End the session, keep the old version."""
        return _apply(Abort(session=session, reason=reason[:4096]))

    def leave_request(self, group: str | None) -> EngineRequest:
        """Leave a group, let go of mapped buffers."""
        return _apply(Leave(group=group))

    def readback_request(self) -> EngineRequest:
        """Digest what is live."""
        return EngineRequest(method="GET", path="/weightcast/digests")

    def score_request(self, token_ids: Sequence[int]) -> EngineRequest:
        """Log-probabilities under the live weights."""
        return EngineRequest(path="/weightcast/score", body=msgspec.json.encode({"token_ids": list(token_ids)}))

    def ack(self, reply: bytes) -> Ack:
        """Read the engine's answer."""
        return decode_ack(reply)


def _apply(message: Message) -> EngineRequest:
    return EngineRequest(path="/weightcast/apply", body=encode(message))
