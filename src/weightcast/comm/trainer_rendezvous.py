"""The rendezvous of all trainer ranks, through the key-value store that the job has already."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait

import torch.distributed as dist

from weightcast.errors import TrainerRankFailed
from weightcast.runtime import blocking_threads

_POLL_S = 0.02
_LAST_WORD_S = 1.0  # for answers that are due when the deadline passes, of a store that has answered before
_PREFIX = "weightcast/trainers"


def meet(store: dist.Store, *, rank: int, world_size: int, timeout_s: float) -> tuple[str, tuple[int, ...]]:
    """Waits until every rank has called this function.  All ranks may try again after a failure.

    Returns:
        A new prefix for keys, the same on every rank, and the ranks that did not come in time, in order.

    Raises:
        TrainerRankFailed: The store did not answer in time, or is lost.
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
