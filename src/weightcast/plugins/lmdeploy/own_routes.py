"""LMDeploy's own routes on a server with our receiver: sleep, wake-up and its updates, kept apart from ours.

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
from collections.abc import Callable, Collection
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.routing import APIRoute

from weightcast.errors import Refused
from weightcast.plugins.api_server import between_updates, fall_asleep, wake_up
from weightcast.plugins.lmdeploy.engine_hooks import EngineCalls, LmdeployHooks
from weightcast.plugins.lmdeploy.folder import take_written
from weightcast.plugins.lmdeploy.hook_points import LMDEPLOY
from weightcast.plugins.lmdeploy.sleeping_weights import TAGS, WAKE_FIRST, WEIGHTS
from weightcast.receiver.api_keys import Guard
from weightcast.receiver.session import SessionHandler

_SLEEP_S = 600.0
_DISCARDED = (
    "sleep level 2 discarded the weights: wake them (POST /wakeup?tags=weights), then make a full update, or use "
    "level 1"
)
# Routes that write weights, and whether a request is the last one of its update.
_WRITING: dict[str, Callable[[Any], bool]] = {
    "/update_weights": lambda request: request.finished,
    "/update_weights_from_distributed": lambda request: request.finished,
    "/update_weights_from_ipc": lambda request: True,
}
_UPDATE_S = 1800.0  # as long as LMDeploy itself may wait for a trainer
_UNFINISHED = "an update through LMDeploy's own routes is not finished: finish it, or make a full update"
_UNPROVEN = "these weights came through LMDeploy's own routes: their version is not known, and they are not proven"


def guard_sleep(
    router: APIRouter,
    async_engine: Any,
    engine: SessionHandler,
    hooks: LmdeployHooks,
    calls: EngineCalls,
    guard: Guard,
    *,
    never: str = "",
) -> None:
    """Wraps an engine's ``sleep`` and replaces the route of its wake-up, which LMDeploy calls without waiting.

    Both answer 409 while an update is under way.  Requests that run end with reason ``abort``.

    Args:
        never: Reason why this LMDeploy could not wake up, so that sleep is refused; empty if it can.

    Raises:
        ConfigError: This LMDeploy has no route for the wake-up.
    """
    sleep, wakeup = async_engine.sleep, async_engine.wakeup
    refusal = functools.partial(HTTPException, 409)

    async def guarded_sleep(level: int = 1) -> None:
        calls.set_loop(asyncio.get_running_loop())

        def do() -> None:
            if never:
                raise Refused(never, hint="use --distributed-executor-backend ray")
            discarded = _DISCARDED if level >= 2 else ""
            # LMDeploy takes a second sleep while only the KV cache sleeps.
            fall_asleep(engine, hooks, (WEIGHTS,), lambda: calls.result(sleep(level), _SLEEP_S), discarded=discarded)

        await between_updates(engine, do, refusal)

    async def guarded_wakeup(request: Request) -> Response:
        tags = request.query_params.getlist("tags")
        calls.set_loop(asyncio.get_running_loop())

        def do() -> None:
            _check_tags(tags)
            # LMDeploy would wake nothing if one of them is awake.
            asleep = [tag for tag in tags or TAGS if tag in hooks.asleep]

            async def wake() -> None:
                wakeup(asleep)

            if asleep and WEIGHTS in hooks.asleep and WEIGHTS not in asleep:
                # LMDeploy warms up, and captures graphs, as soon as it has a KV cache.
                raise Refused("the KV cache cannot wake before the weights", hint=WAKE_FIRST)
            if asleep:
                wake_up(engine, hooks, lambda: calls.result(wake(), _SLEEP_S))

        await between_updates(engine, do, refusal)
        return Response(status_code=200)

    async_engine.sleep = guarded_sleep
    routes = [route for route in router.routes if isinstance(route, APIRoute) and route.path == "/wakeup"]
    if not routes:
        raise LMDEPLOY.other_version(["the server has no route /wakeup"])
    checked = [Depends(guard.check_key), *routes[0].dependencies]
    route = APIRoute("/wakeup", guarded_wakeup, methods=["POST"], dependencies=checked)
    router.routes.insert(0, route)  # in front: the first route that matches answers


def _check_tags(tags: Collection[str]) -> None:
    """Raises ``Refused`` for tags that LMDeploy does not know; it would only log them, and wake nothing."""
    unknown = sorted(set(tags) - set(TAGS))
    if unknown:
        raise Refused(f"no memory of LMDeploy is called {', '.join(unknown)}", hint=f"use {' or '.join(TAGS)}")


def admit_own_updates(
    router: APIRouter, engine: SessionHandler, hooks: LmdeployHooks, calls: EngineCalls, folder: str, guard: Guard
) -> None:
    """Wraps the routes that write weights; ``ConfigError`` without one.  They answer 409 during an update of ours.

    Our guard is before them too: LMDeploy's own check can be passed by, and one of them reads pickles.
    """
    routes = [route for route in router.routes if isinstance(route, APIRoute)]
    found = {route.path: route for route in routes if "POST" in (route.methods or ())}
    lacking = [f"the server has no route {path}" for path in _WRITING if path not in found]
    if lacking:
        raise LMDEPLOY.other_version(lacking)
    updates = _OwnUpdates(engine, hooks, calls, folder)
    for path, is_last in _WRITING.items():
        served = updates.told(found[path].endpoint, is_last)
        checked = [Depends(guard.check_key), *found[path].dependencies]
        route = APIRoute(path, served, methods=["POST"], dependencies=checked)
        router.routes.insert(0, route)  # in front: the first route that matches answers


class _OwnUpdates:
    def __init__(self, engine: SessionHandler, hooks: LmdeployHooks, calls: EngineCalls, folder: str) -> None:
        self._engine, self._hooks, self._calls, self._folder = engine, hooks, calls, folder
        self._unfinished = False

    def told(self, endpoint: Callable[..., Any], is_last: Callable[[Any], bool]) -> Callable[..., Any]:
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
