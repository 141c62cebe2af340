"""LMDeploy's own routes on a server with our receiver: sleep, wake-up and its updates, kept apart from ours.

A trainer that speaks LMDeploy's own protocol finds the server that it knows.  It writes into the weights that serve,
with no proof and no version.  So while such an update is not finished the engine counts as quarantined, and afterwards
it serves an unknown version.
"""

# LMDeploy is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.routing import APIRoute

from weightcast.errors import Refused
from weightcast.plugins.engine_server import SleepGuard
from weightcast.plugins.hook_points import LMDEPLOY
from weightcast.plugins.lmdeploy.engine_hooks import LmdeployHooks
from weightcast.plugins.lmdeploy.folder import take_written
from weightcast.plugins.lmdeploy.mp_executor import NO_ANSWERS
from weightcast.plugins.lmdeploy.settings import mp_executor
from weightcast.plugins.lmdeploy.sleeping_weights import TAGS, WAKE_FIRST
from weightcast.plugins.pause_state import WEIGHTS
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


def guard_sleep(router: APIRouter, async_engine: Any, guard: SleepGuard, hooks: LmdeployHooks, keys: Guard) -> None:
    """Wraps an engine's ``sleep`` and replaces the route of its wake-up, which LMDeploy calls without waiting.

    Both answer 409 while an update is under way.  Requests that run end with reason ``abort``.

    Raises:
        ConfigError: This LMDeploy has no route for the wake-up.
    """
    sleep, wakeup = async_engine.sleep, async_engine.wakeup
    cannot_wake = mp_executor(async_engine.backend_config)

    async def guarded_sleep(level: int = 1) -> None:
        if cannot_wake:
            words = f"no sleep: {NO_ANSWERS}, so it could not wake up (use --distributed-executor-backend ray)"
            raise HTTPException(409, words)
        # LMDeploy takes a second sleep while only the KV cache sleeps.
        await guard.sleep(
            lambda: hooks.result(sleep(level), _SLEEP_S), awake=(WEIGHTS,), discards=_DISCARDED if level >= 2 else ""
        )

    async def guarded_wakeup(request: Request) -> Response:
        tags = request.query_params.getlist("tags")

        def do() -> None:
            unknown = sorted(set(tags) - set(TAGS))
            if unknown:  # LMDeploy would only log them, and wake nothing
                raise Refused(f"no memory of LMDeploy is called {', '.join(unknown)}", hint=f"use {' or '.join(TAGS)}")
            # LMDeploy would wake nothing if one of them is awake.
            asleep = [tag for tag in tags or TAGS if tag in hooks.asleep]

            async def wake() -> None:
                wakeup(asleep)

            if asleep and WEIGHTS in hooks.asleep and WEIGHTS not in asleep:
                # LMDeploy warms up, and captures graphs, as soon as it has a KV cache.
                raise Refused("the KV cache cannot wake before the weights", hint=WAKE_FIRST)
            if asleep:
                hooks.result(wake(), _SLEEP_S)

        await guard.wake(do)
        return Response(status_code=200)

    async_engine.sleep = guarded_sleep
    found = _posts(router, ["/wakeup"])["/wakeup"]
    _put_in_front(router, found, guarded_wakeup, keys)


def _posts(router: APIRouter, paths: Collection[str]) -> dict[str, APIRoute]:
    """LMDeploy's own routes to POST to; ``ConfigError`` names those that are missing."""
    routes = [route for route in router.routes if isinstance(route, APIRoute)]
    found = {route.path: route for route in routes if "POST" in (route.methods or ())}
    lacking = [f"the server has no route {path}" for path in paths if path not in found]
    if lacking:
        raise LMDEPLOY.other_version(lacking)
    return found


def _put_in_front(router: APIRouter, route: APIRoute, endpoint: Callable[..., Any], keys: Guard) -> None:
    """Has a route answered by ours, behind our check of keys too: LMDeploy's own can be passed by."""
    checked = [Depends(keys.check_key), *route.dependencies]
    # The first route that matches answers.
    router.routes.insert(0, APIRoute(route.path, endpoint, methods=["POST"], dependencies=checked))


def admit_own_updates(
    router: APIRouter, engine: SessionHandler, guard: SleepGuard, hooks: LmdeployHooks, folder: str, keys: Guard
) -> None:
    """Wraps the routes that write weights; ``ConfigError`` without one.  They answer 409 during an update of ours."""
    found = _posts(router, _WRITING)
    updates = _OwnUpdates(engine, guard, hooks, folder)
    for path, is_last in _WRITING.items():
        _put_in_front(router, found[path], updates.told(found[path].endpoint, is_last), keys)


class _OwnUpdates:
    def __init__(self, engine: SessionHandler, guard: SleepGuard, hooks: LmdeployHooks, folder: str) -> None:
        self._engine, self._guard, self._hooks, self._folder = engine, guard, hooks, folder
        self._unfinished = False

    def told(self, endpoint: Callable[..., Any], is_last: Callable[[Any], bool]) -> Callable[..., Any]:
        @functools.wraps(endpoint)
        async def served(request: Any, raw_request: Any = None) -> Response:
            def do() -> Response:
                try:
                    answer = endpoint(request, raw_request)
                    if inspect.isawaitable(answer):
                        answer = self._hooks.result(answer, _UPDATE_S)
                finally:
                    self._look()
                if is_last(request) and answer.status_code == 200:
                    self._end()
                return answer

            return await self._guard.alone(do)

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
