"""READ FIRST: the seams between the parts.

An *exporter* turns a model into named tensors.  An *adapter* turns the steps of an update into requests
that one kind of engine understands.  A *transport* moves filled buckets and owns everything that has a lifetime.
An adapter says, it never does: it opens no socket, joins no group and moves no tensor, so every byte that
an engine would be sent can be tested without one.  Exporter, adapter and transport do not know each other;
``updater.py`` introduces them.

What an adapter says is a generator, because engines want one request for a step, or five, or none, and the next
one may depend on the last answer.  It yields requests; each ``yield`` gives the answer's body, or raises
``TargetRejected`` there if the engine refused, which the adapter may handle; it returns what the step came to::

    def commit(self, message: Commit) -> Steps:
        yield EngineRequest(path="/end_weight_update", body=b"{}")
        yield EngineRequest(path="/continue_generation", body=b"{}")
        return Ack(ok=True, version=message.version)
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch

    from weightcast.comm.local import TrainerGroup
    from weightcast.comm.share import Shared
    from weightcast.wire.bucket import Bucket
    from weightcast.wire.digest import Box
    from weightcast.wire.layout import BucketLayout, Packing, TensorSpec
    from weightcast.wire.messages import Ack, Close, Commit, EngineInfo, Open


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One HTTP request that an adapter wants sent.

    Attributes:
        method: ``GET`` or ``POST``.
        path: With a leading slash, and with the query if there is one.
        body: JSON bytes; empty for none.
        timeout_s: Deadline of this one request; None for the step's.
        lease: True if the answer is followed by a stream that the caller must keep open: closing it,
            on purpose or by dying, tells the engine to end the session.
    """

    method: str = "POST"
    path: str
    body: bytes = b""
    timeout_s: float | None = None
    lease: bool = False


Steps: TypeAlias = "Generator[EngineRequest, bytes, Ack]"
Sharing = Literal["weightcast", "torch", "ring"]
Meeting = Literal["weightcast", "torch", "nccl-id"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """Into a process group across both worlds, for one target.  The trainer's head is rank 0.

    Attributes:
        session: The session that it is for.
        group: The group's name; never used twice.
        host: Where the trainer's store listens.
        port: Likewise.
        token: Prefix of the store's keys where our own receiver meets.
        first_rank: Group rank of the target's rank 0; the others follow in order.
        world_size: Ranks in the group.
        backend: ``nccl`` or ``gloo``.
        bucket_bytes: No bucket will be larger.
        timeout_s: Deadline for meeting, in seconds.
        unique_id: NCCL's id of the group, for engines that meet by it; empty for others.
    """

    session: str
    group: str
    host: str
    port: int
    token: str
    first_rank: int
    world_size: int
    backend: Literal["nccl", "gloo"]
    bucket_bytes: int
    timeout_s: float
    unique_id: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one trainer rank holds of one tensor, without any communication.

    Attributes:
        spec: The whole tensor, wire dtype.
        box: Which part of it.
        tensor: The part; shape ``box.shape``, the model's own dtype, on the model's device.
    """

    spec: TensorSpec
    box: Box
    tensor: torch.Tensor


class Exporter(Protocol):
    """A model as named, unsharded tensors.  Every trainer rank has one; its methods are called in step."""

    @property
    def device(self) -> torch.device:
        """Where the weights live, and where a bucket for them should be."""
        ...

    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor of an update: Hugging Face names, wire dtypes, one order on all ranks.  No communication."""
        ...

    def shards(self) -> Iterator[Shard]:
        """What this rank holds.  No communication."""
        ...

    def prepare(self, group: TrainerGroup) -> None:
        """Find out what the other ranks hold.  Collective; once, before the first ``fill``.

        Raises:
            ConfigError: This model cannot be exported as it is sharded; the same on every rank.
        """
        ...

    def fill(self, bucket: Bucket | None, layout: BucketLayout, group: TrainerGroup) -> torch.Tensor | None:
        """Write the layout's tensors, gathered and cast, into the bucket.  Collective over ``group``.

        Args:
            bucket: Where to; None on a rank that only gives what it holds.
            layout: What; the same on every rank.
            group: The trainer ranks.  Which of them have a bucket is ``group.receivers``.

        Returns:
            ``Bucket.sums``, if they were taken on the way; None leaves that to others.
        """
        ...


class Lender(Protocol):
    """An exporter whose memory can be sent from where it lies."""

    def lend(self, layouts: Sequence[BucketLayout], group: TrainerGroup) -> Sequence[Mapping[str, torch.Tensor]]:
        """What of each bucket this rank holds just as it travels: ``Bucket.lent``.

        Views of the weights, good until they change.  A bucket that has them is filled with the rest alone.

        Args:
            layouts: Of the buckets.
            group: The trainer ranks; this one holds everything.
        """
        ...


class Scorer(Protocol):
    """The trainer's own forward pass, for proof at level ``behaviour``."""

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first given those before it.  Collective over the trainer ranks."""
        ...


class Adapter(Protocol):
    """What the sender needs to know of one engine, as data and words.  One for each target; may remember.

    Attributes:
        packing: What of a bucket the engine can read.
        sharing: How a buffer is handed to its processes over ``ipc``: as our own handles, or as torch's, to one
            buffer or to the storage of all (``comm/share.py``).
        meeting: How its ranks join a group over ``broadcast``: as our receiver does, as
            ``torch.distributed`` does at ``tcp://host:port`` with the group's name as prefix, or by NCCL's unique id.
        in_flight: How many buckets it may be told of before it has answered the first, 1 or 2.
        proves: Levels of proof that it can answer for, beside ``behaviour``.
        leased: True if the engine ends a session by itself when the trainer is gone, and knows whether what it keeps is
            one whole version.  We remember it for the others.
    """

    packing: Packing
    sharing: Sharing
    meeting: Meeting
    in_flight: int
    proves: frozenset[Literal["received", "resident"]]
    leased: bool

    def specs(self) -> Sequence[TensorSpec]:
        """What the engine expects in a full update; empty if it cannot say."""
        ...

    def check(self, specs: Sequence[TensorSpec], *, transport: str, bucket_bytes: int) -> None:
        """Preflight of what this kind of engine is known to bite with.

        Args:
            specs: What will be sent.
            transport: By which transport.
            bucket_bytes: No bucket is larger.

        Raises:
            ConfigError: It cannot work; the hint says what to set on which side.
        """
        ...

    def open(self, message: Open) -> Steps:
        """Start a session.  An engine that cannot stage is paused here, since buckets go straight into live weights."""
        ...

    def join(self, invitation: Invitation) -> Steps:
        """Join a group."""
        ...

    def bucket(self, session: str, layout: BucketLayout, *, group: str | None, shared: Sequence[Shared]) -> Steps:
        """A bucket comes, from a group or from memory that trainer ranks share (one item for each that filled one).

        Over ``broadcast`` the first request must be the one that makes the engine enter the collective.
        """
        ...

    def close(self, message: Close) -> Steps:
        """No more buckets."""
        ...

    def commit(self, message: Commit) -> Steps:
        """Make it live, stamp the version, resume."""
        ...

    def abort(self, session: str, reason: str) -> Steps:
        """End the session.  ``Ack.state`` says what is left: the old version, or parts of two and so quarantined."""
        ...

    def leave(self, group: str | None) -> Steps:
        """Leave a group, let go of mapped buffers.  Leaving what was never joined is fine."""
        ...

    def score(self, token_ids: Sequence[int]) -> Generator[EngineRequest, bytes, list[float]]:
        """Log-probability of each token but the first given those before it, under the live weights."""
        ...


@runtime_checkable
class Storing(Protocol):
    """An adapter of an engine that meets by a unique id and may look for it in the group's store."""

    def stored(self, unique_id: bytes) -> Mapping[str, bytes]:
        """What the store has to hold for it, by key."""
        ...


@runtime_checkable
class FromFolder(Protocol):
    """What an adapter can say as well, if its engine loads checkpoint folders while it runs; for ``disk``."""

    def load_folder(self, session: str, folder: str) -> Steps:
        """All weights lie in ``model.safetensors`` of this folder, which goes away after the answer."""
        ...


class Kind(Protocol):
    """One kind of engine: how it is recognised, and its adapter."""

    name: str

    def recognise(self, url: str) -> Generator[EngineRequest, bytes, EngineInfo | None]:
        """Ask a server what it is; None if it is no engine of this kind.

        Raises:
            ConfigError: It is one, and cannot be updated as it was started.
        """
        ...

    def adapter(self, info: EngineInfo) -> Adapter:
        """An adapter for an engine that was recognised."""
        ...


class Transport(Protocol):
    """Moves filled buckets to every target, in order, two in flight.  Lives on the head trainer rank."""

    name: str

    def connect(self) -> None:
        """Create what the membership needs (groups); does nothing if it is there already."""
        ...

    def settle(self) -> None:
        """Return when nothing is under way any more, whatever became of it."""
        ...

    def send(self, bucket: Bucket, shared: Sequence[Shared]) -> None:
        """Start sending; returns before the bucket may be reused."""
        ...

    def drain(self) -> None:
        """Return when every bucket sent so far has been taken over by every target; raise what went wrong."""
        ...

    def abort(self, reason: str) -> None:
        """Give up what is under way, so that nobody waits; safe to call twice and from another thread."""
        ...

    def close(self) -> None:
        """Let go of groups and buffers on both sides; safe to call twice."""
        ...
