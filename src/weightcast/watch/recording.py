"""The record of an update on a trainer rank, and the timeline of all ranks and engines on the head's clock."""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from weightcast.timeline.clocks import Alignment, RoundTrip, align
from weightcast.timeline.tracks import MESSAGES, PhaseSpan, Timeline, Track, TrackSide
from weightcast.watch.events import Asked, AttemptStarted, Step

MAX_STEPS = 20_000  # of all engines: thousands of engine ranks would cost the head memory and time at every update
MAX_SPANS = 4_000  # of one row
_SHORTEST_WAIT_S = 50e-6
TRAINER = "trainer"
_start = operator.attrgetter("start_us", "us")  # of two that begin together, an empty one comes first


class RankEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The message of a trainer rank to the head at the end of an update.

    Attributes:
        extra_bytes: Most bytes that it took beside the model.
        steps: Its steps, on its own clock; empty from the head itself.
        heard: Time at which it heard that the update is over.
        answered: Time at which it sent this message.
    """

    rank: int
    extra_bytes: int = 0
    steps: tuple[Step, ...]
    heard: float
    answered: float


@dataclass(slots=True)
class Recording:
    """One update on this trainer rank: its steps and, on the head, its attempts and messages.

    ``began`` is monotonic, and ``began_unix_s`` the same moment in seconds since 1970.
    """

    version: int | None = None
    targets: tuple[str, ...] = ()
    rank: int = 0
    began: float = 0.0
    began_unix_s: float = 0.0
    steps: list[Step] = field(default_factory=list[Step])
    asked: list[Asked] = field(default_factory=list[Asked])
    attempts: list[AttemptStarted] = field(default_factory=list[AttemptStarted])
    num_left: int = field(default_factory=lambda: MAX_STEPS)  # steps of engines that are kept; negative if too many

    def add_step(self, step: Step) -> None:
        """Keeps a step of this rank."""
        if len(self.steps) < MAX_STEPS:
            self.steps.append(step)

    def add_message(self, asked: Asked) -> None:
        """Keeps a message to a target."""
        self.num_left -= len(asked.steps)
        if len(self.asked) < MAX_STEPS:
            self.asked.append(asked if self.num_left >= 0 else msgspec.structs.replace(asked, steps=()))

    def end_of_rank(self, extra_bytes: int, heard: float) -> RankEnd:
        """Returns the message of this rank to the head; ``heard`` as in ``RankEnd``."""
        steps = tuple(self.steps) if self.rank else ()
        return RankEnd(rank=self.rank, extra_bytes=extra_bytes, steps=steps, heard=heard, answered=time.monotonic())

    def timeline(self, ranks: Sequence[RankEnd] = (), *, asked_at: float = 0.0, told_at: float = math.inf) -> Timeline:
        """Puts all steps on this rank's clock.

        Args:
            asked_at: Time here before the other ranks were told that the update is over.
            told_at: Time here after their messages had come; what is recorded later is of the next attempt.
        """
        tracks = self._trainer_tracks(ranks, asked_at, told_at)
        by_target: dict[str, list[tuple[int, Asked]]] = {url: [] for url in self.targets}
        for number, asked in enumerate(self.asked):
            if asked.ended <= told_at:
                by_target.setdefault(asked.target, []).append((number, asked))
        for target, messages in by_target.items():
            tracks += self._message_tracks(target, messages)
        for target, messages in by_target.items():
            tracks += self._engine_tracks(target, messages)
        note = f"Steps of engines are left out: there are more than {MAX_STEPS:,}." if self.num_left < 0 else ""
        return Timeline(began_unix_s=self.began_unix_s, tracks=tuple(tracks), note=note)

    def _trainer_tracks(self, ranks: Sequence[RankEnd], asked_at: float, told_at: float) -> list[Track]:
        mine = [step for step in self.steps if step.ended <= told_at]
        steps = [step for step in mine if step.phase != "wire"]
        if ranks:
            first = min((step.began for step in steps), default=self.began)
            steps += _waits([], 0, self.began, first)
        else:  # one rank has nothing to gather
            steps = [msgspec.structs.replace(step, phase="fill") if step.phase == "gather" else step for step in steps]
        tracks = self._tracks("trainer", TRAINER, "rank 0", self._spans(steps, Alignment()))
        wire = [step for step in mine if step.phase == "wire"]
        tracks += self._tracks("trainer", TRAINER, "rank 0, wire", self._spans(wire, Alignment()))
        for found in ranks:
            way = align([RoundTrip(asked_at, found.heard, found.answered, told_at)]) or Alignment()
            steps = [*found.steps, *_waits(found.steps, found.rank, self.began - way.offset_s, found.heard)]
            tracks += self._tracks("trainer", TRAINER, f"rank {found.rank}", self._spans(steps, way), way.error_s)
        return tracks

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

    def _spans(self, steps: Iterable[Step], way: Alignment) -> list[PhaseSpan]:
        shift = way.offset_s - self.began
        return [
            PhaseSpan(
                step.phase,
                start := round((step.began + shift) * 1e6),
                round((step.ended + shift) * 1e6) - start,
                step.bucket,
            )
            for step in steps
        ]

    def _span(
        self, name: str, began: float, ended: float, bucket: int | None, flow: int | None = None, error: str = ""
    ) -> PhaseSpan:
        start_us = round((began - self.began) * 1e6)
        return PhaseSpan(name, start_us, round((ended - self.began) * 1e6) - start_us, bucket, flow, error[:500])

    def _tracks(
        self, side: TrackSide, process: str, name: str, spans: Sequence[PhaseSpan], error_s: float = 0.0
    ) -> list[Track]:
        """Returns a row for the spans, or several if they overlap."""
        ordered = sorted(spans, key=_start)
        lanes: list[list[PhaseSpan]] = []
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
