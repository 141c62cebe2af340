"""Two engines, a trainer of two ranks, a network between: a case is played in it, and then it is looked at.

The *bystander* is an engine of one rank, the *victim* another, of two where a rank of it is struck.  Whatever
happens, afterwards

    nobody alive has waited longer than the limits below,
    the rank that failed was named if a rank did,
    the bystander has gone on,
    every engine alive serves one version whole, or is out of use and paused,
    the next update succeeds, on all, once what was broken is there again,
    nothing is left behind: processes, open files, shared memory.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from tests.faults import trainer
from tests.faults.cases import IN_TRAINER, OF_SWITCHES, Case
from tests.faults.kinds import DEADLINES_S, KINDS, WAYS, Kind
from tests.faults.leaks import Watch
from tests.faults.wire import Loop, Trap, Wire, WireFault
from tests.helpers.harness import Engine, children, next_version, num_fds
from tests.helpers.ranks import Ranks
from weightcast import Target
from weightcast.transports.link import margin_s
from weightcast.update.follower import FOLLOW_DEADLINES

PATIENCE_S = 3.0  # added to the longest allowed wait, for a busy machine


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Longest allowed times.

    Attributes:
        deadline_s: ``timeout_s`` of the updates.
        patience_s: Time added to each, for a busy machine.
    """

    deadline_s: float
    patience_s: float = PATIENCE_S

    @property
    def later_s(self) -> float:
        """Longest time of an update without a fault, when no earlier failure delays it."""
        return self.deadline_s / 2 + self.patience_s

    @property
    def incomplete_s(self) -> float:
        """Longest time of an update that a lost trainer rank does not enter: the others wait a deadline for it."""
        return self.deadline_s + self.patience_s

    @property
    def struck_s(self) -> float:
        """Longest time of an update with a fault: two waits, each a little longer than a deadline."""
        return 2 * (self.deadline_s + margin_s(self.deadline_s)) + self.patience_s

    @property
    def orphaned_s(self) -> float:
        """One that loses a trainer rank: the others have the patience of the head's longest work, then look around."""
        return FOLLOW_DEADLINES * self.deadline_s + self.patience_s + 3.0


HANG_S = 120.0
# Deadline of updates in which nothing is struck: processes that were just started take seconds for their first one.
CALM_S = 30.0
LEFT_ASLEEP = "it was asleep before this update and still sleeps"
NEVER_STRUCK = "the fault never struck"
# What a machine that stood still explains: an update took too long, or gave up at a deadline that passed meanwhile.
_LATE = re.compile(
    r"trainer rank \d+: update \d+ took .* s of .* s$"
    r"|(nobody was updated|the bystander did not go on|a delay below the deadline did harm): "
    r".*(waited [\d.]+ s for|timed out after)"
)
_NAMED = {"gather": "the gather among trainer ranks", "replica": "trainer rank 0 and trainer rank 1 hold different"}
_TRAINER_RANKS = 2
_WARM_UPS = 3
_GROUP_FILES = 6
_ENGINE_FILES = 26  # an engine keeps the groups of the last four trainers, and the buffers of a few


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a case.

    Attributes:
        case: Name of the case.
        kind, transport, on, fault, step: See ``Case``.
        outcome: ``unharmed`` all updated, ``left out`` all but the victim, ``given up`` nobody, ``no trainer``.
        seconds: Time of the update with the fault, on the slowest trainer rank.
        later_s: Time of the next update by the same trainer.
        wrong: Descriptions of errors; empty if there are none.
        words: Error texts of the trainer.
        deadline_s: ``timeout_s`` of the updates.
        before: What was wrong when the case was played before, if it was.
    """

    case: str
    kind: str
    transport: str
    on: str
    fault: str
    step: str
    outcome: str
    seconds: float
    later_s: float
    wrong: tuple[str, ...]
    words: str
    deadline_s: float
    before: tuple[str, ...] = ()

    @property
    def only_late(self) -> bool:
        """Whether lack of time explains everything that is wrong; it never explains what an engine serves."""
        return all(_LATE.match(words) for words in self.wrong)

    @classmethod
    def of(cls, case: Case, **found: Any) -> Result:
        """A result with the names of its case."""
        names = {name: getattr(case, name) for name in ("kind", "transport", "on", "fault", "step")}
        return cls(case=case.name, **names, **found)


# Over 350 lines: each case breaks, inspects and heals the same engines, trainer ranks and connections.
class World:
    """The engines and trainer ranks of all cases; a case's broken ones are replaced.

    Args:
        kind: Name of the kind of engine.
        deadline_s: Deadline of every wait in an update, in seconds; None for the kind's and the transport's own.
        patience_s: Time added to the longest allowed waits, for a busy machine.
    """

    def __init__(self, kind: str, *, deadline_s: float | None = None, patience_s: float = PATIENCE_S) -> None:
        self.kind: Kind = KINDS[kind]
        self.limits = Limits(deadline_s=deadline_s or self.kind.deadline_s, patience_s=patience_s)
        self._deadline_s = deadline_s
        self._loop = Loop()
        self._pool = ThreadPoolExecutor(2)
        self._spares = {ranks: self._pool.submit(self._start, ranks) for ranks in self.kind.spares}
        self._versions: list[int] = []  # the last one first
        self.bystander = self.kind.start_bystander()
        assert self.bystander.port
        self._victims: dict[int, Engine] = {}
        self.victim = self._victim(1)
        self.wires = [Wire(self._loop, self.kind.step_of, engine.port) for engine in (self.bystander, self.victim)]
        self.ranks = Ranks(_TRAINER_RANKS)
        self._rank_pids = self._pids_of_ranks()
        self._buckets: dict[str, int] = {}
        self._num_files: dict[str, int] = {}
        self._kept_by_engines: set[str] = set()
        self._lost_groups = 0
        self.watch = Watch()

    def close(self) -> list[str]:
        """Ends all processes; says what is left of them, in words."""
        for wire in self.wires:
            wire.close()
        self._loop.close()
        self.ranks.close()
        for engine in (self.bystander, *self._victims.values(), *(spare.result() for spare in self._spares.values())):
            engine.close()
        self._pool.shutdown()
        deadline = time.monotonic() + self.limits.patience_s
        while (left := [name for name in self._kept_by_engines if Path("/dev/shm", name).exists()]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
        return [f"all engines have ended, and shared memory is left: {left}"] if left else []

    def play(self, case: Case) -> Result:
        """Injects the fault, inspects the engines, heals the network and updates again.

        The case is repeated if a busy machine never reached the fault.
        """
        result = self._play(case)
        return self._play(case) if NEVER_STRUCK in result.wrong else result

    def _play(self, case: Case) -> Result:
        deadline_s = self._deadline_s or DEADLINES_S.get(case.transport, self.kind.deadline_s)
        self.limits = replace(self.limits, deadline_s=deadline_s)
        self.victim = self._victim(self._ranks_of(case))
        self.wires[1].upstream = self.victim.port
        self._warm_up(case)
        wrong: list[str] = []
        trap = self._trap(case)
        self.wires[1].set_trap(trap)
        before = children()
        makers = {os.getpid(), *self.bystander.pids(), *self.victim.pids(), *self._rank_pids}
        older = _segments(makers)
        told = self._update(case, self._next_versions(2), wrong, deadline_s, flip=self._flip(case))
        if case.on not in IN_TRAINER and not trap.sprung.is_set():
            wrong.append(NEVER_STRUCK)
        alive = [rank for rank in range(_TRAINER_RANKS) if told[rank]]
        outcome = self._judge(case, told, wrong)
        self._look_at(self.bystander, "bystander", wrong)
        self._heal(case)
        if not self._may_be_gone(case):
            self._look_at(self.victim, "victim", wrong)
        self._restore(case)
        [version] = self._next_versions(1)
        last = self._update(case, [version], wrong, CALM_S)
        for rank, ended in last.items():
            if not ended or ended[-1].status != ("serving", "serving"):
                said = ended[-1].words if ended else "nothing"
                wrong.append(f"an update after all was well again failed on rank {rank}: {said}")
        for engine, name in ((self.bystander, "bystander"), (self.victim, "victim")):
            if any(LEFT_ASLEEP in ended[-1].words for ended in last.values() if ended):
                self.kind.wake(engine)
            serves = self._look_at(engine, name, wrong)
            if serves != version:
                wrong.append(f"{name} serves {serves} after an update to {version}")
        self._look_for_leftovers(case, before, makers, older, wrong)
        for pid in self.bystander.pids():
            self.watch.take("the bystander", pid)
        for rank, pid in enumerate(self._rank_pids):
            self.watch.take(f"trainer rank {rank}", pid)
        nth = case.step == "after"
        struck = [told[rank][nth] for rank in alive if len(told[rank]) > nth]
        later = [told[rank][nth + 1] for rank in alive if len(told[rank]) > nth + 1]
        return Result.of(
            case,
            outcome=outcome,
            seconds=max((one.seconds for one in struck), default=0.0),
            later_s=max((one.seconds for one in later), default=0.0),
            wrong=tuple(wrong),
            words=struck[0].words if struck else "",
            deadline_s=self.limits.deadline_s,
        )

    # -- before

    def _warm_up(self, case: Case) -> None:
        """Counts buckets and open files without a fault, once for each transport."""
        if case.transport in self._buckets:
            return
        before = self._files_of(self.bystander)
        for _ in range(_WARM_UPS):
            wrong: list[str] = []
            self.wires[1].set_trap(None)
            told = self._update(case, self._next_versions(2), wrong, CALM_S)
            well = all(one.status == ("serving", "serving") for ended in told.values() for one in ended)
            if well and not wrong:
                break
        else:
            raise AssertionError(f"updates fail although nobody is struck: {told}; {wrong}")
        self._buckets[case.transport] = self.wires[1].seen["bucket"] // 2
        # Mapped memory is one bucket, without a buffer, and a folder is loaded by one request.
        at_once = bool(WAYS[case.transport].get("keep_mapped")) or case.transport == "disk"
        assert at_once == (self._buckets[case.transport] == 1), f"{self._buckets[case.transport]} buckets"
        for wire in self.wires:
            wire.heal()
        # What a transport opens once, such as NIXL's files, is no leftover of its first case.
        opened = self._files_of(self.bystander) - before
        self._num_files["bystander"] = self._num_files.get("bystander", before) + opened
        self._count_files()

    def _trap(self, case: Case) -> Trap:
        last = self._buckets[case.transport] - 1
        step, count = {
            "first bucket": ("bucket", 0),
            "middle bucket": ("bucket", last // 2),
            "last bucket": ("bucket", last),
            "after": ("open", 1),
        }.get(case.step, (case.step, 0))
        trap = Trap(step, count)
        if case.on == "network":
            fault: WireFault = case.fault  # type: ignore[assignment]
            trap.fault = fault
            trap.delay_s = self.limits.deadline_s * 0.4
        elif case.on not in IN_TRAINER:
            trap.strike = self._strike(case)
        return trap

    def _tear(self, rank: int, times: int) -> None:
        status, words = self.victim.ask("POST", f"/fault/{rank}/{times}")
        assert status == 200, words

    def _flip(self, case: Case) -> trainer.Flip | None:
        if case.on not in IN_TRAINER:
            return None
        where = "direct" if case.on == "memory" and case.reads_shards else case.on
        return trainer.Flip(where, self._trap(case).count)

    def _strike(self, case: Case) -> Callable[[], None]:
        if case.fault in OF_SWITCHES:
            last, times = len(self.victim.info().ranks) - 1, OF_SWITCHES.index(case.fault) + 1
            return lambda: self._tear(last, times)
        match case.on:
            case "engine":
                pids = self.victim.pids()
            case "engine rank":
                pids = [self.victim.info().ranks[-1].pid]
            case "trainer head":
                pids = self._rank_pids[:1]
            case _:
                pids = self._rank_pids[1:2]
        self._struck = pids
        number = signal.SIGKILL if case.fault == "kill" else signal.SIGSTOP

        def strike() -> None:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            if case.fault == "delay":
                threading.Timer(self.limits.deadline_s * 0.4, lambda: _wake(pids)).start()

        return strike

    # -- while

    def _update(
        self,
        case: Case,
        versions: list[int],
        wrong: list[str],
        deadline_s: float,
        flip: trainer.Flip | None = None,
    ) -> dict[int, list[trainer.Told]]:
        """Runs updates and returns the reports of every trainer rank that is still alive."""
        options = {
            **WAYS[case.transport],
            "bucket_bytes": self.kind.bucket_bytes,
            "timeout_s": deadline_s,
            "on_failure": "quarantine",
        }
        # A bystander of another kind is recognised by itself.
        targets = [Target(wire.url, engine=self.kind.engine) for wire in self.wires]
        # The victim comes first: the bystander gets everything through it.
        turned = case.transport == "direct relay"
        if turned:
            targets.reverse()
        self.ranks.start(trainer.update, targets, self.kind.weights, versions, options, flip)
        lost = self._lost_rank(case) if len(versions) > 1 else None
        told: dict[int, list[trainer.Told]] = {}
        for rank in range(_TRAINER_RANKS):
            if rank == lost:
                told[rank] = []
                continue
            try:
                told[rank], self._num_files[f"trainer rank {rank}"] = self.ranks.answer(rank, HANG_S)
                if turned:
                    told[rank] = [msgspec.structs.replace(one, status=one.status[::-1]) for one in told[rank]]
            except AssertionError as error:
                told[rank] = []
                wrong.append(f"trainer rank {rank} hangs or has died: {str(error).strip().splitlines()[-1]}")
        return told

    @staticmethod
    def _lost_rank(case: Case) -> int | None:
        if case.fault not in ("kill", "stop"):
            return None
        return {"trainer head": 0, "trainer rank": 1}.get(case.on)

    def _judge(self, case: Case, told: dict[int, list[trainer.Told]], wrong: list[str]) -> str:
        lost = self._lost_rank(case)
        for rank, ended in told.items():
            if rank == lost:
                continue
            if not ended:
                return "no answer"
            limits, struck = self.limits, int(case.step == "after")
            for nth, one in enumerate(ended):
                limit_s = limits.later_s
                if nth == struck:
                    limit_s = limits.struck_s if lost is None else limits.orphaned_s
                elif nth > struck and lost is not None:
                    limit_s = limits.incomplete_s
                if one.seconds > limit_s:
                    wrong.append(f"trainer rank {rank}: update {nth + 1} took {one.seconds:.1f} s of {limit_s:g} s")
            if lost is not None and f"trainer rank {lost}" not in ended[-1].words:
                wrong.append(f"trainer rank {rank} does not name rank {lost}: {ended[-1].words}")
        if lost is not None:
            return "no trainer"
        struck = told[0][1] if case.step == "after" and len(told[0]) > 1 else told[0][0]
        if struck.status == ("serving", "serving"):
            outcome = "unharmed"
        elif struck.status in (("serving", "quarantined"), ("serving", "untouched"), ("serving", "unknown")):
            outcome = "left out"
        else:
            outcome = "given up"
        if case.fault in OF_SWITCHES and outcome != "left out":
            wrong.append(f"the engine whose switch failed did not say so: {struck.words}")
        if case.fault == "delay" and outcome != "unharmed":
            wrong.append(f"a delay below the deadline did harm: {struck.words}")
        if outcome == "left out" and self.wires[1].url not in struck.words:
            wrong.append(f"the engine that failed is not named: {struck.words}")
        if case.on in IN_TRAINER and outcome != "given up":
            wrong.append(f"a flipped bit was not found: {struck.words}")
        if case.on in _NAMED and _NAMED[case.on] not in struck.words:
            wrong.append(f"the {case.on} is not named: {struck.words}")
        if outcome == "given up" and case.on not in IN_TRAINER:
            wrong.append(f"nobody was updated: {struck.words}")
        if case.on not in IN_TRAINER and told[0][-1].status[:1] != ("serving",):
            wrong.append(f"the bystander did not go on: {told[0][-1].words}")
        return outcome

    # -- after

    def _look_at(self, engine: Engine, name: str, wrong: list[str]) -> int | None:
        try:
            standing = self.kind.standing(engine, [*self._versions[:12], 0])
        except (OSError, AssertionError) as error:
            wrong.append(f"{name} does not answer: {error}")
            return None
        if standing.wrong:
            wrong.append(f"{name}: {standing.wrong}")
        return standing.version

    def _heal(self, case: Case) -> None:
        for wire in self.wires:
            wire.heal()
        if case.fault in ("stop", "delay") and case.on in ("engine", "engine rank"):
            _wake(self._struck)

    def _restore(self, case: Case) -> None:
        """Restarts the killed processes."""
        if case.on == "network":
            if not self.victim.process.is_alive() and self._may_be_gone(case):
                self._replace_victim(case)
        elif case.on in ("engine", "engine rank") and case.fault in ("kill", "stop"):
            lost = self.kind.stock and case.step == "join"  # it tries for half an hour to meet who has given up
            if (
                case.fault == "kill"
                or lost
                or (case.on == "engine rank" and not self.kind.stock and not self.kind.costly)
            ):
                self._replace_victim(case)
        elif self._lost_rank(case) is not None or self.ranks.broken:
            for process in self.ranks.processes:
                process.kill()
            self.ranks.close()
            self.ranks = Ranks(_TRAINER_RANKS)
            self._rank_pids = self._pids_of_ranks()

    def _replace_victim(self, case: Case) -> None:
        ranks = self._ranks_of(case)
        self._victims.pop(ranks).close()
        self.victim = self._victim(ranks)
        self.wires[1].upstream = self.victim.port

    def _victim(self, ranks: int) -> Engine:
        """The one of so many ranks; a new one if the last was killed, which was started meanwhile."""
        if ranks not in self._victims:
            spare = self._spares.pop(ranks, None)
            self._victims[ranks] = self._start(ranks) if spare is None else spare.result()
            if ranks in self.kind.spares:
                self._spares[ranks] = self._pool.submit(self._start, ranks)
        return self._victims[ranks]

    def _may_be_gone(self, case: Case) -> bool:
        """Whether nobody need answer in place of the victim."""
        if case.fault == "kill" and (case.on == "engine" or (case.on == "engine rank" and self.kind.ranks == 1)):
            return True
        # A stock engine may end itself over a request that it cannot read.
        return self.kind.stock and case.fault == "flip" and not self.victim.process.is_alive()

    def _ranks_of(self, case: Case) -> int:
        return self.kind.ranks if case.on == "engine rank" else 1

    def _next_versions(self, count: int) -> list[int]:
        found = [next_version() for _ in range(count)]
        self._versions[:0] = reversed(found)
        return found

    def _start(self, ranks: int) -> Engine:
        engine = self.kind.start(ranks)
        assert engine.port
        return engine

    def _pids_of_ranks(self) -> list[int]:
        return [process.pid for process in self.ranks.processes]

    def _files_of(self, engine: Engine) -> int:
        return sum(num_fds(pid) for pid in engine.pids())

    def _count_files(self) -> None:
        self._baseline = dict(self._num_files)

    def _look_for_leftovers(
        self, case: Case, before: set[int], makers: set[int], older: set[str], wrong: list[str]
    ) -> None:
        files = self._files_of(self.bystander)
        if self.kind.stock and case.transport == "broadcast" and self._lost_rank(case) is not None:
            self._lost_groups += 1  # of a name that nobody knows any more
        if files > self._baseline["bystander"] + _ENGINE_FILES + self._lost_groups * _GROUP_FILES:
            wrong.append(f"the bystander has {files} open files, {self._baseline['bystander']} at first")
        if self._lost_rank(case) is None:
            for rank in range(_TRAINER_RANKS):
                name = f"trainer rank {rank}"
                if self._num_files[name] > self._baseline[name] + 4:
                    wrong.append(f"{name} has {self._num_files[name]} open files, {self._baseline[name]} at first")
        else:
            self._count_files()
        segments = _segments(makers) - older
        if self.kind.stock and case.transport == "ipc" and self._lost_rank(case) is not None:
            # Torch's manager of a killed trainer's segments ends with the last process that has opened one.
            self._kept_by_engines |= segments
        elif segments:
            wrong.append(f"shared memory is left: {sorted(segments)}")
        new = {pid for pid in children() - before if Path(f"/proc/{pid}").exists()}
        if new:
            wrong.append(f"new children: {new}")


def _segments(makers: set[int]) -> set[str]:
    """Shared memory that these processes made: tests of other processes may run beside these.

    One of the makers is this process, in which other tests have run before.
    """
    marks = tuple(f"torch_{pid}_" for pid in makers)
    return {name for name in os.listdir("/dev/shm") if name.startswith(marks)}


def _wake(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
