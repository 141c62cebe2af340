"""What an engine with our receiver wants to hear; the one to copy."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Literal

import msgspec

from weightcast.comm.share import Shared
from weightcast.errors import WireError
from weightcast.protocols import EngineRequest, Invitation, Meeting, Sharing, Steps
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec
from weightcast.wire.messages import (
    Abort,
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
    decode_ack,
    encode,
)


class NativeAdapter:
    """The messages of ``wire.messages``, as they are."""

    packing = Packing(alignment_bytes=256, one_dtype=False, slices=True)
    sharing: Sharing = "weightcast"
    meeting: Meeting = "weightcast"
    in_flight = 2
    proves: frozenset[Literal["received", "resident"]] = frozenset(("received", "resident"))
    leased = True

    def __init__(self, info: EngineInfo) -> None:
        self._info = info

    def specs(self) -> Sequence[TensorSpec]:
        """As the engine says."""
        return self._info.specs

    def check(self, specs: Sequence[TensorSpec], *, transport: str, bucket_bytes: int) -> None:
        """Our receiver takes all that we send."""

    def open(self, message: Open) -> Steps:
        """Start a session; the answer's stream is its lease."""
        return decode_ack((yield EngineRequest(path="/weightcast/open", body=encode(message), lease=True)))

    def join(self, invitation: Invitation) -> Steps:
        """Join a group."""
        return _apply(
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
        if group is not None:
            return _apply(Announce(session=session, layout=layout, source=BroadcastSource(group=group)))
        handles = tuple(item.memory for item in shared if item.memory is not None)
        return _apply(Announce(session=session, layout=layout, source=IpcSource(handles=handles)))

    def close(self, message: Close) -> Steps:
        """No more buckets."""
        return _apply(message)

    def commit(self, message: Commit) -> Steps:
        """Make it live."""
        return _apply(message)

    def abort(self, session: str, reason: str) -> Steps:
        """End the session, keep the old version."""
        return _apply(Abort(session=session, reason=reason[:4096]))

    def leave(self, group: str | None) -> Steps:
        """Leave a group, let go of mapped buffers."""
        return _apply(Leave(group=group))

    def score(self, token_ids: Sequence[int]) -> Generator[EngineRequest, bytes, list[float]]:
        """Log-probabilities under the live weights."""
        reply = yield EngineRequest(path="/weightcast/score", body=msgspec.json.encode({"token_ids": list(token_ids)}))
        try:
            return msgspec.json.decode(reply, type=dict[str, list[float]])["logprobs"]
        except (msgspec.MsgspecError, KeyError) as error:
            raise WireError(f"not an answer of a weightcast receiver: {error}") from None


def _apply(message: Message) -> Steps:
    return decode_ack((yield EngineRequest(path="/weightcast/apply", body=encode(message))))
