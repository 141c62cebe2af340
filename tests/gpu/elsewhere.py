"""Makes a process seem to run on another host, or on GPUs of its own, to weightcast and to NCCL.

NCCL takes processes for those of different machines if their ``NCCL_HOSTID`` differ.  Then their ranks may share a GPU,
and what they send goes through sockets.  weightcast refuses a GPU that trainer and engine share, by its UUID.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any


def appear_on(host: str) -> None:
    """Gives this process another host's id, in every module that was imported."""
    _replace("host_id", lambda: host)


def claim_other_gpus() -> None:
    """Names this process's GPUs by UUIDs that no other process has, where a trainer rank says where it runs."""
    from weightcast.update import fleet

    def other(device: Any) -> str:
        return known(device) if device.type != "cuda" else f"GPU-{device.index}-of-{os.getpid()}"

    known = fleet.device_uuid
    fleet.device_uuid = other


def _replace(name: str, new: Callable[..., Any]) -> None:
    from weightcast.comm import ipc

    known = getattr(ipc, name)
    for module in list(sys.modules.values()):
        if getattr(module, name, None) is known:
            setattr(module, name, new)
