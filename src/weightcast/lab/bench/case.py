"""Measures one case: methods and limits take turns in the same processes, and the result is one JSON object.

First each method runs alone: every setting of its sweep is warmed up and tried, and the fastest one stays. Then the
methods and limits take turns, so that compared turns are seconds apart. The order changes each round until each entry
has followed each other one equally often, since a turn leaves traces in caches and clocks. Last, one turn of each is
watched for memory and launches.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from weightcast.lab.bench.limits import bounds
from weightcast.lab.bench.machine import facts
from weightcast.lab.bench.methods import Layout, MeasuringFailed, Method, Turn, WrongWeights
from weightcast.lab.bench.rig import Rig
from weightcast.lab.bench.shapes import model_shape

Say = Callable[[str], None]
_SWEEP = 0.55  # share of the time that is spent on choosing settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A method with several settings, of which the fastest is measured.

    Attributes:
        settings: One method for each setting; their names must differ.
    """

    name: str
    settings: tuple[Method, ...]
    ours: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """Numbers of turns and time limits.

    Attributes:
        warm: Untimed turns before the timed ones.
        tries: Turns for each setting of a sweep.
        turn_s: Deadline of one step of a turn, in seconds.
        budget_s: Time after which no round starts, in seconds.
    """

    warm: int = 2
    tries: int = 2
    turns: int = 10
    turn_s: float = 120.0
    budget_s: float = 600.0


@dataclass(slots=True, kw_only=True)
class _Measured:
    contender: Contender
    method: Method
    tried: dict[str, float] = field(default_factory=dict[str, float])
    watched: dict[str, Any] = field(default_factory=dict[str, Any])
    prepare_s: float = 0.0
    first_s: float = 0.0
    turns: list[Turn] = field(default_factory=list[Turn])


def run_case(
    layout: Layout,
    contenders: Sequence[Contender],
    plan: TurnLimits,
    *,
    not_run: dict[str, str] | None = None,
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Measures one case.

    Args:
        not_run: Contenders that cannot run here, with the reason.

    Returns:
        The result as plain JSON; ``ok`` is False if a method failed or ended with wrong weights.
    """
    run = _CaseRun(layout, plan, say, dict(not_run or {}))
    try:
        entries: list[_Measured] = []
        for number, contender in enumerate(contenders):
            entry = run.choose(contender, share=_SWEEP * (number + 1) / len(contenders))
            if entry is not None:
                entries.append(entry)
        limits = [
            _Measured(contender=Contender(name=method.name, settings=()), method=method) for method in bounds(layout)
        ]
        run.take_turns([*limits, *entries])
        run.watch(entries)
    finally:
        run.close()
    return run.result(limits, entries)


def order_of(turn: int, count: int) -> list[int]:
    """Returns the order of ``count`` entries in round ``turn``.

    Over ``count`` rounds (twice as many if ``count`` is odd) each entry follows each other one equally often.  The
    orders are from E. J. Williams, "Experimental designs balanced for the estimation of residual effects of
    treatments" (1949).
    """
    first = [number // 2 if number % 2 == 0 else count - 1 - number // 2 for number in range(count)]
    if count % 2 and turn // count % 2:
        first.reverse()
    return [(number + turn) % count for number in first]


class _CaseRun:
    def __init__(self, layout: Layout, plan: TurnLimits, say: Say, not_run: dict[str, str]) -> None:
        self._layout, self._plan, self._say = layout, plan, say
        self._not_run = not_run
        self._failed: dict[str, str] = {}
        self._rig: Rig | None = Rig(layout)
        self._prepared: set[str] = set()  # methods that are ready in the rig's processes
        self._started = time.monotonic()  # the start of the processes does not count
        self._until = self._started + plan.budget_s

    def choose(self, contender: Contender, *, share: float) -> _Measured | None:
        """Tries at least one setting, and more within this share of the time; returns the fastest."""
        until = self._started + share * self._plan.budget_s
        best: _Measured | None = None
        tried: dict[str, float] = {}
        for method in contender.settings:
            if time.monotonic() > self._until and best is None:
                self._not_run[contender.name] = "the time was used up"
                break
            if time.monotonic() > until and best is not None:
                break
            options = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in method.options.items())
            self._say(f"{contender.name}: measured with {options or 'its defaults'}")
            entry = _Measured(contender=contender, method=method)
            try:
                rig = self._at()
                entry.prepare_s = rig.prepare(method, timeout_s=self._plan.turn_s)
                entry.first_s = rig.turn(method, timeout_s=self._plan.turn_s)[0].usable_s
                entry.watched = dict(rig.held(method))
                turns: list[float] = []
                if len(contender.settings) == 1:  # there is no choice, so it stays ready for its turns
                    self._prepared.add(method.name)
                else:
                    turns = [rig.turn(method, timeout_s=self._plan.turn_s)[0].usable_s for _ in range(self._plan.tries)]
                    rig.drop(method)
            except MeasuringFailed as error:
                self._fail(method, error)
                continue
            tried[method.name] = min(turns, default=entry.first_s)
            if best is None or tried[method.name] < tried[best.method.name]:
                best = entry
        if best is not None:
            best.tried = tried
        return best

    def take_turns(self, entries: Sequence[_Measured]) -> None:
        """Runs the rounds; an entry that fails is removed, and the others continue with new processes."""
        done = 0
        while done < self._plan.warm + self._plan.turns:
            if done and time.monotonic() > self._until:
                self._say(f"the time was used up after {done} rounds")
                break
            alive = [entry for entry in entries if entry.method.name not in self._failed]
            for entry in (alive[number] for number in order_of(done, len(alive))):
                try:
                    rig = self._at()
                    if entry.method.name not in self._prepared:
                        took = rig.prepare(entry.method, timeout_s=self._plan.turn_s)
                        entry.prepare_s = entry.prepare_s or took
                        self._prepared.add(entry.method.name)
                    turn, _ = rig.turn(entry.method, timeout_s=self._plan.turn_s)
                except MeasuringFailed as error:
                    self._fail(entry.method, error)
                    break
                entry.turns.append(turn)
            else:
                done += 1
        self._forget_warm_up(entries)

    def _forget_warm_up(self, entries: Sequence[_Measured]) -> None:
        for entry in entries:
            entry.turns = entry.turns[self._plan.warm :] or entry.turns[-1:]

    def watch(self, entries: Sequence[_Measured]) -> None:
        """Watches one more turn of each remaining entry."""
        for entry in entries:
            if self._rig is None or entry.method.name in self._failed:
                continue
            try:
                entry.watched |= self._rig.turn(entry.method, timeout_s=self._plan.turn_s, watch=True)[1]
            except MeasuringFailed as error:
                self._fail(entry.method, error)

    def close(self) -> None:
        """Ends the processes."""
        if self._rig is not None:
            self._rig.close()
            self._rig = None

    def result(self, limits: Sequence[_Measured], entries: Sequence[_Measured]) -> dict[str, Any]:
        """The result as plain JSON."""
        shape = model_shape(self._layout.model)
        floors = {entry.method.name.removeprefix("limit: "): _figures(entry) for entry in limits if entry.turns}
        floor = _floor(self._layout, floors)
        rows = [_row(entry, floor) for entry in entries if entry.turns]
        peers = {row["name"]: row["usable_s"]["median"] for row in rows if not row["ours"]}
        best = min(peers, key=lambda name: peers[name], default=None)
        for row in rows:
            if row["ours"] and best is not None:
                row["best_peer"] = best
                row["times_best_peer"] = peers[best] / row["usable_s"]["median"]
        return {
            "what": "updates beside limits",
            "ok": not self._failed and any(row["ours"] for row in rows),
            "machine": facts(),
            "case": {
                **asdict(self._layout),
                "bytes": shape.size_bytes,
                "tensors": len(shape.places),
                "parameters": len(shape.residents),
            },
            "plan": asdict(self._plan),
            "floor_s": floor,
            "limits": floors,
            "methods": rows,
            "failed": self._failed,
            "not_run": self._not_run,
        }

    def _at(self) -> Rig:
        if self._rig is None:
            self._rig, self._prepared = Rig(self._layout), set()
        return self._rig

    def _fail(self, method: Method, error: MeasuringFailed) -> None:
        self._say(f"{method.name} failed: {error}")
        self._failed[method.name] = str(error)
        if self._rig is None:
            return
        if isinstance(error, WrongWeights):
            self._rig.drop(method)
            self._prepared.discard(method.name)
        else:
            self._rig.kill()
            self._rig = None


def _floor(layout: Layout, floors: dict[str, dict[str, Any]]) -> float | None:
    """Returns the shortest possible time of an update in this layout, in seconds, from the measured limits."""
    if layout.placement == "disaggregated":
        names = ["broadcast"]
    elif layout.device == "cpu":
        names = ["shared memory"]
    else:
        names = ["device copy", "all-gather"]
    found = [floors[name]["usable_s"]["median"] for name in names if name in floors]
    return max(found, default=None)


def _row(entry: _Measured, floor: float | None) -> dict[str, Any]:
    method = entry.method
    figures = _figures(entry)
    return {
        "name": entry.contender.name,
        "ours": entry.contender.ours,
        "emulated": list(method.emulated),
        "settings": method.options,
        "tried": entry.tried,
        "prepare_s": entry.prepare_s,
        "first_s": entry.first_s,
        **figures,
        "times_limit": figures["usable_s"]["median"] / floor if floor else None,
        "watched": entry.watched,
        "equal_bit_for_bit": True,  # a turn with wrong weights removes the method
    }


def _figures(entry: _Measured) -> dict[str, Any]:
    extra: dict[str, float] = {}
    for key in dict.fromkeys(key for turn in entry.turns for key in turn.extra):
        extra[key] = statistics.median(turn.extra[key] for turn in entry.turns if key in turn.extra)
    return {
        "turns": len(entry.turns),
        "usable_s": _spread([turn.usable_s for turn in entry.turns]),
        "returned_s": _spread([turn.returned_s for turn in entry.turns]),
        "stall_s": _spread([turn.stall_s for turn in entry.turns]),
        "processor_s": _spread([turn.extra["trainer_cpu_s"] + turn.extra["engine_cpu_s"] for turn in entry.turns]),
        "phases": extra,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "p95": ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)],
        "max": ordered[-1],
    }
