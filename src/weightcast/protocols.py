"""READ FIRST: the seams between the parts.

An *exporter* turns a model into named tensors.  An *adapter* turns the steps of an update into requests
that one kind of engine understands.  A *transport* moves filled buckets and owns everything that has a lifetime.
An adapter says, it never does: it opens no socket, joins no group and moves no tensor, so every byte that
an engine would be sent can be tested without one.  Exporter, adapter and transport do not know each other;
``updater.py`` introduces them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from weightcast.comm.local import TrainerGroup
    from weightcast.wire.bucket import Bucket
    from weightcast.wire.digest import Box
    from weightcast.wire.layout import BucketLayout, Packing, TensorSpec
    from weightcast.wire.messages import Ack, Close, Commit, EngineInfo, Join, MemoryHandle, Open


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One HTTP request that an adapter wants sent.

    Attributes:
        method: ``GET`` or ``POST``.
        path: With a leading slash.
        body: JSON bytes; empty for none.
        lease: True if the answer is followed by a stream that the caller must keep open: closing it,
            on purpose or by dying, tells the engine to end the session.
    """

    method: str = "POST"
    path: str
    body: bytes = b""
    lease: bool = False


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

    def fill(self, bucket: Bucket | None, layout: BucketLayout, group: TrainerGroup) -> None:
        """Write the layout's tensors, gathered and cast, into the bucket.  Collective over ``group``.

        Args:
            bucket: Where to; None on a rank that only gives what it holds.
            layout: What; the same on every rank.
            group: The trainer ranks.  Which of them have a bucket is ``group.receivers``.
        """
        ...


class Scorer(Protocol):
    """The trainer's own forward pass, for proof at level ``behaviour``."""

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first given those before it.  Collective over the trainer ranks."""
        ...


class Adapter(Protocol):
    """What the sender needs to know of one kind of engine, as data and words."""

    packing: Packing

    def specs(self, info: EngineInfo) -> Sequence[TensorSpec]:
        """What the engine expects in a full update; empty if it cannot say."""
        ...

    def open_request(self, message: Open) -> EngineRequest:
        """Start a session."""
        ...

    def join_request(self, message: Join) -> EngineRequest:
        """Join a group."""
        ...

    def bucket_request(
        self, session: str, layout: BucketLayout, *, group: str | None, handles: Sequence[MemoryHandle]
    ) -> EngineRequest:
        """A bucket comes, from a group or from mapped memory."""
        ...

    def close_request(self, message: Close) -> EngineRequest:
        """No more buckets."""
        ...

    def commit_request(self, message: Commit) -> EngineRequest:
        """Make it live."""
        ...

    def abort_request(self, session: str, reason: str) -> EngineRequest:
        """End the session, keep the old version."""
        ...

    def leave_request(self, group: str | None) -> EngineRequest:
        """Leave a group, let go of mapped buffers."""
        ...

    def readback_request(self) -> EngineRequest:
        """Digest what is live."""
        ...

    def score_request(self, token_ids: Sequence[int]) -> EngineRequest:
        """Log-probabilities under the live weights."""
        ...

    def ack(self, reply: bytes) -> Ack:
        """Read the engine's answer.

        Raises:
            WireError: It is not an answer of this engine.
        """
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

    def send(self, bucket: Bucket, handles: Sequence[MemoryHandle]) -> None:
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
