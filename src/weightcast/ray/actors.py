"""The place of a Ray actor, and Ray's decorators with types that hold for actors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ray

# Ray's annotations of these two describe what comes out as coroutines and functions; here they are actors.
remote: Any = ray.remote
method: Any = ray.method


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a rank: its node's address as other nodes reach it, pid there, and GPUs by Ray's names."""

    address: str
    pid: int
    gpus: tuple[str, ...]


def place() -> Place:
    """Returns the place of the calling actor."""
    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get("GPU", [])
    return Place(address=ray.util.get_node_ip_address(), pid=os.getpid(), gpus=tuple(map(str, gpus)))
