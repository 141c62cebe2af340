"""The short description of an engine that ``/weightcast/status`` gives to dashboards.

``EngineInfo`` lists every tensor, which is too much to ask for every second.  Readers ignore fields that they do not
know, so that an older reader can watch a newer engine.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from weightcast.wire.answers import State
from weightcast.wire.fields import Label, Version, decoded

Outcome = Literal["running", "committed", "aborted", "quarantined", "reverted"]
_Seconds = Annotated[float, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=0)]


class UpdateStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The update that runs now, or the last one.

    Attributes:
        outcome: ``running``, or how it ended.
        owner: Process of the trainer, in words.
        seconds: Time since it began, or between its beginning and its end.
        ago_s: Seconds since its end; None while it runs.
        bytes: Bytes of the buckets that have arrived.
        phases: Seconds of the slowest rank by phase: ``wire``, ``load``, ``verify``, ``switch``, ``pause``, ``resume``.
        stall_s: Seconds without generation.
        reason: Why it was not committed; empty if it was.
    """

    version: int
    outcome: Outcome
    owner: Label = ""
    seconds: _Seconds = 0.0
    ago_s: _Seconds | None = None
    bytes: _Count = 0
    buckets: _Count = 0
    phases: dict[str, float] = {}
    stall_s: _Seconds = 0.0
    reason: str = ""


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one engine with our receiver.

    Attributes:
        version: Version that it serves; None if unknown.
        digest: Model digest of that version; None if it was never proven.
        paused: True while an update, an operator or sleep has paused it.
        message: Why it is quarantined, or a further note.
        since_s: Seconds since it began to serve this version.
        update: The update that runs now, or the last one; None before the first.
    """

    engine: Label
    model: Label
    state: State
    version: Version | None = None
    digest: Label | None = None
    paused: bool = False
    message: str = ""
    since_s: _Seconds = 0.0
    update: UpdateStatus | None = None


_decoder = msgspec.json.Decoder(EngineStatus)


def decode_status(data: bytes) -> EngineStatus:
    """Decodes an engine's short description; raises WireError if it says something else."""
    return decoded(_decoder.decode, data, "the status of a weightcast receiver")
