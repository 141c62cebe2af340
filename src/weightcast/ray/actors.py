"""The place of a Ray actor, Ray's decorators with types that hold for actors, and one result for a call on many."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from weightcast.errors import EngineFailure, WeightcastError

# Ray's annotations of these two describe what comes out as coroutines and functions; here they are actors.
remote: Any = ray.remote
method: Any = ray.method
_GRACE_S = 15.0
_GONE = (RayActorError, OutOfMemoryError)  # Ray ends actors itself when its node runs out of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """The place of a rank: its node's address as other nodes reach it, pid there, and GPUs by Ray's names."""

    address: str
    pid: int
    gpus: tuple[str, ...]


def place() -> NodePlace:
    """Returns the place of the calling actor."""
    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get("GPU", [])
    return NodePlace(address=ray.util.get_node_ip_address(), pid=os.getpid(), gpus=tuple(map(str, gpus)))


class ActorsFailed(EngineFailure):
    """Some actors failed, died or were late; ``gone`` if one is dead or silent, so that later calls fail too."""

    def __init__(self, message: str, *, ranks: Sequence[int] = (), gone: bool = False) -> None:
        super().__init__(message, ranks=ranks)
        self.gone = gone


def collect(asked: Sequence[Any], *, names: Sequence[str], what: str, timeout_s: float) -> list[Any]:
    """Waits for the answers of several actors and returns them in order.

    After the first failure the other actors get fifteen seconds, because they may wait for the failed one in a
    collective that it will never enter.

    Args:
        names: Name of each actor, e.g. ``"trainer rank 1 (pid 7 on 10.0.0.2)"``.
        timeout_s: Deadline of the whole wait, in seconds.

    Raises:
        WeightcastError: All failures are errors of this family and all actors answered; the first one is raised.
        ActorsFailed: Any other failure, with the ranks.
    """
    deadline = time.monotonic() + timeout_s
    place_of = {reference: place for place, reference in enumerate(asked)}
    answers: dict[int, Any] = {}
    failed: dict[int, Exception] = {}
    waiting = list(asked)
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            break
        for reference in ready:
            try:
                answers[place_of[reference]] = ray.get(reference)
            except RayError as error:
                if not failed:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                cause = error.cause if isinstance(error, RayTaskError) else None
                failed[place_of[reference]] = cause if isinstance(cause, Exception) else error
    if not failed and not waiting:
        return [answers[place] for place in range(len(asked))]
    if failed and not waiting and all(isinstance(error, WeightcastError) for error in failed.values()):
        raise failed[min(failed)]
    late = [place_of[reference] for reference in waiting]
    if failed:
        # The late actors wait for those that failed, so only the failed ones are named.
        words = "; ".join(f"{names[place]} {_how(error)}" for place, error in sorted(failed.items()))
        ranks = sorted(failed)
    else:
        words = f"{', '.join(names[place] for place in late)} did not answer within {timeout_s:g} s"
        ranks = late
    gone = bool(late) or any(isinstance(error, _GONE) for error in failed.values())
    raise ActorsFailed(f"{what}: {words}", ranks=ranks, gone=gone)


def why_gone(error: Exception) -> str:
    """Returns Ray's reason for an actor's end, without its list of other possible causes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("The actor is dead because")] or lines[:1]
    words = reasons[0] if reasons else type(error).__name__
    return words.partition(" Some common causes include")[0]


def _how(error: Exception) -> str:
    if isinstance(error, _GONE):
        return f"is gone: {why_gone(error)}"
    return f"failed: {type(error).__name__}: {error}"
