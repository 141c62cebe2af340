"""LMDeploy's own update routes on a server with our receiver: they work, and the engine says what they leave.

A trainer that speaks LMDeploy's own protocol finds the server that it knows.  It writes into the weights that serve,
with no proof and no version.  So while such an update is not finished the engine counts as quarantined, and afterwards
it serves an unknown version.
"""

# LMDeploy is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, HTTPException, Response
from fastapi.routing import APIRoute

from weightcast.plugins.lmdeploy.engine_calls import EngineCalls
from weightcast.plugins.lmdeploy.engine_hooks import LmdeployHooks
from weightcast.plugins.lmdeploy.folder import take_written
from weightcast.plugins.lmdeploy.hook_points import LMDEPLOY
from weightcast.plugins.sleeping import between_updates
from weightcast.receiver.session import SessionHandler

# Routes that write weights, and whether a request is the last one of its update.
_WRITING: dict[str, Callable[[Any], bool]] = {
    "/update_weights": lambda request: request.finished,
    "/update_weights_from_distributed": lambda request: request.finished,
    "/update_weights_from_ipc": lambda request: True,
}
_UPDATE_S = 1800.0  # as long as LMDeploy itself may wait for a trainer
_UNFINISHED = "an update through LMDeploy's own routes is not finished: finish it, or make a full update"
_UNPROVEN = "these weights came through LMDeploy's own routes: their version is not known, and they are not proven"


def admit_own_updates(
    router: APIRouter, engine: SessionHandler, hooks: LmdeployHooks, calls: EngineCalls, folder: str
) -> None:
    """Wraps the routes that write weights.  They answer 409 while an update of ours is under way.

    Args:
        router: LMDeploy's own.
        engine: Session that is told what the engine serves.
        hooks: Hooks that hold requests back.
        calls: Runs coroutines on the server's event loop.
        folder: Folder of the server, where ranks note that they write.

    Raises:
        ConfigError: This LMDeploy lacks one of the routes.
    """
    routes = [route for route in router.routes if isinstance(route, APIRoute)]
    found = {route.path: route for route in routes if "POST" in (route.methods or ())}
    lacking = [f"the server has no route {path}" for path in _WRITING if path not in found]
    if lacking:
        raise LMDEPLOY.other_version(lacking)
    updates = _OwnUpdates(engine, hooks, calls, folder)
    for path, is_last in _WRITING.items():
        served = updates.told(found[path].endpoint, is_last)
        route = APIRoute(path, served, methods=["POST"], dependencies=found[path].dependencies)
        router.routes.insert(0, route)  # in front: the first route that matches answers


class _OwnUpdates:
    def __init__(self, engine: SessionHandler, hooks: LmdeployHooks, calls: EngineCalls, folder: str) -> None:
        self._engine, self._hooks, self._calls, self._folder = engine, hooks, calls, folder
        self._unfinished = False

    def told(self, endpoint: Callable[..., Any], is_last: Callable[[Any], bool]) -> Callable[..., Any]:
        """Wraps an endpoint of LMDeploy's."""
        refusal = functools.partial(HTTPException, 409)

        @functools.wraps(endpoint)
        async def served(request: Any, raw_request: Any = None) -> Response:
            self._calls.set_loop(asyncio.get_running_loop())

            def do() -> Response:
                try:
                    answer = endpoint(request, raw_request)
                    if inspect.isawaitable(answer):
                        answer = self._calls.result(answer, _UPDATE_S)
                finally:
                    self._look()
                if is_last(request) and answer.status_code == 200:
                    self._end()
                return answer

            return await between_updates(self._engine, do, refusal)

        # LMDeploy's annotations are text that only its own module can read.
        served.__signature__ = inspect.signature(endpoint, eval_str=True)  # type: ignore[attr-defined]
        return served

    def _look(self) -> None:
        """A request that was refused before a rank has written anything leaves the engine as it was."""
        if take_written(self._folder):
            self._unfinished = True
            self._engine.discarded(_UNFINISHED)

    def _end(self) -> None:
        # An update of ours may have made it whole since.
        if self._unfinished and self._engine.state == "quarantined":
            self._engine.replaced(_UNPROVEN)
            self._hooks.resume()
        self._unfinished = False
