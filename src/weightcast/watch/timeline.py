"""Records the steps of an update on this trainer rank, and puts those of all ranks and engines on the head's clock.

Every ``WeightUpdater`` has a ``TimelineRecorder`` among its listeners; the report of the head has the result.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from weightcast.timeline.clocks import Alignment, RoundTrip, align
from weightcast.timeline.tracks import MESSAGES, Side, Span, Timeline, Track
from weightcast.watch.events import Asked, Step, StepEnded, UpdateStarted
from weightcast.watch.listeners import ByKind

MAX_STEPS = 20_000  # of all engines: thousands of engine ranks would cost the head memory and time at every update
MAX_SPANS = 4_000  # of one row
_SHORTEST_WAIT_S = 50e-6
TRAINER = "trainer"
_start = operator.attrgetter("start_us", "us")  # of two that begin together, an empty one comes first


class RankSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The message of a trainer rank to the head at the end of an update.

    Attributes:
        steps: Its steps, on its own clock.
        heard: Time at which it heard that the update is over.
        answered: Time at which it sent this message.
    """

    rank: int
    steps: tuple[Step, ...]
    heard: float
    answered: float


class TimelineRecorder(ByKind):
    """A listener that keeps the steps of the last update as ``recording``; ``Events`` calls it one event at a time."""

    def __init__(self) -> None:
        super().__init__(
            {
                UpdateStarted: self._begin,
                StepEnded: lambda event: self.recording.add_step(event.step),
                Asked: lambda event: self.recording.add_message(event),
            }
        )
        self.recording = Recording()

    def _begin(self, event: UpdateStarted) -> None:
        self.recording = Recording(event.at, event.time_s, event.rank, event.targets)


class Recording:
    """The steps of one update on this rank, and the messages of the head."""

    def __init__(
        self, began: float = 0.0, began_unix_s: float = 0.0, rank: int = 0, targets: tuple[str, ...] = ()
    ) -> None:
        """``began`` is monotonic, and ``began_unix_s`` the same moment in seconds since 1970."""
        self._began = began
        self._began_unix_s = began_unix_s
        self._rank = rank
        self._targets = targets
        self.steps: list[Step] = []
        self.asked: list[Asked] = []
        self._left = MAX_STEPS

    def add_step(self, step: Step) -> None:
        """Keeps a step of this rank."""
        if len(self.steps) < MAX_STEPS:
            self.steps.append(step)

    def add_message(self, asked: Asked) -> None:
        """Keeps a message to a target."""
        self._left -= len(asked.steps)
        kept = asked if self._left >= 0 else msgspec.structs.replace(asked, steps=())
        if len(self.asked) < MAX_STEPS:
            self.asked.append(kept)

    def so_far(self) -> Recording:
        """A copy, to which nothing is added any more: the next attempt of the update, or messages after it."""
        found = Recording(self._began, self._began_unix_s, self._rank, self._targets)
        found.steps, found.asked, found._left = list(self.steps), list(self.asked), self._left
        return found

    def mine(self, heard: float) -> RankSteps:
        """Returns the steps of this rank for the head; ``heard`` as in ``RankSteps``."""
        return RankSteps(rank=self._rank, steps=tuple(self.steps), heard=heard, answered=time.monotonic())

    def timeline(self, ranks: Sequence[RankSteps] = (), *, asked_at: float = 0.0, told_at: float = 0.0) -> Timeline:
        """Puts all steps on this rank's clock.

        Args:
            asked_at: Time here before the other ranks were told that the update is over.
            told_at: Time here after their messages had come.
        """
        tracks = self._trainer_tracks(ranks, asked_at, told_at)
        by_target: dict[str, list[tuple[int, Asked]]] = {url: [] for url in self._targets}
        for number, asked in enumerate(self.asked):
            by_target.setdefault(asked.target, []).append((number, asked))
        for target, messages in by_target.items():
            tracks += self._message_tracks(target, messages)
        for target, messages in by_target.items():
            tracks += self._engine_tracks(target, messages)
        note = ""
        if self._left < 0:
            note = f"Steps of engines are left out: there are more than {MAX_STEPS:,}."
        return Timeline(began_unix_s=self._began_unix_s, tracks=tuple(tracks), note=note)

    def _trainer_tracks(self, ranks: Sequence[RankSteps], asked_at: float, told_at: float) -> list[Track]:
        alone = not ranks
        tracks = self._tracks("trainer", TRAINER, "rank 0", self._spans(self._head_steps(alone), Alignment()))
        wire = [step for step in self.steps if step.phase == "wire"]
        tracks += self._tracks("trainer", TRAINER, "rank 0, wire", self._spans(wire, Alignment()))
        for found in ranks:
            way = align([RoundTrip(asked_at, found.heard, found.answered, told_at)]) or Alignment()
            steps = [*found.steps, *_waits(found.steps, found.rank, self._began - way.offset_s, found.heard)]
            tracks += self._tracks("trainer", TRAINER, f"rank {found.rank}", self._spans(steps, way), way.error_s)
        return tracks

    def _head_steps(self, alone: bool) -> list[Step]:
        steps = [step for step in self.steps if step.phase != "wire"]
        if alone:  # one rank has nothing to gather
            named = (msgspec.structs.replace(step, phase="fill") if step.phase == "gather" else step for step in steps)
            return list(named)
        first = min((step.began for step in steps), default=self._began)
        return [*steps, *_waits([], 0, self._began, first)]

    def _message_tracks(self, target: str, messages: Sequence[tuple[int, Asked]]) -> list[Track]:
        spans = [
            self._span(asked.message, asked.began, asked.ended, asked.bucket, number, asked.error)
            for number, asked in messages
        ]
        return self._tracks("trainer", TRAINER, f"{MESSAGES} to {target}", spans)

    def _engine_tracks(self, target: str, messages: Sequence[tuple[int, Asked]]) -> list[Track]:
        """Returns the rows of one engine; none for an engine that tells no times."""
        trips: list[RoundTrip] = []
        answers: list[tuple[int, Asked, float, float]] = []
        for number, asked in messages:
            if asked.heard is not None and asked.answered is not None:
                trips.append(RoundTrip(asked.began, asked.heard, asked.answered, asked.ended))
                answers.append((number, asked, asked.heard, asked.answered))
        way = align(trips)
        if way is None:
            return []
        heard = [
            self._span(asked.message, began + way.offset_s, ended + way.offset_s, asked.bucket, number)
            for number, asked, began, ended in answers
        ]
        tracks = self._tracks("engine", target, MESSAGES, heard, way.error_s)
        for rank, steps in _by_rank(step for _, asked, _, _ in answers for step in asked.steps).items():
            there = way if rank is None else way.after(_rank_alignment(rank, answers))
            name = "server" if rank is None else f"rank {rank}"
            steps = [*steps, *_stalls(steps)] if rank is None else steps
            tracks += self._tracks("engine", target, name, self._spans(steps, there), there.error_s)
        return tracks

    def _spans(self, steps: Iterable[Step], way: Alignment) -> list[Span]:
        shift = way.offset_s - self._began
        return [
            Span(
                step.phase,
                start := round((step.began + shift) * 1e6),
                round((step.ended + shift) * 1e6) - start,
                step.bucket,
            )
            for step in steps
        ]

    def _span(
        self, name: str, began: float, ended: float, bucket: int | None, flow: int | None = None, error: str = ""
    ) -> Span:
        start_us = round((began - self._began) * 1e6)
        return Span(name, start_us, round((ended - self._began) * 1e6) - start_us, bucket, flow, error[:500])

    def _tracks(self, side: Side, process: str, name: str, spans: Sequence[Span], error_s: float = 0.0) -> list[Track]:
        """Returns a row for the spans, or several if they overlap."""
        ordered = sorted(spans, key=_start)
        lanes: list[list[Span]] = []
        ends: list[int] = []
        for span in ordered[:MAX_SPANS]:
            start = span.start_us
            number = next((number for number, end in enumerate(ends) if end <= start), len(ends))
            if number == len(ends):
                lanes.append([])
                ends.append(0)
            lanes[number].append(span)
            ends[number] = start + span.us
        dropped = max(0, len(ordered) - MAX_SPANS)
        return [
            Track(
                side=side,
                process=process,
                name=name if number == 0 else f"{name} ({number + 1})",
                clock_error_us=round(error_s * 1e6, 1),
                spans=tuple(lane),
                dropped=dropped if number == 0 else 0,
            )
            for number, lane in enumerate(lanes)
        ]


def _by_rank(steps: Iterable[Step]) -> Mapping[int | None, list[Step]]:
    found: dict[int | None, list[Step]] = {}
    for step in steps:
        found.setdefault(step.rank, []).append(step)
    return dict(sorted(found.items(), key=lambda item: -1 if item[0] is None else item[0]))


def _rank_alignment(rank: int, answers: Sequence[tuple[int, Asked, float, float]]) -> Alignment:
    """Aligns a rank with its server, which may run on another host: its steps lie within the server's messages."""
    trips: list[RoundTrip] = []
    for _, asked, heard, answered in answers:
        mine = [step for step in asked.steps if step.rank == rank]
        if mine and asked.message in ("bucket", "close"):  # an answer to Commit may be repeated later
            inner = min(step.began for step in mine), max(step.ended for step in mine)
            trips.append(RoundTrip(heard, *inner, answered))
    return align(trips) or Alignment()


def _stalls(steps: Sequence[Step]) -> list[Step]:
    """Returns the time between each pause of a server and the resume after it."""
    found: list[Step] = []
    for step, after in itertools.pairwise(sorted(steps, key=lambda step: step.began)):
        if (step.phase, after.phase) == ("pause", "resume"):
            found.append(Step("stall", None, step.ended, after.began))
    return found


def _waits(steps: Sequence[Step], rank: int, began: float, ended: float) -> list[Step]:
    """Returns the gaps between the steps of a rank, in which it waits for others."""
    edges = [began, *itertools.chain.from_iterable((step.began, step.ended) for step in steps), ended]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [Step("wait", rank, start, end) for start, end in pairs if end - start > _SHORTEST_WAIT_S]
