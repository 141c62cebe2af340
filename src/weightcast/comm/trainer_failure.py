"""The rendezvous and the failure of all trainer ranks, through the key-value store that the job has already.

A rank that dies or falls silent takes its neighbours with it: they give up, close their connections, and *their*
neighbours would blame them.  So a rank that gives up first leaves a note in the job's key-value store.  The note says
which ranks it was waiting for.  Then it follows the notes of those ranks.  A rank that is blamed and left no note is
the culprit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import NoReturn

import msgspec
import torch.distributed as dist

from weightcast.errors import TrainerRankFailed
from weightcast.runtime import blocking_threads

_POLL_S = 0.02
_LAST_WORD_S = 1.0  # for the store's answers that are due when a wait is over
_PREFIX = "weightcast/trainers"
# Ranks enter a step at different times, so their deadlines pass at different times too.
_MAX_PATIENCE_S = 3.0


class _Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The note of a rank that gave up: the ranks that it was waiting for, none if the trouble is its own, and why."""

    blames: tuple[int, ...]
    reason: str


_notes = msgspec.json.Decoder(_Note)  # made before there are threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of a search for the culprit.

    Ranks in ``silent`` were waited for and left no note: dead, stuck, or busy with something else.  Those in ``quit``
    gave up for a reason of their own.  If the store is lost there were no notes, and ``silent`` lists the suspects.
    """

    silent: tuple[int, ...]
    quit: dict[int, str]
    store_lost: bool = False


class FailureNotes:
    """The notes of one group of ranks; ``prefix`` begins their keys, the same on every rank and never used twice."""

    def __init__(self, store: dist.Store, *, prefix: str, rank: int) -> None:
        self._store = dist.PrefixStore(prefix, store)
        self._rank = rank

    def verdict(self, suspects: Sequence[int], *, reason: str, patience_s: float) -> Verdict:
        """Leaves this rank's note, with its ``reason``, and follows the notes of others to the culprit."""
        found: list[Verdict] = []
        # The process that holds the store may have died, and we cannot set the store's own deadline.  So a thread
        # asks it and may be left behind.
        asking = blocking_threads.start(
            lambda: self._follow(suspects, reason, patience_s, found), name="weightcast-culprit"
        )
        asking.join(patience_s + _LAST_WORD_S)
        return found[0] if found else Verdict(silent=tuple(sorted(suspects)), quit={}, store_lost=True)

    def _follow(self, suspects: Sequence[int], reason: str, patience_s: float, found: list[Verdict]) -> None:
        try:
            if not self._store.check([f"gave-up/{self._rank}"]):  # only its first note counts
                note = _Note(blames=tuple(sorted(suspects)), reason=reason)
                self._store.set(f"gave-up/{self._rank}", msgspec.json.encode(note).decode())
            seen = {self._rank}
            silent = set(suspects)
            quit: dict[int, str] = {}
            deadline = time.monotonic() + patience_s
            while silent and time.monotonic() < deadline:
                for rank in sorted(silent):
                    if not self._store.check([f"gave-up/{rank}"]):
                        continue
                    note = _notes.decode(self._store.get(f"gave-up/{rank}"))
                    silent.discard(rank)
                    seen.add(rank)
                    if not note.blames:
                        quit[rank] = note.reason
                    silent |= set(note.blames) - seen
                if quit:
                    break
                time.sleep(_POLL_S)
            found.append(Verdict(silent=() if quit else tuple(sorted(silent)), quit=quit))
        except (RuntimeError, msgspec.MsgspecError):
            return  # the store is gone with the process that held it


class FailureState:
    """The first failure of a group of ranks.  After it, ``check`` raises it until the next ``reset``.

    ``hosts`` has the name of each rank's host, if they are on several.  ``lost`` says that a rank was dead or silent;
    False where ranks only gave up.
    """

    def __init__(self, *, rank: int, timeout_s: float) -> None:
        self._rank = rank
        self.timeout_s = timeout_s
        self.hosts: Sequence[str] = ()
        self._notes: FailureNotes | None = None
        self._hang_up: Callable[[], None] = lambda: None
        self.reason: str | None = None
        self.lost = False

    def reset(self, notes: FailureNotes | None, hang_up: Callable[[], None]) -> None:
        """Forgets a failure.  A group of one rank has no ``notes``; ``hang_up`` ends waits here and at peers."""
        self._notes, self._hang_up = notes, hang_up
        self.reason, self.lost = None, False

    def check(self) -> None:
        """Raises the failure, a TrainerRankFailed, if there was one."""
        if self.reason is not None:
            raise TrainerRankFailed(self.reason)

    def give_up(self, reason: str, *, tell: bool) -> None:
        """Fails for this rank's own reason, unless it has failed; ``tell`` ends the waits of other ranks too."""
        if self.reason is not None:
            return
        self.reason = f"{name_ranks([self._rank], self.hosts)} gave up: {reason}"
        if tell and self._notes is not None:
            self._notes.verdict((), reason=reason, patience_s=1.0)
            self._hang_up()

    def fail(self, suspects: Sequence[int], what: str, *, timed_out: bool = False) -> NoReturn:
        """Finds the culprit, ends every other wait in the group, and raises.

        ``suspects`` are the ranks that this rank was waiting for, and ``what`` says for what.  ``timed_out`` is True
        after a deadline, False after a broken connection.
        """
        self.check()
        notes = self._notes
        assert notes is not None
        patience_s = min(_MAX_PATIENCE_S, max(self.timeout_s / 4, 0.5))
        verdict = notes.verdict(suspects, reason=f"waited for {what}", patience_s=patience_s)
        how = f"did not answer within {self.timeout_s:g} s" if timed_out else "closed its connection"
        self.lost = bool(verdict.silent)
        self.reason = f"{_blame(verdict, suspects, how, self.hosts)}; rank {self._rank} was waiting for {what}"
        self._hang_up()
        raise TrainerRankFailed(self.reason)


def name_ranks(ranks: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """``"trainer rank 3"`` or ``"trainer ranks 1, 3"``; ``"trainer rank 3 (host b)"`` given the hosts of all ranks."""
    named = [f"{rank} (host {hosts[rank]})" if hosts else str(rank) for rank in ranks]
    return f"trainer rank{'s' if len(ranks) > 1 else ''} {', '.join(named)}"


def _blame(verdict: Verdict, suspects: Sequence[int], how: str, hosts: Sequence[str]) -> str:
    if verdict.quit:
        return "; ".join(
            f"{name_ranks([rank], hosts)} gave up: {reason}" for rank, reason in sorted(verdict.quit.items())
        )
    if not verdict.silent:
        return f"{name_ranks(sorted(suspects), hosts)} {how}, and every rank was waiting for another"
    silent = name_ranks(verdict.silent, hosts)
    if verdict.store_lost:
        return f"{silent} {how}, nor does the job's store, which rank 0 usually holds"
    if set(verdict.silent) <= set(suspects):
        return f"{silent} {how}"
    return f"{silent} fell silent"


def meet(store: dist.Store, *, rank: int, world_size: int, timeout_s: float) -> tuple[str, tuple[int, ...]]:
    """Waits until every rank has called this function.  All ranks may try again after a failure.

    It returns a new prefix for keys, the same on every rank, and the ranks that did not come in time, in order.  It
    raises TrainerRankFailed if the store does not answer in time, or is lost.
    """
    answered, gave_up = threading.Event(), threading.Event()

    def work() -> tuple[str, tuple[int, ...]]:
        store.add(f"{_PREFIX}/attempts", 0)
        answered.set()
        return _meet(store, rank, world_size, timeout_s, gave_up)

    # We cannot set the store's own deadline, so a thread asks it and may be left behind.
    met = blocking_threads.call(work, name="weightcast-meet", give_up=gave_up.set)
    try:
        wait([met], timeout_s)
        return met.result(_LAST_WORD_S if answered.is_set() else 0.0)
    except TimeoutError:
        raise TrainerRankFailed(
            f"the job's store, which trainer rank 0 usually holds, did not answer within {timeout_s:g} s",
            hint="check whether rank 0, or the launcher that holds the store, is stopped or overloaded",
        ) from None
    except RuntimeError as error:  # the class of torch's own errors
        words = str(error).partition("\n")[0]
        raise TrainerRankFailed(f"the job's store, which trainer rank 0 usually holds, is lost: {words}") from error
    finally:
        gave_up.set()


def _meet(
    store: dist.Store, rank: int, world_size: int, timeout_s: float, gave_up: threading.Event
) -> tuple[str, tuple[int, ...]]:
    deadline = time.monotonic() + timeout_s

    def over() -> bool:
        return gave_up.is_set() or time.monotonic() >= deadline

    others = [other for other in range(world_size) if other != rank]
    joined = ""
    while True:
        # The head counts attempts and closes those that fail.  A rank that comes late to one attempt therefore
        # does not mistake it for the next.
        attempt = store.add(f"{_PREFIX}/attempts", 1 if rank == 0 else 0)
        prefix = f"{_PREFIX}/{attempt}"
        fresh = attempt and not store.check([f"{prefix}/here/{rank}"]) and not store.check([f"{prefix}/closed"])
        # If the store answers late, this rank may have given up: then the others must not meet it.
        if fresh and not gave_up.is_set():
            store.set(f"{prefix}/here/{rank}", "1")
            store.add(f"{prefix}/arrived", 1)
            joined = prefix
        while fresh and not over():
            if rank == 0 and store.add(f"{prefix}/arrived", 0) == world_size and not gave_up.is_set():
                store.set(f"{prefix}/go", "1")
            if store.check([f"{prefix}/go"]):
                return prefix, ()
            if store.check([f"{prefix}/closed"]):
                break
            time.sleep(_POLL_S)
        if over():
            break
        time.sleep(_POLL_S)
    if rank == 0:
        store.set(f"{prefix}/closed", "1")
    elif prefix != joined:
        # The head has not begun.  Had it closed the attempt that this rank joined, others would be missing instead.
        return prefix, (0,)
    missing = tuple(other for other in others if not store.check([f"{prefix}/here/{other}"]))
    return prefix, missing or (0,)
