"""Fills buckets on every trainer rank and hands them to the head, in a pipeline.

The exporter fills one bucket while the transport sends the one before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import cast

import msgspec
import torch

from weightcast.comm.shared_buckets import Shared, SharedSlot, make_slots
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.bucket_sums import sums_of_slots
from weightcast.digest.definition import RepeatedSums
from weightcast.digest.source_sums import Folded, SourceSums
from weightcast.exporters import sum_messages
from weightcast.exporters.bucketize import bucketize
from weightcast.exporters.held_parts import region
from weightcast.protocols import Exporter, Lender, Scattering
from weightcast.update.finite import check_parts_finite
from weightcast.update.head import Head
from weightcast.update.messages import Choice
from weightcast.watch.listeners import Events
from weightcast.wire.bucket import Bucket, run_sizes
from weightcast.wire.layout import BucketLayout
from weightcast.wire.messages import Part
from weightcast.wire.plans import UpdatePlan

Progress = Callable[[int, int], None]

_NUM_SLOTS = 2
_shared = msgspec.json.Decoder(Shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """The buckets of one attempt.

    Attributes:
        plan: The tensors and their buckets.
        buckets: Fills and returns the next bucket and its buffer; None and None on a rank that only contributes shards.
        sources: Sums of this rank's shards, which grow with each bucket; None without verification.
    """

    plan: UpdatePlan
    buckets: Iterator[tuple[Bucket | None, SharedSlot | None]]
    sources: SourceSums | None


class BucketStream:
    """The buffers of one membership, and the way of each bucket through them.  Every trainer rank has one."""

    def __init__(
        self,
        exporter: Exporter,
        layouts: Sequence[BucketLayout],
        group: TrainerGroup,
        choice: Choice,
        head: Head | None,
        *,
        verifies: bool,
        check_finite: bool,
        wait_s: float,
        progress: Progress | None = None,
        events: Events,
    ) -> None:
        """Allocates nothing yet.

        Args:
            exporter: The source of the weights.
            layouts: Layouts of the buckets, the same on every rank.
            group: The trainer ranks.
            choice: The head's choices at connect.
            head: Sends the buckets; None on ranks other than the head.
            verifies: True if the sums of this rank's shards are needed.
            check_finite: True if weights must be finite; of use here where the head does not see all of a bucket.
            wait_s: Deadline of one wait for another trainer rank, in seconds.
            progress: Callback on the head after each bucket, with bytes sent and bytes in all.
            events: Told of each bucket that was filled.
        """
        self._exporter = exporter
        self._layouts = layouts
        self._group = group
        self._choice = choice
        self._head = head
        self._verifies = verifies
        self._wait_s = wait_s
        self._progress = progress
        self._events = events
        self._checks_finite = choice.scattered and check_finite
        self._payload_bytes = [sum(slot.size_bytes for slot in layout.slots) for layout in layouts]
        self._plan: UpdatePlan | None = None
        self._slots: list[SharedSlot] = []
        self._bucket_sums = RepeatedSums()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that this rank holds at the moment."""
        return sum(slot.data.numel() for slot in self._slots)

    def start(self) -> Filling:
        """Begins to fill the buckets of one attempt.  Collective: every trainer rank calls it."""
        lent = self._lend()
        runs = tuple(run_sizes(layout, lent[number] if lent else ()) for number, layout in enumerate(self._layouts))
        sources = SourceSums() if self._verifies else None
        buckets = self._fill(lent, sources)
        # With one trainer rank, buckets fill while the engines open their sessions: one on the host, and as many as
        # there are slots on a GPU, which works asynchronously.
        ahead = _NUM_SLOTS if self._exporter.device.type == "cuda" else 1
        first = list(islice(buckets, ahead if self._group.world_size == 1 else 0))
        if self._plan is None or self._plan.bucket_runs != runs:
            self._plan = UpdatePlan(tuple(self._exporter.specs()), self._layouts, runs)
        return Filling(plan=self._plan, buckets=chain(first, buckets), sources=sources)

    def send(
        self, filling: Filling, *, sums_buckets: bool
    ) -> tuple[Sequence[Folded], Mapping[int, Sequence[torch.Tensor]]]:
        """Sends all buckets.  Collective: every trainer rank calls it.

        Args:
            filling: The buckets.
            sums_buckets: True if every rank with a bucket sums it.

        Returns:
            The arguments of ``Head.finish``.  They are empty on other ranks, without verification, and after a failure.
        """
        sums: list[torch.Tensor] | None = [] if sums_buckets else None
        if not self._send_each(filling.buckets, sums) or filling.sources is None:
            return (), {}
        return self._gather_sums(filling.sources, sums or ())

    def close(self) -> None:
        """Frees the buffers; safe to call twice."""
        for slot in self._slots:
            slot.close()
        self._slots.clear()

    def _lend(self) -> Sequence[Mapping[str, torch.Tensor]]:
        """Returns the tensors of each bucket that are sent without a copy; empty if the plan has none."""
        return cast(Lender, self._exporter).lend(self._layouts, self._group) if self._choice.zero_copy else ()

    def _fill(
        self, lent: Sequence[Mapping[str, torch.Tensor]], sources: SourceSums | None
    ) -> Iterator[tuple[Bucket | None, SharedSlot | None]]:
        """Fills each bucket into the next slot; yields None and None on a rank that only contributes shards."""
        receives = self._group.rank in self._group.receivers
        if receives and not self._slots:
            size = max(layout.size_bytes for layout in self._layouts)
            count = min(_NUM_SLOTS, len(self._layouts))
            self._slots = make_slots(count, max(size, 1), self._exporter.device, self._choice.ways)
        slots = [slot.data for slot in self._slots] if receives else None
        scattered = self._choice.scattered
        buckets = bucketize(self._exporter, self._layouts, self._group, slots, lent, sources, scattered=scattered)
        for layout in self._layouts:
            slot = self._slots[layout.index % len(self._slots)] if receives else None
            if slot is not None:
                slot.reclaim()
            began = time.monotonic()
            bucket = next(buckets)
            ended = time.monotonic()
            self._events.step_ended("gather", began, ended, bucket=layout.index)
            if self._head is not None:
                self._head.add_phase("gather", ended - began)
            yield bucket, slot

    def _send_each(
        self, buckets: Iterator[tuple[Bucket | None, SharedSlot | None]], sums: list[torch.Tensor] | None
    ) -> bool:
        """Sends one bucket after the other.

        Args:
            buckets: All buckets, with their slots.
            sums: Output list for the sums of each bucket's slots, on ranks other than the head; None for no sums.

        Returns:
            False if a bucket could not be sent; the same on every rank.
        """
        head = self._head
        sent_bytes = 0
        for _ in self._layouts:
            go = b"go" if head is None or not head.failed else b"stop"
            if self._group.broadcast_bytes(go, timeout_s=self._wait_s) != b"go":
                return False
            bucket, slot = next(buckets)
            if sums is not None and head is None and bucket is not None:
                sums.append(sums_of_slots(bucket, self._bucket_sums))
            shared = self._gather_shared(slot, bucket)
            if head is not None:
                assert bucket is not None
                head.send(bucket, shared)
                if self._progress is not None and not head.failed:
                    sent_bytes += self._payload_bytes[bucket.layout.index]
                    self._progress(sent_bytes, sum(self._payload_bytes))
        return True

    def _gather_sums(
        self, sources: SourceSums, buckets: Sequence[torch.Tensor]
    ) -> tuple[Sequence[Folded], Mapping[int, Sequence[torch.Tensor]]]:
        """Gathers the sums of all ranks on the head, one message from each rank; empty on other ranks."""
        message = sum_messages.encode(sources.values(), buckets)
        messages = self._group.gather_bytes(message, timeout_s=self._wait_s)
        if messages is None:
            return (), {}
        return sum_messages.decode(self._exporter, self._layouts, self._group, messages)

    def _gather_shared(self, slot: SharedSlot | None, bucket: Bucket | None) -> list[Shared]:
        """Gathers the handles of all filled buffers on the head."""
        choice = self._choice
        if not choice.ways:
            return []
        mine = b""
        if slot is not None:
            shared = slot.share(opens=choice.opens, ring_opens=choice.ring_opens)
            if choice.scattered and bucket is not None:
                shared = msgspec.structs.replace(shared, parts=self._own_parts(bucket))
            mine = msgspec.json.encode(shared)
        gathered = self._group.gather_bytes(mine) or []
        return [_shared.decode(item) for item in gathered if item]

    def _own_parts(self, bucket: Bucket) -> tuple[Part, ...]:
        """The parts of a bucket that engines read from this rank's buffer.

        Raises:
            NotFinite: Weights in them are NaN or infinite.
        """
        served = cast(Scattering, self._exporter).serves(bucket.layout, self._group)
        if self._checks_finite:
            views = [(bucket.layout.slots[number], box) for number, box in served]
            check_parts_finite([(slot.spec.name, region(bucket, slot, box)) for slot, box in views])
        return tuple(Part(slot=number, offset=box.offset, shape=box.shape) for number, box in served)
