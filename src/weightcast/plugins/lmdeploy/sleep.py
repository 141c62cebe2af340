"""LMDeploy's sleep and wake-up in its API server (``POST /sleep``, ``POST /wakeup``), kept apart from updates."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Collection
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.routing import APIRoute

from weightcast.errors import Refused
from weightcast.plugins.lmdeploy.engine_calls import EngineCalls
from weightcast.plugins.lmdeploy.engine_hooks import LmdeployHooks
from weightcast.plugins.lmdeploy.hook_points import LMDEPLOY
from weightcast.plugins.lmdeploy.sleeping_weights import TAGS, WAKE_FIRST, WEIGHTS
from weightcast.plugins.sleeping import between_updates, fall_asleep, wake_up
from weightcast.receiver.session import SessionHandler

_SLEEP_S = 600.0
_DISCARDED = (
    "sleep level 2 discarded the weights: wake them (POST /wakeup?tags=weights), then make a full update, or use "
    "level 1"
)


def guard_sleep(
    router: APIRouter,
    async_engine: Any,
    engine: SessionHandler,
    hooks: LmdeployHooks,
    calls: EngineCalls,
    *,
    never: str = "",
) -> None:
    """Wraps an engine's ``sleep`` and replaces the route of its wake-up, which LMDeploy calls without waiting.

    Both answer 409 while an update is under way.  Requests that run end with reason ``abort``.

    Args:
        router: LMDeploy's own.
        async_engine: LMDeploy's ``AsyncEngine``.
        engine: Session that knows whether an update is under way.
        hooks: Hooks that hold requests back.
        calls: Runs coroutines on the server's event loop.
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
    route = APIRoute("/wakeup", guarded_wakeup, methods=["POST"], dependencies=routes[0].dependencies)
    router.routes.insert(0, route)  # in front: the first route that matches answers


def _check_tags(tags: Collection[str]) -> None:
    """Refuses tags that LMDeploy does not know; it would only log them, and wake nothing.

    Raises:
        Refused: There is such a tag.
    """
    unknown = sorted(set(tags) - set(TAGS))
    if unknown:
        raise Refused(f"no memory of LMDeploy is called {', '.join(unknown)}", hint=f"use {' or '.join(TAGS)}")
