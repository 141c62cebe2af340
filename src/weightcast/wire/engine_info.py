"""An engine's description: its model, its state, and what an update of it needs; and a short one for dashboards.

``EngineInfo`` lists every tensor, which is too much to ask for every second.  Readers of ``EngineStatus`` ignore fields
that they do not know, so that an older reader can watch a newer engine.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from weightcast.config import PauseMode
from weightcast.errors import visible
from weightcast.watch.sessions import SessionOutcome
from weightcast.wire.answers import State
from weightcast.wire.fields import Count, Digest, Label, Rank, Text, Version, decoded
from weightcast.wire.layout import MAX_TENSORS, TensorSpec
from weightcast.wire.nccl_settings import NcclSettings


class RankInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Process and device of one engine rank.

    Attributes:
        rank: Tensor-parallel rank.
        pid: Process id; 0 if the engine does not report it.
        device: UUID of the GPU, or ``"cpu"``; ``"cuda"`` if the engine does not report which GPU.
        host_id: Boot id of the rank's host; empty if all ranks are on the engine's own host.
        host: Name of that host, for errors; empty if it is not known.
        visible: UUIDs of the GPUs that the rank's process can see; empty if it does not report them, and on a CPU.
        nccl: NCCL in the rank's process; None if it does not report that, and on a CPU.
    """

    rank: Rank
    pid: Annotated[int, Meta(ge=0, le=1 << 32)]
    device: Label
    host_id: Label = ""
    host: Label = ""
    visible: Annotated[tuple[Label, ...], Meta(max_length=4096)] = ()
    nccl: NcclSettings | None = None


NO_RECEIVER = 0  # ``EngineInfo.protocol`` of an engine without our receiver


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine's description: sent by our receiver, or made by a probe for an engine without our receiver.

    Attributes:
        protocol: Version of our messages that the engine speaks, or ``NO_RECEIVER``.
        engine: Kind and version of the engine, e.g. ``"weightcast 1.2.3"``.
        model: Name under which the engine serves the model.
        version: Version that the engine serves; None if unknown.
        digest: Model digest of the served weights, from the last commit; None if it was never proven.
        host_id: Boot id of the host: two processes with the same one can share memory.  Empty if the ranks are on
            several; then each rank names its own.
        staging: Place where a new version waits for its commit: ``device``, ``host`` or ``none``.
        specs: Every tensor that a full update must contain, with the dtype that the engine keeps.
        session_owner: The trainer that updates the engine now; None if there is none.
        message: Reason why the engine does not serve, or a further remark.
        paused: True while an update, an operator or sleep pauses the engine.
        optional: Tensors that the engine knows but does not keep; an update may contain them or not.
        kind: Name of the engine's ``protocols.Kind``; ``native`` for every engine with our receiver.
        dp_size: Number of data-parallel replicas behind the URL.
        staging_bytes: Size of the staging set on the rank where it is largest, in bytes; 0 if nothing is staged, or if
            the engine does not report it.
        instance: Random id of this start of the server; empty if it has none.
        tells_version: False if the engine cannot report the version that it serves, even after an update.
        no_pause: Pause modes with which the engine, as it was started, cannot be updated, each with the reason.
        hazards: What an update leaves as it is, or cannot prove, with the engine as it was started; one sentence each.
        reads_remote: True if the engine can read memory of other hosts through NIXL.
    """

    protocol: Count
    engine: Label
    model: Label
    state: State
    version: Version | None
    digest: Digest | None
    tp_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    host_id: Label
    ranks: Annotated[tuple[RankInfo, ...], Meta(max_length=1 << 20)]
    staging: Literal["device", "host", "none"]
    transports: Annotated[tuple[Label, ...], Meta(max_length=64)]
    specs: Annotated[tuple[TensorSpec, ...], Meta(max_length=MAX_TENSORS)]
    session_owner: Label | None = None
    message: str = ""
    paused: bool = False
    optional: Annotated[tuple[TensorSpec, ...], Meta(max_length=MAX_TENSORS)] = ()
    kind: str = "native"
    dp_size: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    ep_size: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    staging_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    instance: Label = ""
    tells_version: bool = True
    no_pause: dict[PauseMode, Text] = {}
    hazards: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    reads_remote: bool = False

    def __post_init__(self) -> None:
        """Makes control characters visible: these texts are shown on terminals, and an engine writes what it likes."""
        if not all(map(str.isprintable, (self.message, *self.hazards, *self.no_pause.values()))):
            set_field = msgspec.structs.force_setattr
            set_field(self, "message", visible(self.message))
            set_field(self, "hazards", tuple(map(visible, self.hazards)))
            set_field(self, "no_pause", {mode: visible(why) for mode, why in self.no_pause.items()})

    @property
    def has_receiver(self) -> bool:
        """True if the engine has our receiver."""
        return self.protocol != NO_RECEIVER

    @property
    def incarnation(self) -> tuple[object, ...]:
        """Identity of the running engine.  It changes with a restart if the engine reports anything that does."""
        return (self.kind, self.host_id, self.instance, tuple((rank.pid, rank.device) for rank in self.ranks))

    @property
    def shows_restart(self) -> bool:
        """True if a restart changes ``incarnation``."""
        return bool(self.instance) or any(rank.pid for rank in self.ranks)

    @property
    def sizes(self) -> str:
        """The parallel sizes, in words."""
        more = [f"{name} {size}" for name, size in (("dp", self.dp_size), ("ep", self.ep_size)) if size > 1]
        return ", ".join([f"tp {self.tp_size}", *more])

    @property
    def hosts(self) -> tuple[str, ...]:
        """Boot id of each rank's host; empty for a rank whose host is not known."""
        return tuple(rank.host_id or self.host_id for rank in self.ranks)

    @property
    def on_several_hosts(self) -> bool:
        """True if the ranks are on several hosts, and it is known on which."""
        return len(set(self.hosts)) > 1

    def named(self, rank: int) -> str:
        """Returns a rank in words, with its host if the ranks are on several."""
        found = next((one for one in self.ranks if one.rank == rank), None)
        return f"rank {rank}" + (f" on host {found.host or found.host_id}" if found and found.host_id else "")

    @property
    def devices(self) -> tuple[str, ...]:
        """Each rank's device, as in ``RankInfo.device``."""
        return tuple(rank.device for rank in self.ranks)


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
    outcome: Literal["running"] | SessionOutcome
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
