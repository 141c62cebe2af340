"""The messages between trainer and engine: JSON with a schema, never pickle.

Trainer to engine: ``Open``, ``Join``, ``Announce``, ``Close``, ``Commit``, ``Revert``, ``Abort``, ``Leave``,
``Readback``.
Engine to trainer: ``EngineInfo`` (its description) and ``Ack`` (the answer to every message).
Inside an engine each rank answers ``RankAck``; the engine folds them into one ``Ack``.

One update is  Open, Join (when the group changed), Announce for each bucket, Close, Commit.
``Close`` means "no more buckets, is everything there?"; ``Commit`` makes it live.  They are two
messages so that no engine switches before all engines have everything.  ``Revert`` undoes a commit while no other
session has been opened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from weightcast.config import DigestKind, PauseMode, VerifyLevel
from weightcast.errors import WireError
from weightcast.runtime.lru import Lru
from weightcast.watch.events import Step
from weightcast.wire.box import Box
from weightcast.wire.layout import MAX_DIMS, MAX_TENSORS, BucketLayout, Size, TensorSpec

PROTOCOL = 3
MAX_MESSAGE_BYTES = 256 << 20  # specs of 2**20 tensors with long names stay below
MAX_BUCKETS = 1 << 20
MAX_GROUP = 1 << 14  # ranks in a group: gloo takes memory for every one of them before it has met any
GROUP_FAILED = 424  # HTTP status of an answer with ``group_failed``

Session = Annotated[str, Meta(min_length=32, max_length=32, pattern=r"^[0-9a-f]{32}\Z")]
Text = Annotated[str, Meta(max_length=4096)]
# No control characters: what an engine says of itself is shown on terminals.
Label = Annotated[str, Meta(max_length=4096, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]
Digest = Annotated[str, Meta(max_length=80)]
Version = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Count = Annotated[int, Meta(ge=0, le=MAX_BUCKETS)]
Rank = Annotated[int, Meta(ge=0, lt=1 << 20)]
Host = Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9._:%-]+\Z")]
Port = Annotated[int, Meta(ge=1, le=65535)]
_AnyName = Annotated[str, Meta(max_length=512)]
TraceParent = Annotated[str, Meta(max_length=55, pattern=r"^([0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?\Z")]
Steps = Annotated[tuple[Step, ...], Meta(max_length=1 << 20)]
GroupName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]


Runs = Annotated[tuple[Size, ...], Meta(max_length=MAX_TENSORS)]


class Owner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainer process that owns a session, for error messages.

    Attributes:
        host: Its host name.
        pid: Its process id there.
    """

    host: Text
    pid: Annotated[int, Meta(ge=0, le=1 << 32)]


class MemoryHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bucket buffer that a process on the same host can map.

    Attributes:
        kind: ``cuda`` (a CUDA IPC handle) or ``shm`` (an anonymous shared-memory file of the trainer).
        device: For ``cuda``, the UUID of the GPU; for ``shm``, ``"cpu"``.
        size_bytes: Size of the buffer.
        token: Random, another for every buffer: one that is freed and allocated again may have the same handle.  For
            ``shm``, also the name that the file must carry, so that a reused pid cannot be mistaken.
        pid: For ``shm``, the process that holds the file.
        fd: For ``shm``, its descriptor there.
        handle: For ``cuda``, the handle of the allocation.
        offset_bytes: For ``cuda``, where the buffer starts in the allocation.
        event: For ``cuda``, the handle of the event that says the buffer is filled; empty if it already is.
    """

    kind: Literal["cuda", "shm"]
    device: Text
    size_bytes: Size
    token: Annotated[str, Meta(max_length=64)] = ""
    pid: Annotated[int, Meta(ge=0, le=1 << 32)] = 0
    fd: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    handle: Annotated[bytes, Meta(max_length=256)] = b""
    offset_bytes: Size = 0
    event: Annotated[bytes, Meta(max_length=256)] = b""


class IpcSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ipc"):
    """The bucket lies in memory that this host shares: one handle for each trainer rank that filled one."""

    handles: Annotated[tuple[MemoryHandle, ...], Meta(min_length=1, max_length=4096)]


class BroadcastSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="broadcast"):
    """The bucket comes by a broadcast from rank 0 of the named group."""

    group: GroupName


Source = IpcSource | BroadcastSource


class Open(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="open"):
    """Start an update.  Refused, with nothing changed, if it does not fit the model or the state.

    Attributes:
        session: Unguessable id; every later message carries it.
        owner: Who opens it.
        version: The version to be; not lower than the one served unless ``allow_older``.
        timeout_s: Deadline of each wait inside the engine.
        lease_s: The session ends by itself this long after the last message.
        pause: What happens to running requests at the switch.
        verify: Proof wanted.
        digest: Digest wanted.
        specs: Every tensor that will be sent, in order.
        bucket_runs: Sizes in bytes of each bucket's broadcasts, in order.  They let a receiver enter the broadcast of a
            bucket early; empty if the sender waits for each reply.
        traceparent: The trainer's span for this target, as in W3C Trace Context; empty without tracing.
    """

    session: Session
    owner: Owner
    version: Version
    allow_older: bool = False
    timeout_s: Seconds
    lease_s: Seconds
    pause: PauseMode
    verify: VerifyLevel
    digest: DigestKind = "fast"
    specs: Annotated[tuple[TensorSpec, ...], Meta(min_length=1, max_length=MAX_TENSORS)]
    bucket_runs: Annotated[tuple[Runs, ...], Meta(max_length=MAX_BUCKETS)] = ()
    traceparent: TraceParent = ""


class Join(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="join"):
    """Join a process group across both worlds.  The group outlives an update.

    Attributes:
        session: The session that needs the group; empty for a rendezvous outside an update, which gets half a minute
            at most and ends when an update begins.
        group: Its name.
        host: Where the trainer's store listens.
        port: Port of that store.
        token: Prefix of the store's keys; a stranger's group cannot be joined by accident.
        first_rank: Group rank of this engine's rank 0; the others follow in order.
        world_size: Ranks in the group, the trainer's head (rank 0) included.
        backend: ``nccl`` or ``gloo``.
        timeout_s: Deadline of the rendezvous.
    """

    group: GroupName
    host: Host
    port: Port
    token: Annotated[str, Meta(min_length=32, max_length=32, pattern=r"^[0-9a-f]{32}\Z")]
    first_rank: Annotated[int, Meta(ge=1, lt=MAX_GROUP)]
    world_size: Annotated[int, Meta(ge=2, le=MAX_GROUP)]
    backend: Literal["nccl", "gloo"]
    timeout_s: Seconds
    session: Annotated[str, Meta(max_length=32, pattern=r"^([0-9a-f]{32})?\Z")] = ""


class Leave(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="leave"):
    """Leave a group and unmap buffers.  A group that was never joined is no error.

    Attributes:
        group: Its name; None only unmaps buffers.
    """

    group: GroupName | None = None


class Announce(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="announce"):
    """A bucket is coming: its source and its contents.  Answered when it has been loaded."""

    session: Session
    layout: BucketLayout
    source: Source


class Close(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="close"):
    """No more buckets.  The answer has a digest of what arrived and names what is missing; it may be asked again.

    Attributes:
        session: The session.
        buckets: Number of buckets that were sent.
        by_name: True for the digest of each tensor instead of one for all.  Thousands of digests take long while
            engines wait to switch, and help only where something went wrong.
    """

    session: Session
    buckets: Annotated[int, Meta(ge=0, le=1 << 32)]
    by_name: bool = False


class Commit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="commit"):
    """Make the new weights live: pause, switch, run the finishers, prove, stamp the version, resume.

    A sender that lost the answer sends it again.  Until the next Open the engine then repeats its answer.

    Attributes:
        session: The session.
        expected: Fast digests that resident tensors must have, by name; empty without proof.
        as_received: True if all other resident tensors must equal what was received at Close.  It saves thousands of
            digests on the wire while an engine waits to switch.
    """

    session: Session
    # Not `Name`: its pattern takes longer than all the rest of the message, while engines wait to switch. A name that
    # no tensor has is a difference like any other.
    expected: Annotated[dict[_AnyName, Annotated[str, Meta(max_length=64)]], Meta(max_length=MAX_TENSORS)] = {}
    as_received: bool = False


class Revert(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="revert"):
    """Go back to the weights and the version that this session's commit replaced.

    An engine with a second set of weights can do it until the next Open, and until it sleeps.  It pauses, switches,
    runs the finishers, compares what it keeps with the digest that it served before, and resumes.  The answer has the
    old version and the digests of what is kept.  Like ``Commit`` it may be said again.

    Attributes:
        session: The session that was committed last.
        reason: For the engine's log.
    """

    session: Session
    reason: Text = ""


class Abort(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="abort"):
    """End the session without a commit.  Answered when the session has ended.

    Attributes:
        session: The session.
        reason: For the engine's log.
    """

    session: Session
    reason: Text = ""


class Readback(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="readback"):
    """Digest the live weights, through the loader's routes.  Changes nothing."""


Message = Open | Join | Leave | Announce | Close | Commit | Revert | Abort | Readback

State = Literal["serving", "updating", "quarantined"]


class Held(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Partial digest of the part of a source tensor that one rank keeps.

    Attributes:
        spec: The whole source tensor, its dtype as the engine keeps it.
        box_offset: First index kept, for each dimension.
        box_shape: Extent kept, likewise.
        total: Partial sum (see ``digest.definition``), unsigned 64 bits.
    """

    spec: TensorSpec
    box_offset: Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMS)]
    box_shape: Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMS)]
    total: int

    @property
    def box(self) -> Box:
        """The part of the source tensor that the rank keeps."""
        return Box(offset=self.box_offset, shape=self.box_shape)


class RankAck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answer of one engine rank.

    Attributes:
        rank: Tensor-parallel rank.
        ok: False if it refused or failed; ``error`` says why.
        error: The rank's own words.
        refused: True if it refused before changing anything.
        group_failed: True if it failed because its process group did: another member is to blame.
        touched: True if live parameters may have been changed by this session.
        missing: Source tensors that did not arrive (whole), by name.
        not_updated: Parameters and buffers that no source tensor writes, by name.
        received_all: After Close: one digest of all that arrived (``digest.bucket_sums.Totals``).
        received: Digest by tensor name of what arrived: after Close by name, and rank 0's after Commit "as received".
        held: What this rank keeps of each source tensor.
        unproven: Source tensors whose place in the model cannot be read back, by name.
        load_s: Seconds spent copying since the last answer.
        verify_s: Seconds spent on digests since the last answer.
        peak_extra_bytes: Most extra memory since the session opened, measured.
        steps: What the rank did since the last answer, on the clock of its host.
    """

    rank: Rank
    ok: bool = True
    error: str = ""
    refused: bool = False
    group_failed: bool = False
    touched: bool = False
    missing: tuple[str, ...] = ()
    not_updated: tuple[str, ...] = ()
    received_all: str = ""
    received: dict[str, str] = {}
    held: tuple[Held, ...] = ()
    unproven: tuple[str, ...] = ()
    load_s: float = 0.0
    verify_s: float = 0.0
    peak_extra_bytes: int = 0
    steps: Steps = ()


class Ack(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answer of one engine to one message.

    Attributes:
        ok: False if it refused or failed.
        error: Why it refused or failed.
        failed_ranks: Engine ranks that failed.
        group_failed: True if it failed because its process group did: another member may be to blame.
        state: What the engine does now.
        version: Version it serves now; None before the first one is known.
        ranks: How many ranks it has.
        closed: True after the last bucket that Open announced: this answers Close as well.
        received_all: After Close: one digest of all that arrived (rank 0's); empty if they were asked for by name.
        received: After Close, if asked for: digest by tensor name of what arrived, likewise.
        received_ranks: After Close: how many ranks received exactly that.
        resident: After Commit, Revert or Readback: finished digest by tensor name of what the ranks keep together.
        resident_ranks: After Commit: how many ranks hold nothing but what was expected.
        mismatched: Names whose digests differ, between ranks or from what was expected.
        missing: Source tensors that did not arrive, by name.
        not_updated: Parameters that no source tensor writes, by name.
        unproven: After Open, Close and Commit: tensors whose place cannot be read back, by name.
        load_s: Seconds the slowest rank spent copying.
        verify_s: Seconds the slowest rank spent on digests.
        stall_s: After Commit: seconds in which the engine generated nothing.
        peak_extra_bytes: Most extra memory of any rank since the session opened.
        message: A further note.
        checksum: After Commit: an engine's own digest of all that it keeps, which compares only with those of engines
            of its kind, version and size; empty if it has none.
        heard: Time at which the engine's server had read the message, in seconds of its monotonic clock; None if it
            does not say.
        answered: Time at which it had the answer, likewise.
        steps: What the ranks and the server did for this message, on the clocks of their hosts.
    """

    ok: bool
    error: str = ""
    failed_ranks: tuple[Rank, ...] = ()
    group_failed: bool = False
    state: State = "serving"
    version: Version | None = None
    ranks: Count = 0
    closed: bool = False
    received_all: Digest = ""
    received: dict[str, Digest] = {}
    received_ranks: Count = 0
    resident: dict[str, Digest] = {}
    resident_ranks: Count = 0
    mismatched: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    not_updated: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()
    load_s: float = 0.0
    verify_s: float = 0.0
    stall_s: float = 0.0
    peak_extra_bytes: int = 0
    message: Text = ""
    checksum: Digest = ""
    heard: float | None = None
    answered: float | None = None
    steps: Steps = ()


class RankInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one engine rank runs.

    Attributes:
        rank: Tensor-parallel rank.
        pid: Its process; 0 if the engine does not say.
        device: UUID of its GPU, or ``"cpu"``; ``"cuda"`` if the engine does not say which GPU.
    """

    rank: Rank
    pid: Annotated[int, Meta(ge=0, le=1 << 32)]
    device: Label


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description that an engine with our receiver gives of itself, or that a probe found for another one.

    Attributes:
        protocol: Version of this protocol.
        engine: Kind and version, e.g. ``"weightcast 0.1.0"``.
        model: Name under which it serves.
        state: What it does now.
        version: Version it serves; None if unknown.
        digest: Model digest of what it serves, from its last commit; None if it was never proven.
        tp_size: Tensor-parallel size.
        dp_size: Data-parallel replicas behind its URL.
        ep_size: Expert-parallel size.
        host_id: Boot id of its host: two processes with the same one can share memory.
        ranks: Where its ranks run.
        staging: ``device``, ``host`` or ``none``: where a new version waits for its commit.
        staging_bytes: Bytes that the staging set takes on the rank where it takes most; 0 if nothing is staged, or if
            the engine does not say.
        transports: Transports by which it can receive.
        specs: Every tensor that a full update must contain, with the dtype that it keeps.
        session_owner: The trainer that updates it now; None if there is none.
        message: Why it is not serving, or a further note.
        paused: True while an update, an operator or sleep has paused it.
        optional: Tensors that the engine knows and keeps nowhere; an update may bring them or leave them out.
        kind: Name of the adapter that speaks to it; ``native`` for every engine with our receiver.
        instance: Random id of this start of the server; empty if it has none.
        tells_version: False if the engine cannot say which version it serves, even after an update.
        no_pause: Pause modes with which the engine cannot be updated as it was started, and why.
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

    @property
    def incarnation(self) -> tuple[object, ...]:
        """Equal for two answers of one engine; another after a restart, as far as the engine can tell."""
        return (self.kind, self.host_id, self.instance, tuple((rank.pid, rank.device) for rank in self.ranks))

    @property
    def shows_restart(self) -> bool:
        """True if a restart changes ``incarnation``."""
        return bool(self.instance) or any(rank.pid for rank in self.ranks)

    @property
    def sizes(self) -> str:
        """Its parallel sizes, in words."""
        more = [f"{name} {size}" for name, size in (("dp", self.dp_size), ("ep", self.ep_size)) if size > 1]
        return ", ".join([f"tp {self.tp_size}", *more])

    @property
    def devices(self) -> tuple[str, ...]:
        """UUID of each rank's GPU, ``cpu``, or ``cuda`` where it does not say."""
        return tuple(rank.device for rank in self.ranks)


def shown(text: str) -> str:
    """Foreign text for a log or a label: one line, without control characters that a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _form(kind: type[msgspec.Struct], table: str) -> Any:
    """The class with its large table as raw bytes, so that a table seen before is not read again."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        what = msgspec.Raw if field.name == table else field.type
        fields.append((field.name, what) if field.required else (field.name, what, field.default))
    tag = kind.__struct_config__.tag
    return msgspec.defstruct(kind.__name__, fields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=tag)


_TABLES: dict[type[msgspec.Struct], str] = {Open: "specs", Announce: "layout", EngineInfo: "specs"}
_TABLES_BYTES = 128 << 20
_TIMES_ITS_BYTES = 4  # what a decoded table takes
_forms = {kind: _form(kind, table) for kind, table in _TABLES.items()}
_Specs = Annotated[tuple[TensorSpec, ...], Meta(max_length=MAX_TENSORS)]

_encoder = msgspec.json.Encoder()
# Made at import: msgspec inspects a class when its decoder is made, and two threads that do so at once crash.
_decoder = msgspec.json.Decoder(
    _forms[Open] | _forms[Announce] | Join | Leave | Close | Commit | Revert | Abort | Readback
)
_infos = msgspec.json.Decoder(_forms[EngineInfo])
_acks = msgspec.json.Decoder(Ack)
_rank_acks = msgspec.json.Decoder(RankAck)
_layouts = msgspec.json.Decoder(BucketLayout)
_specs: msgspec.json.Decoder[tuple[TensorSpec, ...]] = msgspec.json.Decoder(_Specs)
_Answer = TypeVar("_Answer")
_Whole = TypeVar("_Whole", Open, Announce, EngineInfo)

# Every update of a model has the same tables, and with many tensors they take longer to read than the weights to
# travel.  Both ends keep them: what was encoded by identity, what was decoded and checked by its bytes.
_encoded: Lru[int, tuple[object, bytes]] = Lru(_TABLES_BYTES)
_known_layouts: Lru[bytes, BucketLayout] = Lru(_TABLES_BYTES)
_known_specs: Lru[bytes, tuple[TensorSpec, ...]] = Lru(_TABLES_BYTES)


def encode(message: msgspec.Struct) -> bytes:
    """Any of the classes above as JSON."""
    name = _TABLES.get(type(message))
    if name is None:
        return _encoder.encode(message)
    table = getattr(message, name)
    known = _encoded.get(id(table))
    if known is None:
        known = table, _encoder.encode(table)  # it is kept beside its bytes, so that its id stays its own
        _encoded.put(id(table), known, _TIMES_ITS_BYTES * len(known[1]))
    return _encoder.encode(_with(_forms[type(message)], message, name, msgspec.Raw(known[1])))


def _with(kind: Any, other: Any, name: str, value: object) -> Any:
    """The same fields but one, as another class."""
    return kind(**{field: value if field == name else getattr(other, field) for field in kind.__struct_fields__})


def _specs_of(kind: type[_Whole], form: Any) -> _Whole:
    """The message of a form whose table is one of tensors.

    Raises:
        ValueError: The table is none, or is empty where it may not be.
    """
    data = bytes(form.specs)
    specs = _known_specs.get(data)
    if specs is None:
        specs = _specs.decode(data)
        _known_specs.put(data, specs, _TIMES_ITS_BYTES * len(data))
    if kind is Open and not specs:
        raise ValueError("specs: at least one tensor is sent")
    return _with(kind, form, "specs", specs)


def _layout_of(form: Any) -> Announce:
    """The message of a form whose table is a layout.

    Raises:
        ValueError, WireError: The layout is none, or is one that no sender of ours would make.
    """
    data = bytes(form.layout)
    layout = _known_layouts.get(data)
    if layout is None:
        layout = _layouts.decode(data)
        layout.check()
        _known_layouts.put(data, layout, _TIMES_ITS_BYTES * len(data))
    return _with(Announce, form, "layout", layout)


def decode_ack(data: bytes) -> Ack:
    """An engine's answer.

    Raises:
        WireError: It is none.
    """
    return _answer(_acks.decode, data)


def decode_rank_ack(data: bytes) -> RankAck:
    """An engine rank's answer.

    Raises:
        WireError: It is none.
    """
    return _answer(_rank_acks.decode, data)


def decode_info(data: bytes) -> EngineInfo:
    """Decodes an engine's description of itself.

    Raises:
        WireError: It says something else.
    """
    return _answer(lambda data: _specs_of(EngineInfo, _infos.decode(data)), data)


def _answer(read: Callable[[bytes], _Answer], data: bytes) -> _Answer:
    try:
        return read(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise WireError(f"not an answer of a weightcast receiver: {error}") from None


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Bytes from a trainer as a message, every field checked.

    Raises:
        WireError: Too large, not JSON, or not one of ours; the text names the field.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    try:
        form = _decoder.decode(data)
        if isinstance(form, _forms[Open]):
            return _specs_of(Open, form)
        if isinstance(form, _forms[Announce]):
            return _layout_of(form)
        return form
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise WireError(f"not a weightcast message: {error}") from None
