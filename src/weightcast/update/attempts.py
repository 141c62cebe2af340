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

from weightcast.digest.source_sums import AllSums
from weightcast.errors import TrainerRankFailed, UpdateFailed
from weightcast.exporters.all_sums import find_differing
from weightcast.protocols import Exporter
from weightcast.report import UpdateReport
from weightcast.runtime.gc_pause import gc_paused
from weightcast.runtime.peak_memory import PeakMemory
from weightcast.update.bucket_stream import Filling
from weightcast.update.fleet import Fleet
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
    """Runs the updates that the head has begun.

    Every trainer rank calls each method, and all return the same report, or raise the same error; the head's report has
    the timeline as well.  TrainerRankFailed says that another trainer rank failed; on the head UpdateFailed, if that
    was after the switch.
    """

    def __init__(self, exporter: Exporter, fleet: Fleet, ranks: TrainerRanks, events: Events) -> None:
        self._exporter = exporter
        self._fleet = fleet
        self._group = ranks.group
        self._ranks = ranks
        self._events = events
        self._trimmed = False

    def run(self) -> UpdateReport:
        """Runs an update to its end."""
        while (report := self._ended(self._send())) is None:
            pass
        return report

    def run_until_sent(self) -> SentBuckets | UpdateReport:
        """Runs an update until every engine has taken every bucket; returns the report if it ended before."""
        while True:
            sent = self._send()
            if isinstance(sent, SentBuckets) and self._taken():
                return sent
            if (report := self._ended(sent)) is not None:
                return report

    def finish(self, sent: SentBuckets) -> UpdateReport:
        """Ends an update in which every engine has taken every bucket, while the weights change."""
        report = self._ended(sent, repeats=False)
        assert report is not None
        return report

    def _ended(self, sent: SentBuckets | AttemptResult, *, repeats: bool = True) -> UpdateReport | None:
        """Ends an attempt, and the update with it; None if another attempt follows."""
        result = self._finish(sent, repeats=repeats) if isinstance(sent, SentBuckets) else sent
        if result.plan is not None:
            self._fleet.replan(result.plan)
        if result.again:
            return None
        if result.report is not None:
            self._fleet.note_served(result.report)
        if (error := self._ranks.error_in(result)) is not None:
            raise error
        assert result.report is not None
        return result.report

    def _send(self) -> SentBuckets | AttemptResult:
        """Fills and sends every bucket of an attempt; the result if it failed before."""
        head, stream = self._fleet.head, self._fleet.stream
        kept_bytes = stream.buckets.buffer_bytes  # buffers of an earlier update count too
        # Later on, training would have to fault in again what it keeps in its heap from step to step.
        peak = PeakMemory(self._exporter.device, trim=not self._trimmed)
        self._trimmed = True
        with self._breaks_off(), peak, gc_paused():
            head.look_ahead()
            filling = stream.begin()
            result = self._open(filling)
            if result.failure is not None or result.again:
                return result
            sums = stream.send(filling, sums_buckets=result.sums_buckets)
            return SentBuckets(sums, kept_bytes + peak.extra_bytes)

    def _taken(self) -> bool:
        """Waits until every engine has taken every bucket; False if one has not, which ``finish`` reports."""
        head = self._fleet.head
        with self._breaks_off(), gc_paused():
            head.drain()
            taken = b"no" if head.failed else b"yes"
            return self._group.broadcast_bytes(taken, timeout_s=self._ranks.wait_s) == b"yes"

    def _finish(self, sent: SentBuckets, *, repeats: bool) -> AttemptResult:
        """Proves and commits what was sent.

        If the result has ``again``, another attempt follows.  If it has a ``plan``, that needs another stream.  Without
        ``repeats`` it has neither: the weights may be others by now.
        """
        head = self._fleet.head
        with self._breaks_off(), gc_paused():
            result = head.finish(sent.sums, repeats=repeats)
            if head.failed:
                self._fleet.stream.abort("the update failed")
        try:
            return self._conclude(result, sent)
        except TrainerRankFailed as error:
            report = head.report()
            if report is None or not head.run.switched:
                raise
            raise UpdateFailed(f"the engines have switched, but {error}", report=report) from error

    @contextmanager
    def _breaks_off(self) -> Generator[None]:
        try:
            with self._ranks.hear_of_errors():
                yield
        except BaseException as error:
            self._fleet.head.break_off(error)
            raise

    def _open(self, filling: Filling) -> AttemptResult:
        """Opens the sessions and makes the groups; every rank has heard the result."""
        head, stream = self._fleet.head, self._fleet.stream
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

    def _conclude(self, result: AttemptResult, sent: SentBuckets) -> AttemptResult:
        """Tells every rank the attempt's result, with the largest peak memory of all ranks in the report.

        The head's report has the timeline as well, which may be long.
        """
        asked_at = time.monotonic()
        result = self._ranks.hear(result)
        heard = time.monotonic()
        if result.differ:
            result = self._find_differing(sent.sums)
        if result.score:
            result = self._score()
        if result.report is None:
            return result
        ends = gather_ends(self._group, self._events.recording, sent.extra_bytes, heard=heard, asked_at=asked_at)
        if ends is None:
            return self._ranks.hear(result)
        peak_bytes, timeline = ends
        report = msgspec.structs.replace(
            result.report,
            peak_extra_bytes=peak_bytes,
            planned_extra_bytes=self._fleet.stream.buckets.planned_bytes,
            bucket_bytes=self._fleet.plan.bucket_bytes,
        )
        result = self._ranks.hear(msgspec.structs.replace(result, report=report))
        return msgspec.structs.replace(result, report=report.with_timeline(timeline))

    def _find_differing(self, sums: AllSums) -> AttemptResult:
        """Finds the tensors of which the trainer ranks' sums differ, and fails the attempt."""
        head = self._fleet.head
        with self._breaks_off():
            found = find_differing(sums, self._group, timeout_s=self._ranks.wait_s)
            result = head.differ(found)
            self._fleet.stream.abort("the update failed")
        return self._ranks.hear(result)

    def _score(self) -> AttemptResult:
        head = self._fleet.head
        mine, why, began = list[float](), "", time.monotonic()
        try:
            mine = self._exporter.logprobs(_PROBE_TOKENS)
        except Exception as error:  # noqa: BLE001  the model's own code; the engines have switched, and that stands
            why = f"the trainer's forward pass failed: {type(error).__name__}: {error}"
        head.run.add_phase("verify", time.monotonic() - began)
        return self._ranks.hear(head.compare(_PROBE_TOKENS, mine, why))
