"""The messages between trainer and engine: JSON with a schema, never pickle.

Trainer to engine: ``Open``, ``Join``, ``Announce``, ``Close``, ``Commit``, ``Revert``, ``Abort``, ``Leave``,
``Readback``.
Engine to trainer: ``EngineInfo`` (its description) and ``Ack`` (the answer to every message).
Inside an engine each rank answers with a ``RankAck``, and the engine combines them into one ``Ack``.

An update is Open, Join (if the group changed), Announce for each bucket, Close, Commit.  ``Close`` asks whether
everything has arrived, and ``Commit`` makes it live.  They are two messages so that no engine switches before every
engine has everything.  ``Revert`` undoes a commit until another session is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from weightcast.config import DigestKind, PauseMode, VerifyLevel
from weightcast.errors import WireError
from weightcast.runtime.lru import Lru
from weightcast.watch.events import Step
from weightcast.wire.held import NOTHING_HELD, HeldForm, HeldSums, HeldTable, form_of, held_of
from weightcast.wire.layout import MAX_DIMS, MAX_TENSORS, BucketLayout, Size, TensorSpec
from weightcast.wire.plans import MAX_BUCKETS, PlanHash, Runs, Tables, UpdatePlan, kept_plan, take_plan

PROTOCOL = 4
MAX_MESSAGE_BYTES = 256 << 20  # specs of 2**20 tensors with long names stay below
MAX_GROUP = 1 << 14  # ranks in a group: gloo allocates memory for each of them before it connects to any
GROUP_FAILED = 424  # HTTP status of an answer with ``group_failed``
UNKNOWN_PLAN = 428  # HTTP status of an answer to a message whose plan must be sent in full

Session = Annotated[str, Meta(min_length=32, max_length=32, pattern=r"^[0-9a-f]{32}\Z")]
Text = Annotated[str, Meta(max_length=4096)]
# No control characters: the engine's description is shown on terminals.
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
KnownTables = Annotated[tuple[PlanHash, ...], Meta(max_length=1 << 14)]
GroupName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]


class Owner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainer process that owns a session, for error messages.

    Attributes:
        host: Name of the trainer's host.
        pid: Process id on that host.
    """

    host: Text
    pid: Annotated[int, Meta(ge=0, le=1 << 32)]


class MemoryHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bucket buffer that a process on the same host can map.

    Attributes:
        kind: ``cuda`` (a CUDA IPC handle) or ``shm`` (an anonymous shared-memory file of the trainer).
        device: For ``cuda``, the UUID of the GPU; for ``shm``, ``"cpu"``.
        size_bytes: Size of the buffer, in bytes.
        token: Random id of the buffer, because a freed and newly allocated one may have the same handle.  For ``shm``
            it is also the name of the file, so that the file of a process with a reused pid is not taken for this one.
        pid: For ``shm``, the process that holds the file.
        fd: For ``shm``, the file's descriptor in that process.
        handle: For ``cuda``, the handle of the allocation.
        offset_bytes: For ``cuda``, first byte of the buffer in the allocation.
        event: For ``cuda``, the handle of the event after which the buffer is filled; empty if it is filled already.
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
    """The bucket is in shared memory of this host.  ``handles`` has one for each trainer rank that filled a buffer."""

    handles: Annotated[tuple[MemoryHandle, ...], Meta(min_length=1, max_length=4096)]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A box of one slot's tensor that lies in one of several buffers, at its place in the bucket.

    Attributes:
        slot: Number of the slot in the layout.
        offset: First element of the box in the tensor, one number for each dimension.
        shape: Extent of the box.
    """

    slot: Annotated[int, Meta(ge=0, le=MAX_TENSORS)]
    offset: Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMS)]
    shape: Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMS)]


class PartialBuffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The buffer of one trainer rank, which has some parts of a bucket; its other bytes mean nothing."""

    handle: MemoryHandle
    parts: Annotated[tuple[Part, ...], Meta(max_length=1 << 22)]


class ScatteredSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="scattered"):
    """The bucket is in shared memory of this host, in the buffers of several trainer ranks.

    The parts of all buffers are every slot exactly once.  An engine rank reads the parts that it keeps.
    """

    buffers: Annotated[tuple[PartialBuffer, ...], Meta(min_length=1, max_length=4096)]


class BroadcastSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="broadcast"):
    """The bucket comes by a broadcast from rank 0 of the named group."""

    group: GroupName


Source = IpcSource | ScatteredSource | BroadcastSource


class Open(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="open"):
    """Starts an update.  The engine refuses it, with nothing changed, if it does not fit the model or the state.

    Attributes:
        session: Unguessable id, which every later message has.
        owner: The trainer process.
        version: The new version; not lower than the served one unless ``allow_older``.
        allow_older: True accepts a lower version.
        timeout_s: Deadline of each wait inside the engine, in seconds.
        lease_s: Seconds after the last message at which the engine ends the session by itself.
        pause: Fate of the requests that run at the switch.
        verify: Level of proof that the trainer wants.
        digest: Kind of digest that the trainer wants.
        specs: Every tensor that will be sent, in order.
        bucket_runs: Sizes in bytes of each bucket's broadcasts, in order.  They let a receiver enter the broadcast of a
            bucket early; empty if the sender waits for each reply.
        traceparent: The trainer's span for this target, as in W3C Trace Context; empty without tracing.
        plan: The plan that ``specs`` and ``bucket_runs`` come from, and that later messages name; None without one.
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
    plan: UpdatePlan | None = None


class Join(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="join"):
    """Asks the engine to join a process group of the trainer's head and engine ranks.  The group outlives an update.

    Attributes:
        group: Name of the group.
        host: Address of the trainer's store.
        port: Port of the trainer's store.
        token: Prefix of the store's keys, so that no rank joins another trainer's group by accident.
        first_rank: Group rank of this engine's rank 0; the others follow in order.
        world_size: Ranks in the group, the trainer's head (rank 0) included.
        backend: ``nccl`` or ``gloo``.
        timeout_s: Deadline of the rendezvous, in seconds.
        session: The session that needs the group; empty for a rendezvous outside an update, which lasts half a minute
            at most and ends when an update begins.
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
    """Asks the engine to leave a group and to unmap buffers.  A group that was never joined is no error.

    Attributes:
        group: Name of the group; None only unmaps buffers.
    """

    group: GroupName | None = None


class Announce(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="announce"):
    """Announces a bucket: its source and its contents.  The engine answers when it has loaded the bucket.

    Attributes:
        session: The session.
        layout: Contents of the bucket.
        source: Source of the bucket.
        plan: Hash of the plan whose bucket number ``layout.index`` this is; empty without a plan.
    """

    session: Session
    layout: BucketLayout
    source: Source
    plan: str = ""


class Close(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="close"):
    """Says that all buckets were sent.  The answer has a digest of what arrived and names what is missing.

    The trainer may send it again.

    Attributes:
        session: The session.
        buckets: Number of buckets that were sent.
        by_name: True asks for the digest of each tensor instead of one for all.  Thousands of digests take time while
            engines wait to switch, and are needed only to name the tensors of a failure.
        known_tables: Set inside an engine, for its ranks; see ``Readback``.
    """

    session: Session
    buckets: Annotated[int, Meta(ge=0, le=1 << 32)]
    by_name: bool = False
    known_tables: KnownTables = ()


class Commit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="commit"):
    """Makes the new weights live: pause, switch, run the finishers, prove, stamp the version, resume.

    A trainer that lost the answer sends the message again.  The engine repeats its answer until the next Open.

    Attributes:
        session: The session.
        expected: Fast digests that resident tensors must have, by name; empty without proof.
        as_received: True if all other resident tensors must equal what was received at Close.  This saves thousands of
            digests on the wire while an engine waits to switch.
        known_tables: Set inside an engine, for its ranks; see ``Readback``.
    """

    session: Session
    # Not `Name`: its pattern takes longer than the rest of the message, while engines wait to switch.  A name that no
    # tensor has counts as a difference.
    expected: Annotated[dict[_AnyName, Annotated[str, Meta(max_length=64)]], Meta(max_length=MAX_TENSORS)] = {}
    as_received: bool = False
    known_tables: KnownTables = ()


class Revert(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="revert"):
    """Restores the weights and the version that this session's commit replaced.

    An engine with a second set of weights can do this until the next Open or until it sleeps.  It pauses, switches,
    runs the finishers, compares its weights with the digest that it served before, and resumes.  The answer has the old
    version and the digests of the live weights.  Like ``Commit``, it may be sent again.

    Attributes:
        session: The session that was committed last.
        reason: For the engine's log.
        known_tables: Set inside an engine, for its ranks; see ``Readback``.
    """

    session: Session
    reason: Text = ""
    known_tables: KnownTables = ()


class Abort(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="abort"):
    """Ends the session without a commit.  The engine answers when the session has ended.

    Attributes:
        session: The session.
        reason: For the engine's log.
    """

    session: Session
    reason: Text = ""


class Readback(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="readback"):
    """Asks for digests of the live weights, which the loader's routes lead to.  Changes nothing.

    Attributes:
        known_tables: Hashes of the tables of parts that a rank's answer may name without sending them.
    """

    known_tables: KnownTables = ()


Message = Open | Join | Leave | Announce | Close | Commit | Revert | Abort | Readback

State = Literal["serving", "updating", "quarantined"]


class RankAck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answer of one engine rank.

    Attributes:
        rank: Tensor-parallel rank.
        ok: False if the rank refused or failed; ``error`` says why.
        error: The rank's own words.
        refused: True if the rank refused before it changed anything.
        group_failed: True if the rank failed because its process group did, so another member is to blame.
        touched: True if this session may have changed live parameters.
        missing: Names of source tensors that did not arrive whole.
        not_updated: Names of parameters and buffers that no source tensor writes.
        received_all: After Close: one digest of everything that arrived (``digest.bucket_sums.Totals``).
        received: Digest by name of each tensor that arrived; after a Close that asks for it, and from rank 0 after a
            Commit with ``as_received``.
        held: Sums of the parts of the source tensors that this rank keeps.
        unproven: Names of source tensors whose place in the model cannot be read back.
        load_s: Seconds spent on copies since the last answer.
        verify_s: Seconds spent on digests since the last answer.
        peak_extra_bytes: Most extra memory since the session opened, in bytes, measured.
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
    held: HeldSums = NOTHING_HELD
    unproven: tuple[str, ...] = ()
    load_s: float = 0.0
    verify_s: float = 0.0
    peak_extra_bytes: int = 0
    steps: Steps = ()


class Ack(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answer of one engine to one message.

    Attributes:
        ok: False if the engine refused or failed.
        error: Reason of the refusal or failure.
        failed_ranks: Engine ranks that failed.
        group_failed: True if the engine failed because its process group did, so another member may be to blame.
        state: The engine's state now.
        version: Version that the engine serves now; None before the first one is known.
        ranks: Number of engine ranks.
        closed: True in the answer to the last bucket that Open announced, which answers Close as well.
        received_all: After Close: rank 0's digest of everything that arrived; empty if asked for digests by name.
        received: After a Close that asks for it: rank 0's digest by name of each tensor that arrived.
        received_ranks: After Close: number of ranks that received the same.
        resident: After Commit, Revert or Readback: digest by name of each tensor that the ranks keep together.
        resident_ranks: After Commit: number of ranks that keep exactly what was expected.
        mismatched: Names of tensors whose digests differ between ranks or from what was expected.
        missing: Names of source tensors that did not arrive.
        not_updated: Names of parameters that no source tensor writes.
        unproven: After Open, Close and Commit: names of tensors whose place cannot be read back.
        load_s: Seconds that the slowest rank spent on copies.
        verify_s: Seconds that the slowest rank spent on digests.
        stall_s: After Commit: seconds in which the engine generated nothing.
        peak_extra_bytes: Most extra memory of any rank since the session opened, in bytes.
        message: A further remark.
        checksum: After Commit: the engine's own digest of all its weights, which is comparable only among engines of
            one kind, version and size; empty if the engine has none.
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
    """Process and device of one engine rank.

    Attributes:
        rank: Tensor-parallel rank.
        pid: Process id; 0 if the engine does not report it.
        device: UUID of the GPU, or ``"cpu"``; ``"cuda"`` if the engine does not report which GPU.
    """

    rank: Rank
    pid: Annotated[int, Meta(ge=0, le=1 << 32)]
    device: Label


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine's description: sent by our receiver, or made by a probe for an engine without our receiver.

    Attributes:
        protocol: Version of this protocol.
        engine: Kind and version of the engine, e.g. ``"weightcast 1.2.3"``.
        model: Name under which the engine serves the model.
        state: The engine's state now.
        version: Version that the engine serves; None if unknown.
        digest: Model digest of the served weights, from the last commit; None if it was never proven.
        tp_size: Tensor-parallel size.
        host_id: Boot id of the host: two processes with the same one can share memory.
        ranks: Process and device of each rank.
        staging: Place where a new version waits for its commit: ``device``, ``host`` or ``none``.
        transports: Names of the transports by which the engine can receive weights.
        specs: Every tensor that a full update must contain, with the dtype that the engine keeps.
        session_owner: The trainer that updates the engine now; None if there is none.
        message: Reason why the engine does not serve, or a further remark.
        paused: True while an update, an operator or sleep pauses the engine.
        optional: Tensors that the engine knows but does not keep; an update may contain them or not.
        kind: Name of the engine's adapter; ``native`` for every engine with our receiver.
        dp_size: Number of data-parallel replicas behind the URL.
        ep_size: Expert-parallel size.
        staging_bytes: Size of the staging set on the rank where it is largest, in bytes; 0 if nothing is staged, or if
            the engine does not report it.
        instance: Random id of this start of the server; empty if it has none.
        tells_version: False if the engine cannot report the version that it serves, even after an update.
        no_pause: Pause modes with which the engine, as it was started, cannot be updated, each with the reason.
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
    def devices(self) -> tuple[str, ...]:
        """Each rank's device, as in ``RankInfo.device``."""
        return tuple(rank.device for rank in self.ranks)


def shown(text: str) -> str:
    """Returns text from another process for a log or a label: one line without control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _form(kind: type[msgspec.Struct], other: dict[str, Any]) -> Any:
    """Returns the class as it is on the wire, with other types of some fields; they are left out if they are unset."""
    same = [field for field in msgspec.structs.fields(kind) if field.name not in other]
    fields: list[Any] = [(f.name, f.type) if f.required else (f.name, f.type, f.default) for f in same]
    fields += [(name, what | msgspec.UnsetType, msgspec.UNSET) for name, what in other.items()]
    tag = kind.__struct_config__.tag
    return msgspec.defstruct(kind.__name__, fields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=tag)


def _with(kind: Any, message: Any, **other: Any) -> Any:
    """Returns a copy of a message as another class, with other fields."""
    return kind(**{name: getattr(message, name) for name in kind.__struct_fields__ if name not in other}, **other)


_Specs = Annotated[tuple[TensorSpec, ...], Meta(min_length=1, max_length=MAX_TENSORS)]
_Bucket = Annotated[int, Meta(ge=0, lt=MAX_BUCKETS)]
# Either the specs of an Open, or the hash of a plan, with the plan itself until the other end has it.
_OpenForm = _form(Open, {"specs": _Specs, "plan": PlanHash, "tables": msgspec.Raw})
_AnnounceForm = _form(Announce, {"layout": BucketLayout, "plan": PlanHash, "bucket": _Bucket})
_RankForm = _form(RankAck, {"held": HeldForm})
# The specs as raw bytes, so that those in the cache are not decoded again.
_InfoForm = _form(EngineInfo, {"specs": msgspec.Raw})
# The same for documents, in which every part has its own schema.
OPEN_SCHEMA = _form(Open, {"specs": _Specs, "plan": PlanHash, "tables": Tables})
ANNOUNCE_SCHEMA = _AnnounceForm

_encoder = msgspec.json.Encoder()
# Made at import: msgspec inspects a class when its decoder is made, and two threads that do so at once crash.
_decoder = msgspec.json.Decoder(_OpenForm | _AnnounceForm | Join | Leave | Close | Commit | Revert | Abort | Readback)
_infos = msgspec.json.Decoder(_InfoForm)
_acks = msgspec.json.Decoder(Ack)
_rank_acks = msgspec.json.Decoder(_RankForm)
_specs: msgspec.json.Decoder[tuple[TensorSpec, ...]] = msgspec.json.Decoder(
    Annotated[tuple[TensorSpec, ...], Meta(max_length=MAX_TENSORS)]
)
_Answer = TypeVar("_Answer")

# An engine's description has the same specs in every update, and with many tensors they take longer to decode than the
# weights to send.  Both ends cache them: encoded ones by identity, decoded ones by their bytes.
_TABLES_BYTES = 128 << 20
_TIMES_ITS_BYTES = 4  # memory of decoded specs
_encoded: Lru[int, tuple[object, bytes]] = Lru(_TABLES_BYTES)
_known_specs: Lru[bytes, tuple[TensorSpec, ...]] = Lru(_TABLES_BYTES)


def encode(message: msgspec.Struct, *, named: bool = False, known_tables: Collection[str] = ()) -> bytes:
    """Encodes any of the classes above as JSON.

    Args:
        message: The message.
        named: True if the other end has the plan of an ``Open``, which is then named and not sent.
        known_tables: Hashes of the tables that the other end of a ``RankAck`` has.
    """
    if isinstance(message, Open):
        message = _open_form(message, named=named)
    elif isinstance(message, Announce):
        rest: dict[str, Any] = {"layout": message.layout, "plan": msgspec.UNSET, "bucket": msgspec.UNSET}
        if message.plan:
            rest = {"layout": msgspec.UNSET, "plan": message.plan, "bucket": message.layout.index}
        message = _with(_AnnounceForm, message, **rest)
    elif isinstance(message, RankAck):
        held = form_of(message.held, known_tables) if message.held.table.parts else msgspec.UNSET
        message = _with(_RankForm, message, held=held)
    elif isinstance(message, EngineInfo):
        known = _encoded.get(id(message.specs))
        if known is None:
            known = message.specs, _encoder.encode(message.specs)  # kept alive, so that no other one gets its id
            _encoded.put(id(message.specs), known, _TIMES_ITS_BYTES * len(known[1]))
        message = _with(_InfoForm, message, specs=msgspec.Raw(known[1]))
    return _encoder.encode(message)


def _open_form(message: Open, *, named: bool) -> Any:
    plan = message.plan
    if plan is None:
        return _with(_OpenForm, message, plan=msgspec.UNSET, tables=msgspec.UNSET)
    tables = msgspec.UNSET if named else msgspec.Raw(plan.encoded)
    return _with(_OpenForm, message, specs=msgspec.UNSET, bucket_runs=(), plan=plan.hash, tables=tables)


def _opened(form: Any) -> Open:
    """Returns the Open of its form.

    Raises:
        ValueError, WireError: It has neither specs nor a plan, or both; the plan is unknown, or refused by
            ``take_plan``.
    """
    if form.plan is msgspec.UNSET:
        if form.specs is msgspec.UNSET or form.tables is not msgspec.UNSET:
            raise ValueError("an Open needs specs, or a plan")
        return _with(Open, form, plan=None)
    if form.specs is not msgspec.UNSET or form.bucket_runs:
        raise ValueError("an Open with a plan has its specs and runs in the plan")
    plan = kept_plan(form.plan) if form.tables is msgspec.UNSET else take_plan(form.plan, bytes(form.tables))
    return _with(Open, form, specs=plan.specs, bucket_runs=plan.bucket_runs, plan=plan)


def _announced(form: Any) -> Announce:
    """Returns the Announce of its form.

    Raises:
        ValueError, WireError: It has neither a layout nor a bucket of a plan, or both; the layout breaks the rules of
            ``BucketLayout.check``; or the plan is unknown or has no such bucket.
    """
    if form.layout is not msgspec.UNSET:
        if form.plan is not msgspec.UNSET or form.bucket is not msgspec.UNSET:
            raise ValueError("an Announce has a layout, or a bucket of a plan")
        form.layout.check()
        return _with(Announce, form, plan="")
    if form.plan is msgspec.UNSET or form.bucket is msgspec.UNSET:
        raise ValueError("an Announce needs a layout, or a bucket of a plan")
    layouts = kept_plan(form.plan).layouts
    if form.bucket >= len(layouts):
        raise ValueError(f"bucket {form.bucket}: its plan has {len(layouts)}")
    return _with(Announce, form, layout=layouts[form.bucket])


def _described(data: bytes) -> EngineInfo:
    form = _infos.decode(data)
    if form.specs is msgspec.UNSET:
        raise ValueError("specs are missing")
    table = bytes(form.specs)
    specs = _known_specs.get(table)
    if specs is None:
        specs = _specs.decode(table)
        _known_specs.put(table, specs, _TIMES_ITS_BYTES * len(table))
    return _with(EngineInfo, form, specs=specs)


def decode_ack(data: bytes) -> Ack:
    """Decodes an engine's answer.

    Raises:
        WireError: The bytes are no such answer.
    """
    return _answer(_acks.decode, data)


def decode_rank_ack(data: bytes, tables: MutableMapping[str, HeldTable] | None = None) -> RankAck:
    """Decodes an engine rank's answer.

    Args:
        data: The answer.
        tables: Tables of parts that came with earlier answers, by hash; takes the one that comes with this one.

    Raises:
        WireError: The bytes are no such answer, or name a table that did not come.
    """

    def read(data: bytes) -> RankAck:
        form = _rank_acks.decode(data)
        held = NOTHING_HELD if form.held is msgspec.UNSET else held_of(form.held, {} if tables is None else tables)
        return _with(RankAck, form, held=held)

    return _answer(read, data)


def decode_info(data: bytes) -> EngineInfo:
    """Decodes an engine's description of itself.

    Raises:
        WireError: The bytes are no such description.
    """
    return _answer(_described, data)


def _answer(read: Callable[[bytes], _Answer], data: bytes) -> _Answer:
    try:
        return read(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise WireError(f"not an answer of a weightcast receiver: {error}") from None


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Decodes a trainer's message and checks every field.

    Raises:
        WireError: The message is too large, is not JSON, or is none of these messages; the text names the field.
        UnknownPlan: The message names a plan that this process does not have.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"the message has {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    try:
        form = _decoder.decode(data)
        if isinstance(form, _OpenForm):
            return _opened(form)
        return _announced(form) if isinstance(form, _AnnounceForm) else form
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise WireError(f"not a weightcast message: {error}") from None
