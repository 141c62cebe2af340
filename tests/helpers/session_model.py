"""A session as a model: what an engine may do, in a page, with none of the engine's own code.

``EngineModel`` is the specification.  ``unit/receiver/test_session_model.py`` holds the real handler against it
with random messages; ``explore`` below searches everything that a trainer and two such engines can do to each other,
with crashes, for a state that must not be.

Invariants:

    whole      an engine that is not paused serves exactly one whole version, the one that it says it serves
    together   no engine switches before every engine that takes part has everything
    free       when nothing is under way and the trainer is gone, no engine has a session
    awake      an engine without a session is paused only if it is quarantined
    again      from wherever that ends, a next full update makes every living engine serve it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

T = TypeVar("T")
Crash = Literal["", "early", "late"]  # a rank dies before anybody did anything, or after the others had


@dataclass(frozen=True, slots=True)
class EngineModel:
    """One engine.

    Attributes:
        staged: It keeps a second set of weights.
        buckets: How many make an update.
        version: What it says it serves.
        live: Versions of which something is live; one, when whole.
        session: Whose update is open; empty without one.
        wanted: The version of that update.
        sent: Buckets that have arrived.
        closed: It has said that everything is there.
        failed: The session cannot be committed any more.
        flipped: Some ranks have switched already (a rank died in the middle of a commit).
        quarantined: It waits for a full update.
        paused: It generates nothing.
        last: The session that was committed last, until the next one is opened.
        before: The version that it replaced; None if that was not whole, and cannot be gone back to.
        reverted: It was taken back.
    """

    staged: bool = True
    buckets: int = 2
    version: int = 0
    live: frozenset[int] = frozenset({0})
    session: str = ""
    wanted: int = 0
    sent: int = 0
    closed: bool = False
    failed: bool = False
    flipped: bool = False
    quarantined: bool = False
    paused: bool = False
    last: str = ""
    before: int | None = 0
    reverted: bool = False

    @property
    def whole(self) -> bool:
        """Does it hold one version, the one that it names?"""
        return self.live == {self.version}

    def open(self, session: str, version: int, *, older: bool = False, crash: Crash = "") -> tuple[EngineModel, bool]:
        if self.session or (version < self.version and not older):
            return self, False
        if crash:
            return replace(self, last="")._rank_died(), False
        opened = replace(
            self,
            session=session,
            wanted=version,
            sent=0,
            closed=False,
            failed=False,
            flipped=False,
            last="",
        )
        return (opened if self.staged else replace(opened, paused=True)), True

    def announce(self, session: str, index: int, *, crash: Crash = "") -> tuple[EngineModel, bool]:
        if session != self.session or self.failed or self.closed or index != self.sent:
            return self, False
        touched = self.live if self.staged else self.live | {self.wanted}
        if crash:
            return replace(self, live=touched if crash == "late" else self.live)._rank_died(), False
        if not self.staged and self.sent + 1 == self.buckets:
            touched = frozenset({self.wanted})
        return replace(self, live=touched, sent=self.sent + 1), True

    def close(self, session: str, count: int, *, crash: Crash = "") -> tuple[EngineModel, bool]:
        if session != self.session or self.failed or count != self.sent:
            return self, False
        if crash:
            return self._rank_died(), False
        if self.sent < self.buckets:
            return replace(self, failed=True), False
        return replace(self, closed=True), True

    def commit(
        self, session: str, *, honest: bool = True, crash: Crash = "", stumble: bool = False, torn: int = 0
    ) -> tuple[EngineModel, bool]:
        """Switch to the version that was sent.

        Args:
            session: The session.
            honest: What was sent is what was meant.
            crash: When a rank dies.
            stumble: The engine's caches fail after the switch.
            torn: With 1 a rank fails in the middle of its switch, with 2 on the way back too.
        """
        if session and session == self.last:
            return self, not self.quarantined and not self.reverted
        if session != self.session or self.failed or not self.closed:
            return self, False
        still = replace(self, paused=True)
        if crash:
            if crash == "late":
                still = replace(still, live=self.live | {self.wanted}, flipped=True)
            return still._rank_died(), False
        if torn == 2 and self.staged:
            mixture = self.live | {self.wanted}
            return replace(still, session="", live=mixture, quarantined=True, paused=True), False
        if not honest or (torn and self.staged):
            return still._ended(), False
        done = replace(
            self, version=self.wanted, live=frozenset({self.wanted}), session="", quarantined=False, paused=False
        )
        if stumble:
            return replace(done, quarantined=True, paused=True), False
        before = None if self.quarantined else self.version
        return replace(done, last=session, before=before, reverted=False), True

    def revert(self, session: str, *, crash: Crash = "") -> tuple[EngineModel, bool]:
        """Go back to what the last commit replaced."""
        if not session or session != self.last:
            return self, False
        if self.reverted:
            return self, True
        if not self.staged or self.before is None or self.quarantined:
            return self, False
        if crash:
            live = self.live | {self.before} if crash == "late" else self.live
            return replace(self, live=live)._rank_died(), False
        return replace(self, version=self.before, live=frozenset({self.before}), reverted=True), True

    def abort(self, session: str, *, crash: Crash = "") -> tuple[EngineModel, bool]:
        if session != self.session or not session:
            return self, True
        if crash:
            after = self._ended() if crash == "late" else replace(self, session="")
            return replace(after, quarantined=True, paused=True), False
        return self._ended(), True

    def lease_lost(self, session: str) -> EngineModel:
        return self.abort(session)[0]

    def _ended(self) -> EngineModel:
        """The session is over without a commit; whoever keeps two sets has the old one live again."""
        after = replace(self, session="")
        if self.staged:
            # What a commit had switched is switched back; without one, live is what it was.
            after = replace(after, live=self.live - {self.wanted} or self.live if self.flipped else self.live)
            return after if self.quarantined else replace(after, paused=False)
        if self.sent or len(self.live) > 1:
            return replace(after, quarantined=True, paused=True)
        return after if self.quarantined else replace(after, paused=False)

    def _rank_died(self) -> EngineModel:
        return replace(self, failed=bool(self.session), quarantined=True, paused=True)


# -- one trainer, two engines, everything that can happen


@dataclass(frozen=True, slots=True)
class World:
    """Everything, at one moment.

    Attributes:
        engines: Both.
        step: What the trainer does: ``open``, a bucket's number, ``close``, ``commit``, ``abort``; ``done``; ``dead``.
        update: Which of its updates, from 1; also the version and the session's name.
        mail: For each engine the message that is on its way to it, if any.
        answers: For each engine the answer to this step: True, False, or None while it is waited for.
        everything: Which engines said in this update that they have everything, or fell out of it.
        leases: For each engine, whether the trainer's connection is still there.
        faults: Trainer deaths, rank deaths and engine restarts that may still happen.
    """

    engines: tuple[EngineModel, EngineModel]
    step: str = "open"
    update: int = 1
    mail: tuple[str, str] = ("open", "open")
    answers: tuple[bool | None, bool | None] = (None, None)
    everything: tuple[bool, bool] = (False, False)
    leases: tuple[bool, bool] = (True, True)
    faults: tuple[int, int, int] = (1, 1, 1)


class Broken(AssertionError):
    """A state that must not be, with the way to it."""


@dataclass(slots=True)
class Rules:
    """How the trainer and the engines behave; a test replaces one of them by a wrong one.

    Attributes:
        updates: How many the trainer wants to do.
    """

    updates: int = 2
    seen: dict[World, tuple[World | None, str]] = field(default_factory=dict)

    def deliver(self, engine: EngineModel, message: str, update: int, crash: Crash) -> tuple[EngineModel, bool]:
        session = f"s{update}"
        match message:
            case "open":
                return engine.open(session, update, crash=crash)
            case "close":
                return engine.close(session, engine.buckets, crash=crash)
            case "commit":
                return engine.commit(session, crash=crash)
            case "abort":
                return engine.abort(session, crash=crash)
            case _:
                return engine.announce(session, int(message), crash=crash)

    def lease_lost(self, engine: EngineModel, update: int) -> EngineModel:
        return engine.lease_lost(f"s{update}")

    def may_commit(self, world: World) -> bool:
        return all(answer is True for answer in world.answers)

    def advance(self, world: World) -> World | None:
        """The trainer's next step when it has heard from both engines."""
        if world.step in ("done", "dead") or None in world.answers:
            return None
        good = all(answer is True for answer in world.answers)
        buckets = world.engines[0].buckets
        if world.step == "abort" or (world.step == "commit" and good):
            if world.update == self.updates:
                # It goes, and its connections with it.
                return replace(world, step="done", mail=("", ""), leases=(False, False))
            return replace(
                world,
                step="open",
                update=world.update + 1,
                mail=("open", "open"),
                answers=(None, None),
                everything=(False, False),
                leases=(True, True),
            )
        if world.step == "close":
            good = self.may_commit(world)
        if not good:
            return replace(world, step="abort", mail=("abort", "abort"), answers=(None, None))
        steps = ["open", *map(str, range(buckets)), "close", "commit"]
        step = steps[steps.index(world.step) + 1]
        return replace(world, step=step, mail=(step, step), answers=(None, None))

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        """Everything that can happen next."""
        after = self.advance(world)
        if after is not None:
            yield f"trainer: {after.step} of update {after.update}", after
        deaths, ranks, restarts = world.faults
        gone = world.step in ("dead", "done")
        for number in (0, 1):
            engine, message = world.engines[number], world.mail[number]
            if message:
                crashes: tuple[Crash, ...] = ("", "early", "late") if ranks else ("",)
                for crash in crashes:
                    changed, good = self.deliver(engine, message, world.update, crash)
                    there = _set(world.everything, number, world.everything[number] or (message == "close" and good))
                    if changed.version != engine.version and not all(world.everything):
                        raise Broken(f"together: engine {number} switched to {changed.version} alone")
                    yield (
                        f"engine {number}: {message}{' and a rank dies ' + crash if crash else ''}",
                        replace(
                            world,
                            engines=_set(world.engines, number, changed),
                            mail=_set(world.mail, number, ""),
                            answers=world.answers if gone else _set(world.answers, number, good),
                            everything=there,
                            faults=(deaths, ranks - bool(crash), restarts),
                        ),
                    )
                if gone:  # what a dead trainer had sent need not arrive
                    yield f"{message} to engine {number} is lost", replace(world, mail=_set(world.mail, number, ""))
            if gone and not world.leases[number] and engine.session:
                lost = self.lease_lost(engine, world.update)
                if lost != engine:
                    yield f"engine {number}: lease lost", replace(world, engines=_set(world.engines, number, lost))
            if restarts:
                fresh = EngineModel(staged=engine.staged, buckets=engine.buckets)
                yield (
                    f"engine {number} is killed and started again",
                    replace(
                        world,
                        engines=_set(world.engines, number, fresh),
                        mail=_set(world.mail, number, ""),
                        answers=world.answers if gone or not message else _set(world.answers, number, False),
                        everything=_set(world.everything, number, True),
                        faults=(deaths, ranks, restarts - 1),
                    ),
                )
        if deaths and not gone:
            yield (
                "the trainer dies",
                replace(world, step="dead", leases=(False, False), faults=(deaths - 1, ranks, restarts)),
            )


def explore(rules: Rules, *, staged: tuple[bool, bool], buckets: int = 2) -> int:
    """Visit every world that can come about; how many there are.

    Raises:
        Broken: An invariant does not hold; the text has the shortest way there.
    """
    first, second = (EngineModel(staged=kind, buckets=buckets) for kind in staged)
    start = World(engines=(first, second))
    seen = rules.seen
    seen[start] = (None, "start")
    waiting = deque([start])
    edges: dict[World, list[World]] = {}
    while waiting:
        world = waiting.popleft()
        try:
            _check(world)
            after = list(rules.moves(world))
            if not after:
                _check_end(world, rules)
        except Broken as broken:
            raise Broken(f"{broken}\n{_way(seen, world)}") from None
        edges[world] = [reached for _, reached in after]
        for what, reached in after:
            if reached not in seen:
                seen[reached] = (world, what)
                waiting.append(reached)
    _check_ends(edges)
    return len(seen)


def _check(world: World) -> None:
    for number, engine in enumerate(world.engines):
        if not engine.paused and not engine.whole:
            raise Broken(f"whole: engine {number} serves {sorted(engine.live)} as version {engine.version}")
        if engine.paused and not engine.session and not engine.quarantined:
            raise Broken(f"awake: engine {number} is paused for nobody")


def _check_end(world: World, rules: Rules) -> None:
    """Nothing more can happen."""
    if world.step not in ("done", "dead"):
        raise Broken(f"stuck: the trainer waits in {world.step}")
    for number, engine in enumerate(world.engines):
        if engine.session:
            raise Broken(f"free: engine {number} still has session {engine.session}")
        version = rules.updates + 1
        for message in ("open", *map(str, range(engine.buckets)), "close", "commit"):
            engine, good = rules.deliver(engine, message, version, "")
            if not good:
                raise Broken(f"again: engine {number} refuses {message}")
        if engine.paused or engine.live != {version}:
            raise Broken(f"again: engine {number} does not serve")


def _check_ends(edges: dict[World, list[World]]) -> None:
    """Every run comes to an end: no world can be reached from itself."""
    missing = {world: len(after) for world, after in edges.items()}
    before: dict[World, list[World]] = {world: [] for world in edges}
    for world, after in edges.items():
        for reached in after:
            before[reached].append(world)
    ended = deque(world for world, count in missing.items() if not count)
    count = 0
    while ended:
        world = ended.popleft()
        count += 1
        for earlier in before[world]:
            missing[earlier] -= 1
            if not missing[earlier]:
                ended.append(earlier)
    if count != len(edges):
        raise Broken("free: something can go on for ever")


def _way(seen: dict[World, tuple[World | None, str]], world: World) -> str:
    steps: list[str] = []
    at: World | None = world
    while at is not None:
        at, what = seen[at]
        steps.append(what)
    return "\n".join(f"  {what}" for what in reversed(steps))


def _set(pair: tuple[T, T], index: int, value: T) -> tuple[T, T]:
    return (value, pair[1]) if index == 0 else (pair[0], value)
