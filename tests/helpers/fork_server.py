"""One fork server for all workers of a test run.

``multiprocessing`` starts a fork server for every process that asks for one.  Each of pytest's workers would import
torch, transformers and this package for its own, which takes seconds of a processor and hundreds of megabytes.  Here
the process that starts the workers starts the server too, while they collect tests, and tells them where it is.
"""

from __future__ import annotations

import importlib
import os
from multiprocessing import forkserver, resource_tracker
from typing import Any

# Engines, trainers and commands need these.  Order is that of their imports.
PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "weightcast.comm.trainer_group",
    "weightcast.update.updater",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "weightcast.cli.app",
    "weightcast.cli.bench_updates",
    "weightcast.lab.demo.learner",
    "weightcast.lab.demo.rollouts",
    "weightcast.exporters.checkpoint",
    "weightcast.rollout.launch",
    "tests.helpers.harness",
]
_server: Any = forkserver._forkserver  # type: ignore[attr-defined]
_server.set_forkserver_preload(PRELOAD)


def preload() -> None:
    """Import here what the server imports."""
    for module in PRELOAD:
        importlib.import_module(module)


def start() -> dict[str, Any]:
    """Starts the server of this run; returns what its other users need."""
    _server.ensure_running()
    return {"address": _server._forkserver_address, "pid": os.getpid(), "alive": _server._forkserver_alive_fd}


def address() -> Any:
    """The address of the server that this process uses, for a process that the server forks."""
    _server.ensure_running()
    return _server._forkserver_address


def use_own(address: Any) -> None:
    """Processes of this process, which the server forked, are forked by the server too.

    Args:
        address: As ``address`` returned it in the process that started this one.
    """
    _server._forkserver_address = address  # this process was born with the end of the pipe that keeps the server
    _server.ensure_running = resource_tracker.ensure_running


def use(told: dict[str, Any]) -> None:
    """Processes of this process are forked by the server of another one, which lives as long as one of its users.

    Args:
        told: As ``start`` returned it there.
    """
    _server._forkserver_address = told["address"]
    # The server ends when nobody has this end of its pipe open any more.
    _server._forkserver_alive_fd = os.open(f"/proc/{told['pid']}/fd/{told['alive']}", os.O_WRONLY)
    _server.ensure_running = resource_tracker.ensure_running  # it runs, and is no child of this process
