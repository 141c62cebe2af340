"""Plays cases: one after the other, or several side by side, since most of their time is waiting for deadlines."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection, wait

from tests.faults.cases import Case
from tests.faults.kinds import KINDS, preload
from tests.faults.world import PATIENCE_S, Result, World

Played = tuple[Result, float]  # and the seconds that the case took with everything around it
PLAYER_DIED = "the process that played it has died"
_spawned = multiprocessing.get_context("spawn")


def play(
    cases: Iterable[Case], *, deadline_s: float | None, patience_s: float = PATIENCE_S, leaks: bool = False
) -> Generator[Played]:
    """Runs the cases in one world for each kind of engine; a world with an error is replaced.

    With ``leaks`` processes that live on must not grow from case to case.

    Raises:
        AssertionError: At the end: something is left, or grew.
    """
    world: World | None = None
    left: list[str] = []
    try:
        for case in cases:
            started = time.monotonic()
            try:
                if world is None or world.kind.name != case.kind:
                    left += _close(world, leaks)
                    world = None
                    world = World(case.kind, deadline_s=deadline_s, patience_s=patience_s)
                result = world.play(case)
            except AssertionError as error:  # an engine did not start, or updates fail although nobody is struck
                traceback.print_exc()
                result = _not_played(case, str(error).split("\n", 1)[0] or "an assertion failed")
            yield result, time.monotonic() - started
            if result.wrong:  # its leftovers may spoil the next case
                left += _close(world, leaks)
                world = None
    finally:
        left += _close(world, leaks)
    assert not left, "; ".join(left)


def play_side_by_side(
    cases: Sequence[Case], *, jobs: int, deadline_s: float | None, patience_s: float = PATIENCE_S
) -> Generator[Played]:
    """Runs the cases in so many processes, each with worlds of its own.

    A process keeps to one kind of engine as long as it can.  Costly kinds begin first, each in one process.

    Raises:
        AssertionError: At the end: a process failed after its last case.
    """
    left = _Left(cases)
    players: dict[Connection, _Player] = {}
    ending: list[_Player] = []
    dead: list[_Player] = []
    try:
        for _ in range(jobs):
            case = left.take("")
            if case is not None:
                player = _Player(deadline_s, patience_s)
                players[player.pipe] = player
                player.give(case)
        while players:
            for pipe in wait(list(players)):
                assert isinstance(pipe, Connection)
                player, done = players[pipe], players[pipe].case
                try:
                    played: Played = pipe.recv()
                except EOFError:
                    dead.append(players.pop(pipe))
                    player.pipe.close()
                    yield _not_played(done, PLAYER_DIED), 0.0
                    player = _Player(deadline_s, patience_s)
                    players[player.pipe] = player
                else:
                    yield played
                left.ended(done)
                case = left.take(done.kind)
                if case is not None:
                    player.give(case)
                else:
                    ending.append(players.pop(player.pipe))
                    player.pipe.close()  # it ends its world meanwhile
    finally:
        for player in players.values():
            player.process.terminate()
        for player in (*players.values(), *ending, *dead):
            player.process.join()
    failed = [player.process.exitcode for player in ending if player.process.exitcode]
    assert not failed, f"{len(failed)} processes failed after their last case, and have said how"


class _Left:
    """The cases that nobody plays yet, by kind of engine."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._cases: dict[str, list[Case]] = {}
        for case in reversed(cases):
            self._cases.setdefault(case.kind, []).append(case)
        self._playing: Counter[str] = Counter()

    def take(self, kind: str) -> Case | None:
        """The next case for a process that has engines of this kind; None if it need not go on."""
        open_kinds = [name for name, cases in self._cases.items() if cases and self._may_begin(name)]
        if not self._cases.get(kind):
            if not open_kinds:
                return None
            kind = max(open_kinds, key=self._weight)
        self._playing[kind] += 1
        return self._cases[kind].pop()

    def ended(self, case: Case) -> None:
        self._playing[case.kind] -= 1

    def _may_begin(self, kind: str) -> bool:
        return not (KINDS[kind].costly and self._playing[kind])

    def _weight(self, kind: str) -> tuple[bool, float]:
        return KINDS[kind].costly, len(self._cases[kind]) / (1 + self._playing[kind])


class _Player:
    """A process that plays one case after the other."""

    def __init__(self, deadline_s: float | None, patience_s: float) -> None:
        self.pipe, theirs = _spawned.Pipe()
        self.process = _spawned.Process(target=_serve, args=(theirs, deadline_s, patience_s))
        self.process.start()
        theirs.close()
        self.case: Case

    def give(self, case: Case) -> None:
        self.case = case
        with suppress(OSError):  # it has died, and reading from it says so
            self.pipe.send(case)


def _serve(pipe: Connection, deadline_s: float | None, patience_s: float) -> None:
    preload()
    with closing(play(_given(pipe), deadline_s=deadline_s, patience_s=patience_s)) as played:
        for one in played:
            pipe.send(one)


def _given(pipe: Connection) -> Iterator[Case]:
    with suppress(EOFError):
        while True:
            yield pipe.recv()


def _not_played(case: Case, why: str) -> Result:
    return Result.of(case, outcome="no answer", seconds=0.0, later_s=0.0, wrong=(why,), words="", deadline_s=0.0)


def _close(world: World | None, leaks: bool) -> list[str]:
    if world is None:
        return []
    return [*(world.watch.found() if leaks else ()), *world.close()]
