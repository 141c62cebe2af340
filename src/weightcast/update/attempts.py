"""The attempts of one update, as every trainer rank runs them.

An attempt fills and sends every bucket once.  The head decides after each attempt whether there is another one, with
fewer targets, and every rank hears its decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from weightcast.comm.trainer_group import TrainerGroup
from weightcast.errors import TrainerRankFailed, UpdateFailed
from weightcast.protocols import Exporter
from weightcast.runtime.gc_pause import gc_paused
from weightcast.runtime.peak_memory import PeakMemory
from weightcast.update.bucket_stream import BucketStream
from weightcast.update.head import Head
from weightcast.update.messages import AttemptResult
from weightcast.update.trainer_ranks import TrainerRanks
from weightcast.update.watched import gather_ends
from weightcast.watch.listeners import Events

_PROBE_TOKENS = tuple(range(5, 37))


class Attempts:
    """Runs the attempts of one update after the other."""

    def __init__(self, exporter: Exporter, group: TrainerGroup, ranks: TrainerRanks, events: Events) -> None:
        self._exporter = exporter
        self._group = group
        self._ranks = ranks
        self._events = events
        self._trimmed = False

    def run(self, head: Head | None, stream: BucketStream) -> AttemptResult:
        """Repeats attempts until the update is over.  Collective: every trainer rank calls it.

        ``head`` is None on other ranks.  All return the last attempt's
        result; the head's report has the timeline as well.  If it has a ``plan``, the caller makes another stream and
        calls this again.  TrainerRankFailed says that another trainer rank failed; on the head UpdateFailed, if that
        was after the switch.
        """
        while True:
            result = self._attempt(head, stream)
            if not result.again or result.plan is not None:
                return result

    def _attempt(self, head: Head | None, stream: BucketStream) -> AttemptResult:
        """Runs one attempt; every rank returns the same result."""
        kept_bytes = stream.buffer_bytes  # buffers of an earlier update count too
        # Later on, training would have to fault in again what it keeps in its heap from step to step.
        peak = PeakMemory(self._exporter.device, trim=not self._trimmed)
        self._trimmed = True
        try:
            with peak, gc_paused():
                result, heard = self._move(head, stream)
        except BaseException as error:
            if self._group.world_size > 1:  # the other ranks would wait for this rank
                self._group.abort(f"{type(error).__name__}: {error}")
            if head is not None:
                head.break_off(error)
            raise
        if heard:
            return result
        try:
            return self._conclude(result, head, stream, lambda: kept_bytes + peak.extra_bytes)
        except TrainerRankFailed as error:
            if head is None or not head.run.switched:
                raise
            raise UpdateFailed(f"the engines have switched, but {error}", report=head.report()) from error

    def _move(self, head: Head | None, stream: BucketStream) -> tuple[AttemptResult, bool]:
        """Fills and sends every bucket; returns the result, and True if every rank has heard it (it failed early)."""
        result = AttemptResult()
        if head is not None:
            head.look_ahead()
        filling = stream.begin()
        if head is not None:
            head.begin_open(filling.plan)
        stream.start(filling)
        if head is not None:
            result = head.open(filling.plan)
            if result.boxes == stream.boxes:
                result = msgspec.structs.replace(result, boxes=None)
        result = self._ranks.hear(result)
        if result.boxes is not None:
            stream.use_boxes(result.boxes)
        if result.invited:
            stream.meet(result.invited)
            if head is not None:
                result = head.after_meeting(msgspec.structs.replace(result, invited=()))
            result = self._ranks.hear(result)
        if result.failure is not None or result.again:
            return result, True
        folded, found = stream.send(filling, sums_buckets=result.sums_buckets)
        if head is not None:
            result = head.finish(folded, found)
            if head.failed:
                stream.abort("the update failed")
        return result, False

    def _conclude(
        self, result: AttemptResult, head: Head | None, stream: BucketStream, extra_bytes: Callable[[], int]
    ) -> AttemptResult:
        """Tells every rank the attempt's result, with the largest peak memory of all ranks in the report.

        The head's report has the timeline as well, which may be long.
        """
        asked_at = time.monotonic()
        result = self._ranks.hear(result)
        heard = time.monotonic()
        if result.score:
            result = self._score(head)
        if result.report is None:
            return result
        ends = gather_ends(self._group, self._events.recording, extra_bytes(), heard=heard, asked_at=asked_at)
        if ends is None:
            return self._ranks.hear(result)
        peak_bytes, timeline = ends
        report = msgspec.structs.replace(
            result.report,
            peak_extra_bytes=peak_bytes,
            planned_extra_bytes=stream.planned_bytes,
            bucket_bytes=stream.bucket_bytes,
        )
        result = self._ranks.hear(msgspec.structs.replace(result, report=report))
        return msgspec.structs.replace(result, report=report.with_timeline(timeline))

    def _score(self, head: Head | None) -> AttemptResult:
        mine, why, began = list[float](), "", time.monotonic()
        try:
            mine = self._exporter.logprobs(_PROBE_TOKENS)
        except Exception as error:  # noqa: BLE001  the model's own code; the engines have switched, and that stands
            why = f"the trainer's forward pass failed: {type(error).__name__}: {error}"
        result = AttemptResult()
        if head is not None:
            head.run.add_phase("verify", time.monotonic() - began)
            result = head.compare(_PROBE_TOKENS, mine, why)
        return self._ranks.hear(result)
