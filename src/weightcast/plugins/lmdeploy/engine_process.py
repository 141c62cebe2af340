"""Our hooks in LMDeploy's engine process, and the methods that the API server calls there."""

# LMDeploy is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from weightcast.errors import ConfigError, WeightcastError
from weightcast.plugins.hook_points import LMDEPLOY
from weightcast.plugins.lmdeploy.folder import folder_of_server, module_map, note_failure
from weightcast.plugins.lmdeploy.mp_executor import end_with_lost_ranks, refuse_lost_answers
from weightcast.plugins.lmdeploy.requests_at_switch import LmdeployRequests

log = logging.getLogger("weightcast.plugins.lmdeploy")

_ONE_HOST = "give LMDeploy a placement group whose bundles are all on the host of its API server"

# The process has one engine, which makes its loop when it starts to serve.
_requests: LmdeployRequests | None = None


class _Released:
    """A condition whose server may be gone once the other end has been notified.

    LMDeploy's API server ends that server as soon as it has the port, on a busy machine before this end hears that it
    has let go.
    """

    def __init__(self, condition: Any) -> None:
        self._condition = condition

    def __enter__(self) -> Any:
        return self._condition.__enter__()

    def __exit__(self, *error: Any) -> None:
        with suppress(EOFError, ConnectionError):
            self._condition.__exit__(*error)

    def notify(self) -> None:
        self._condition.notify()


def run(shared: Any, condition: Any, *arguments: Any, **named: Any) -> None:
    """Stands in for ``ZMQMPEngine._mp_proc``: adds our hooks, then calls it."""
    from lmdeploy.pytorch.engine.mp_engine.zmq_engine import ZMQMPEngine

    try:
        prepare()
    except WeightcastError as error:
        sys.exit(f"weightcast cannot run in this LMDeploy: {error}")
    ZMQMPEngine._mp_proc(shared, _Released(condition), *arguments, **named)


def prepare() -> None:
    """Checks LMDeploy and adds our hooks, before the engine is made; ``ConfigError`` if it cannot have our receiver."""
    folder = folder_of_server()
    try:
        if not Path(folder).is_dir():
            raise ConfigError("the engine is on another host than its API server", hint=_ONE_HOST)
        LMDEPLOY.check("engine")
        patch()
    except WeightcastError as error:
        note_failure(folder, error)
        raise


def patch() -> None:
    """Replaces what LMDeploy's engine process calls."""
    from lmdeploy.pytorch.config import ModelConfig
    from lmdeploy.pytorch.engine import engine
    from lmdeploy.pytorch.engine.engine_loop import EngineLoop
    from lmdeploy.pytorch.engine.mp_engine.base_worker import EngineWorkerBase

    read_config = ModelConfig.from_pretrained.__func__
    make_loop = EngineLoop.__init__
    path = module_map(folder_of_server())

    def from_pretrained(cls: Any, *arguments: Any, **named: Any) -> Any:
        config = read_config(cls, *arguments, **named)
        # LMDeploy 0.18 takes this option, and does not pass it on.
        if not named.get("is_draft_model"):
            config.custom_module_map = path
        return config

    def made(self: Any, *arguments: Any, **named: Any) -> None:
        global _requests
        make_loop(self, *arguments, **named)
        _requests = LmdeployRequests(self)

    ModelConfig.from_pretrained = classmethod(from_pretrained)
    EngineLoop.__init__ = made
    engine.build_executor = _on_this_host(engine.build_executor)
    refuse_lost_answers()
    end_with_lost_ranks(folder_of_server())
    # LMDeploy serves every public function of this class to the API server.
    for method in METHODS:
        setattr(EngineWorkerBase, method.__name__, method)


def _on_this_host(build: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses an executor with a rank on another host: ranks and API server talk over Unix sockets."""

    @functools.wraps(build)
    def built(*arguments: Any, **named: Any) -> Any:
        executor = build(*arguments, **named)
        if hasattr(executor, "ray_ctx"):
            import ray

            here, places = ray.util.get_node_ip_address(), executor.collective_rpc("get_node_ip")
            elsewhere = [f"rank {rank} at {place}" for rank, place in enumerate(places) if place != here]
            if elsewhere:
                words = f"{', '.join(elsewhere)}: not on the host of the API server, {here}"
                error = ConfigError(words, hint=_ONE_HOST)
                note_failure(folder_of_server(), error)
                raise error
        return executor

    return built


def weightcast_ready(worker: Any) -> bool:
    """Whether our hook on the engine's loop took."""
    return _requests is not None


async def weightcast_call(worker: Any, method: str, *arguments: Any) -> str:
    """Calls a method of ``LmdeployRequests``; returns why it failed, or nothing."""
    if _requests is None:
        raise RuntimeError("the engine's loop has not started")
    answer = getattr(_requests, method)(*arguments)
    return (await answer if inspect.isawaitable(answer) else answer) or ""


METHODS = (weightcast_ready, weightcast_call)
