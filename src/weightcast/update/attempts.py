"""The attempts of one update, as every trainer rank runs them.

An attempt fills and sends every bucket once.  The head decides after each attempt whether there is another one, with
fewer targets, and every rank hears its decision.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.source_sums import AllSums
from weightcast.errors import TrainerRankFailed, UpdateFailed
from weightcast.exporters.all_sums import find_differing
from weightcast.protocols import Exporter
from weightcast.runtime.gc_pause import gc_paused
from weightcast.runtime.peak_memory import PeakMemory
from weightcast.update.bucket_stream import BucketStream, Filling
from weightcast.update.follower import Follower
from weightcast.update.messages import AttemptResult
from weightcast.update.trainer_ranks import TrainerRanks
from weightcast.update.watched import gather_ends
from weightcast.watch.listeners import Events

_PROBE_TOKENS = tuple(range(5, 37))


@dataclass(frozen=True, slots=True)
class SentBuckets:
    """An attempt in which every bucket was sent, or one could not be.

    Attributes:
        sums: The sums of all ranks, as far as this rank has them.
        extra_bytes: Most extra memory of this rank until then, with buffers of earlier updates.
    """

    sums: AllSums
    extra_bytes: int


class Attempts:
    """Runs the attempts of one update after the other.

    Every trainer rank calls each method, and all return the same result; the head's report has the timeline as well.
    TrainerRankFailed says that another trainer rank failed; on the head UpdateFailed, if that was after the switch.
    """

    def __init__(self, exporter: Exporter, group: TrainerGroup, ranks: TrainerRanks, events: Events) -> None:
        self._exporter = exporter
        self._group = group
        self._ranks = ranks
        self._events = events
        self._trimmed = False

    def send(self, head: Follower, stream: BucketStream) -> SentBuckets | AttemptResult:
        """Fills and sends every bucket of an attempt; the result if it failed before."""
        kept_bytes = stream.buckets.buffer_bytes  # buffers of an earlier update count too
        # Later on, training would have to fault in again what it keeps in its heap from step to step.
        peak = PeakMemory(self._exporter.device, trim=not self._trimmed)
        self._trimmed = True
        with self._breaks_off(head), peak, gc_paused():
            head.look_ahead()
            filling = stream.begin()
            result = self._open(head, stream, filling)
            if result.failure is not None or result.again:
                return result
            sums = stream.send(filling, sums_buckets=result.sums_buckets)
            return SentBuckets(sums, kept_bytes + peak.extra_bytes)

    def taken(self, head: Follower) -> bool:
        """Waits until every engine has taken every bucket; False if one has not, which ``finish`` reports."""
        with self._breaks_off(head), gc_paused():
            head.drain()
            taken = b"no" if head.failed else b"yes"
            return self._group.broadcast_bytes(taken, timeout_s=self._ranks.wait_s) == b"yes"

    def finish(self, sent: SentBuckets, head: Follower, stream: BucketStream, *, repeats: bool = True) -> AttemptResult:
        """Proves and commits what was sent.

        If the result has ``again``, another attempt follows.  If it has a ``plan``, that needs another stream.  Without
        ``repeats`` it has neither: the weights may be others by now.
        """
        with self._breaks_off(head), gc_paused():
            result = head.finish(sent.sums, repeats=repeats)
            if head.failed:
                stream.abort("the update failed")
        try:
            return self._conclude(result, head, stream, sent)
        except TrainerRankFailed as error:
            report = head.report()
            if report is None or not head.switched:
                raise
            raise UpdateFailed(f"the engines have switched, but {error}", report=report) from error

    @contextmanager
    def _breaks_off(self, head: Follower) -> Generator[None]:
        try:
            yield
        except BaseException as error:
            if self._group.world_size > 1:  # the other ranks would wait for this rank
                self._group.abort(f"{type(error).__name__}: {error}")
            head.break_off(error)
            raise

    def _open(self, head: Follower, stream: BucketStream, filling: Filling) -> AttemptResult:
        """Opens the sessions and makes the groups; every rank has heard the result."""
        head.begin_open(filling.plan)
        stream.start(filling)
        result = head.open(filling.plan)
        if result.boxes == stream.buckets.boxes:
            result = msgspec.structs.replace(result, boxes=None)
        result = self._ranks.hear(result)
        if result.boxes is not None:
            stream.buckets.use_boxes(result.boxes)
        if result.invited:
            stream.meet(result.invited)
            result = self._ranks.hear(head.after_meeting(msgspec.structs.replace(result, invited=())))
        return result

    def _conclude(
        self, result: AttemptResult, head: Follower, stream: BucketStream, sent: SentBuckets
    ) -> AttemptResult:
        """Tells every rank the attempt's result, with the largest peak memory of all ranks in the report.

        The head's report has the timeline as well, which may be long.
        """
        asked_at = time.monotonic()
        result = self._ranks.hear(result)
        heard = time.monotonic()
        if result.differ:
            result = self._find_differing(sent.sums, head, stream)
        if result.score:
            result = self._score(head)
        if result.report is None:
            return result
        ends = gather_ends(self._group, self._events.recording, sent.extra_bytes, heard=heard, asked_at=asked_at)
        if ends is None:
            return self._ranks.hear(result)
        peak_bytes, timeline = ends
        report = msgspec.structs.replace(
            result.report,
            peak_extra_bytes=peak_bytes,
            planned_extra_bytes=stream.buckets.planned_bytes,
            bucket_bytes=stream.bucket_bytes,
        )
        result = self._ranks.hear(msgspec.structs.replace(result, report=report))
        return msgspec.structs.replace(result, report=report.with_timeline(timeline))

    def _find_differing(self, sums: AllSums, head: Follower, stream: BucketStream) -> AttemptResult:
        """Finds the tensors of which the trainer ranks' sums differ, and fails the attempt."""
        with self._breaks_off(head):
            found = find_differing(sums, self._group, timeout_s=self._ranks.wait_s)
            result = head.differ(found)
            stream.abort("the update failed")
        return self._ranks.hear(result)

    def _score(self, head: Follower) -> AttemptResult:
        mine, why, began = list[float](), "", time.monotonic()
        try:
            mine = self._exporter.logprobs(_PROBE_TOKENS)
        except Exception as error:  # noqa: BLE001  the model's own code; the engines have switched, and that stands
            why = f"the trainer's forward pass failed: {type(error).__name__}: {error}"
        head.add_phase("verify", time.monotonic() - began)
        return self._ranks.hear(head.compare(_PROBE_TOKENS, mine, why))
