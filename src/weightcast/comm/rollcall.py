"""Who is to blame when the ranks of a job stop answering each other.

A rank that dies or falls silent takes its neighbours with it: they give up, close their connections, and
*their* neighbours would blame them.  So a rank that gives up first leaves a note in the job's key-value
store saying whom it was waiting for, then follows the notes of those it was waiting for itself.  Whoever is
blamed and left no note is the culprit.

Knows keys and ranks.  It moves no tensor and ends nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec
import torch.distributed as dist

from weightcast.comm import left_behind
from weightcast.errors import TrainerRankFailed

_POLL_S = 0.02
_LAST_WORD_S = 1.0  # for the store's answers that are due when a wait is over
_PREFIX = "weightcast/trainers"


class _Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank that gave up leaves behind.

    Attributes:
        blames: The ranks it was waiting for; empty if the trouble is its own.
        reason: Its own words.
    """

    blames: tuple[int, ...]
    reason: str


_notes = msgspec.json.Decoder(_Note)  # made before there are threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Where the notes lead.

    Attributes:
        silent: Ranks that were waited for and left no note: dead, stuck, or busy with something else.
        quit: Ranks that gave up for a reason of their own, with that reason.
        store_lost: The store did not answer, so there were no notes: ``silent`` is merely who was waited for.
    """

    silent: tuple[int, ...]
    quit: dict[int, str]
    store_lost: bool = False


def meet(store: dist.Store, *, rank: int, world_size: int, timeout_s: float) -> tuple[str, tuple[int, ...]]:
    """Wait until every rank is here.  Collective; after it has failed, all may try again.

    Args:
        store: The job's key-value store.
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: How long to wait, in seconds.

    Returns:
        A prefix for keys, the same on every rank and never used before, and the ranks that did not come in time,
        in order; none if all are here.

    Raises:
        TrainerRankFailed: The store did not answer in time, or is lost.
    """
    met = Future[tuple[str, tuple[int, ...]]]()
    gave_up = threading.Event()

    def work() -> None:
        try:
            met.set_result(_meet(store, rank, world_size, timeout_s, gave_up))
        except BaseException as error:  # noqa: BLE001  raised below, where it is waited for
            met.set_exception(error)

    # The store has no deadline of its own that we may choose: ask it from a thread that may be left behind.
    left_behind.start(work, name="weightcast-meet", give_up=gave_up.set)
    try:
        return met.result(timeout_s + _LAST_WORD_S)
    except TimeoutError:
        raise TrainerRankFailed(
            f"the job's store, which trainer rank 0 usually holds, did not answer within {timeout_s:g} s",
            hint="is rank 0 (or the launcher that holds the store) stopped, or swamped?",
        ) from None
    except RuntimeError as error:  # which torch's own errors are
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
        # The head counts attempts, and closes those that fail, so that a rank that comes late to one attempt
        # does not mistake it for the next.
        attempt = store.add(f"{_PREFIX}/attempts", 1 if rank == 0 else 0)
        prefix = f"{_PREFIX}/{attempt}"
        fresh = attempt and not store.check([f"{prefix}/here/{rank}"]) and not store.check([f"{prefix}/closed"])
        # A store that answers late must not let others meet one who has given up.
        if fresh and not gave_up.is_set():
            store.set(f"{prefix}/here/{rank}", "1")
            joined = prefix
        while fresh and not over():
            if rank == 0 and store.check([f"{prefix}/here/{other}" for other in others]) and not gave_up.is_set():
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
    elif prefix != joined:  # the head has not begun; one that closed what we had joined was here, and lacked others
        return prefix, (0,)
    missing = tuple(other for other in others if not store.check([f"{prefix}/here/{other}"]))
    return prefix, missing or (0,)


class RollCall:
    """The notes of one group of ranks.

    Args:
        store: The job's key-value store.
        prefix: Of the keys; the same on every rank, never used twice.
        rank: This rank.
    """

    def __init__(self, store: dist.Store, *, prefix: str, rank: int) -> None:
        self._store = dist.PrefixStore(prefix, store)
        self._rank = rank

    def leave_note(self, *, blames: Iterable[int], reason: str) -> None:
        """Say that this rank gives up; the first note of a rank is the one that counts."""
        if not self._store.check([f"gave-up/{self._rank}"]):
            note = _Note(blames=tuple(sorted(blames)), reason=reason)
            self._store.set(f"gave-up/{self._rank}", msgspec.json.encode(note).decode())

    def verdict(self, suspects: Sequence[int], *, reason: str, patience_s: float) -> Verdict:
        """Give up waiting for the suspects and find out who is behind it.

        Args:
            suspects: The ranks that this rank was waiting for.
            reason: What for, for the others to read.
            patience_s: How long to wait for notes, in seconds.  The store may be in a process that died too,
                so this is also the limit for its answers.
        """
        found: list[Verdict] = []
        # The store has no deadline of its own that we may choose: ask it from a thread that may be left behind.
        asking = left_behind.start(
            lambda: self._follow(suspects, reason, patience_s, found), name="weightcast-rollcall"
        )
        asking.join(patience_s + _LAST_WORD_S)
        return found[0] if found else Verdict(silent=tuple(sorted(suspects)), quit={}, store_lost=True)

    def _follow(self, suspects: Sequence[int], reason: str, patience_s: float, found: list[Verdict]) -> None:
        try:
            self.leave_note(blames=suspects, reason=reason)
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
