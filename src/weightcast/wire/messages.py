"""The messages that a trainer sends to an engine.

An update is Open, Join (if the group changed), Announce for each bucket, Close, Commit.  ``Close`` asks whether
everything has arrived, and ``Commit`` makes it live.  They are two messages so that no engine switches before every
engine has everything.  ``Revert`` undoes a commit until another session is opened.  ``Prepare`` may come before the
first update.

The engine answers each with an ``Ack`` (``answers.py``).  Before the first, the trainer asks for its description
(``engine_info.py``).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from weightcast.config import PauseMode, VerifyLevel
from weightcast.wire.bucket_sources import Source, group_of
from weightcast.wire.fields import (
    MAX_BUCKETS,
    Count,
    Digest,
    GroupName,
    Host,
    PlanHash,
    Port,
    Rank,
    Seconds,
    Session,
    Text,
    TraceParent,
    Version,
)
from weightcast.wire.layout import BucketLayout, TensorSpec
from weightcast.wire.plans import UpdateTables

PROTOCOL = 10
Way = Literal["buckets", "memory", "messages", "reads"]
# Paths at which an engine gives chunks of its weights to another engine, and tells which boxes its ranks want.
CHUNK = "/weightcast/chunk"
BOXES = "/weightcast/boxes"
MAX_RUN = 64  # buckets that one Announce names
MAX_GROUP = 1 << 14  # ranks in a group: gloo allocates memory for each of them before it connects to any


class Owner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainer process that owns a session, for error messages."""

    host: Text
    pid: Annotated[int, Meta(ge=0, le=1 << 32)]


class Open(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="open"):
    """Starts an update.  The engine refuses it, with nothing changed, if it does not fit the model or the state.

    Attributes:
        session: Unguessable id, which every later message has.  The last half is the same in all sessions of one
            updater, and secret likewise: an Open ends a session that its own updater has left open.
        version: The new version; not lower than the served one unless ``allow_older``.
        timeout_s: Deadline of each wait inside the engine, in seconds.
        lease_s: Seconds after the last message at which the engine ends the session by itself.
        pause: Fate of the requests that run at the switch.
        plan: The tensors that will be sent, and their buckets; without buckets if none will come.
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
    plan: UpdateTables
    traceparent: TraceParent = ""

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor that will be sent, in order."""
        return self.plan.specs

    @property
    def bucket_sizes(self) -> tuple[int, ...]:
        """As ``UpdateTables.bucket_sizes``."""
        return self.plan.bucket_sizes


class Prepare(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="prepare"):
    """Hands over the plan of the updates to come, so that the first of them need not work it out.

    It opens no session and changes no weights.  The engine refuses it while a session is open, and if the tensors do
    not fit its model.  An update that comes with another plan, or without this message, only takes longer.

    Attributes:
        owner: The process whose memory ``sources`` name.
        verify: Proof that the updates will ask for.
        way: How engine ranks will get their own shares: out of ``sources`` in "memory", by "messages", or by "reads"
            through NIXL; "buckets" if they will get whole buckets.
        sources: Source of each bucket in shared memory, which engine ranks map; empty if there is no such memory, or if
            it is not known yet.  An update may come with others.
    """

    plan: UpdateTables
    owner: Owner | None = None
    verify: VerifyLevel
    way: Way = "buckets"
    sources: Annotated[tuple[Source, ...], Meta(max_length=MAX_BUCKETS)] = ()


class Join(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="join"):
    """Asks the engine to join a process group of the trainer's head and engine ranks.  The group outlives an update.

    Attributes:
        host, port: Address of the trainer's store.
        token: Prefix of the store's keys, so that no rank joins another trainer's group by accident.
        first_rank: Group rank of this engine's first member; the others follow in order.
        world_size: Ranks in the group, the trainer's head (rank 0) included.
        timeout_s: Deadline of the rendezvous, in seconds.
        session: The session that needs the group; empty for a rendezvous outside an update, which lasts half a minute
            at most and ends when an update begins.
        wants: True if all trainer ranks are members, the first ones.  Each engine rank tells them at the rendezvous
            which boxes of the source tensors it wants.
        members: Engine ranks that join, in the order of their group ranks; empty for all of them.
        relays: True if the trainer then tells each engine rank from which other one it gets its pieces, and to which
            one it passes them on (``comm/group_moves.py``).
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
    wants: bool = False
    relays: bool = False
    members: Annotated[tuple[Rank, ...], Meta(max_length=MAX_GROUP)] = ()


class Leave(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="leave"):
    """Asks the engine to leave a group, if one is named and was ever joined, and to unmap buffers."""

    group: GroupName | None = None


class Announce(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="announce"):
    """Announces a bucket of a plan, and its source.  The engine answers when it has loaded the bucket.

    Attributes:
        bucket: Number of the bucket.
        following: How many buckets come next in the same group, without a message of their own.  The engine answers
            when it has loaded the last of them.
    """

    session: Session
    plan: UpdateTables
    bucket: Annotated[int, Meta(ge=0, lt=MAX_BUCKETS)]
    following: Annotated[int, Meta(ge=0, lt=MAX_RUN)] = 0
    source: Source

    def __post_init__(self) -> None:
        if (last := self.bucket + self.following) >= len(self.plan.layouts):
            raise ValueError(f"bucket {last}: its plan has {len(self.plan.layouts)}")
        if self.following and group_of(self.source) is None:
            raise ValueError("several buckets at once come in a group")

    @property
    def layout(self) -> BucketLayout:
        """The contents of the first bucket."""
        return self.plan.layouts[self.bucket]

    @property
    def layouts(self) -> tuple[BucketLayout, ...]:
        """All buckets that it announces."""
        return self.plan.layouts[self.bucket : self.bucket + self.following + 1]


class Close(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="close"):
    """Says that all buckets were sent.  The answer has a digest of what was copied and names what is missing.

    The trainer may send it again.

    Attributes:
        by_name: True asks for the digest of each tensor, and for the ranks that may be at fault if one is wrong.
            Thousands of digests take time while engines wait to switch, and are needed only to name those of a failure.
    """

    session: Session
    buckets: Annotated[int, Meta(ge=0, le=1 << 32)]
    by_name: bool = False


class Commit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="commit"):
    """Makes the new weights live: pause, switch, run the finishers, prove, stamp the version, resume.

    A trainer that lost the answer sends the message again.  The engine repeats its answer until the next Open.

    Attributes:
        digest: Model digest that the engine's tensors must have, in the dtypes that it keeps and without those that it
            cannot read back; empty without proof.
    """

    session: Session
    digest: Digest = ""


class Revert(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="revert"):
    """Restores the weights and the version that this session's commit replaced.

    An engine with a second set of weights can do this until the next Open or until it sleeps.  It pauses, switches,
    runs the finishers, compares its weights with the digest that it served before, and resumes.  The answer has the old
    version and the digests of the live weights.  Like ``Commit``, it may be sent again.
    """

    session: Session
    reason: Text = ""


class Abort(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="abort"):
    """Ends the session without a commit.  The engine answers when the session has ended."""

    session: Session
    reason: Text = ""


class Readback(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="readback"):
    """Asks for digests of the live weights, which the loader's routes lead to.  Changes nothing."""


class PeerEngine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine that another one copies, with its URL as that one's ranks reach it; ``api_key`` is empty for none."""

    url: Text
    api_key: Text = ""

    def __repr__(self) -> str:
        return f"PeerEngine(url={self.url!r})"  # a key must not get into a log


class Fetch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="fetch"):
    """Asks each rank to copy one chunk from the same rank of a peer, in place of an ``Announce``.

    The answer to the last chunk is the answer to ``Close``, with the digest by name of each tensor that waits.  The
    engine switches only if their model digest is ``digest``.

    Attributes:
        index: Number of the chunk; a rank with fewer chunks than others does nothing for the rest.
        peer: The engine to copy from.
        version: Version that the peer must serve, which is the session's.
        digest: Model digest that the peer proved for this version.
    """

    session: Session
    index: Count
    peer: PeerEngine
    version: Version
    digest: Annotated[str, Meta(min_length=1, max_length=80)]


class ReadChunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="chunk"):
    """Asks for one chunk of a rank's live weights, in the engine's layout.  Changes nothing.

    Attributes:
        layout: Hash of the asking rank's layout, which must be this rank's too.
        version: Version that the engine must serve.
        digest: Model digest that the engine must have proven for it.
    """

    rank: Rank
    index: Count
    layout: PlanHash
    version: Version
    digest: Annotated[str, Meta(min_length=1, max_length=80)]


class TellBoxes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="boxes"):
    """Asks each rank which boxes of the source tensors it wants.  Changes nothing."""


# On the wire as they are written; the others name tables (``codec.py``).
Verbatim = Join | Leave | Close | Commit | Revert | Abort | Readback | Fetch | ReadChunk | TellBoxes
Message = Open | Prepare | Announce | Verbatim
