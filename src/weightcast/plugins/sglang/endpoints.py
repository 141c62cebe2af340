"""Our routes in SGLang's API server, and the guards around its own sleep and its own updates."""

# SGLang is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import logging
import os
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.routing import APIRoute

from weightcast.config import PauseMode
from weightcast.plugins.drafts import keeps_draft
from weightcast.plugins.engine_server import EngineServer, SleepGuard, refuse
from weightcast.plugins.hook_points import SGLANG
from weightcast.plugins.pause_state import WEIGHTS
from weightcast.plugins.rank_sockets import SwitchExecutor, engine_facts, transports_of
from weightcast.plugins.sglang import FOLDER
from weightcast.plugins.sglang.engine_hooks import SglangHooks
from weightcast.plugins.sglang.settings import (
    check_settings,
    has_draft,
    loses_weights,
    ranks_of,
    resolved,
    tags_of,
    updates_draft,
)
from weightcast.receiver.api_keys import warn_if_open
from weightcast.receiver.session import SessionHandler

log = logging.getLogger("weightcast.plugins.sglang")

ROUTES = (
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
    "/begin_weight_update",
    "/end_weight_update",
    "/update_weight_version",
)
_OURS = "/weightcast/"
_INSTEAD = "this server is updated through /weightcast (SGLANG_PLUGINS names weightcast)"
_DISCARDED = (
    "sleep discarded the weights: wake them (/resume_memory_occupation with tags [weights]), then make a full update, "
    "or start SGLang with --enable-weights-cpu-backup"
)
_READS = ("checksum", "snapshot", "compare")


def before_loading(*arguments: Any, **named: Any) -> None:
    """Before ``Engine._launch_subprocesses``: refuses settings before a model is loaded.

    Where the plug-in is loaded within that function, ``before_serving`` and the ranks refuse them.
    """
    check_settings(named["server_args"] if "server_args" in named else arguments[1])


def before_serving(server_args: Any, tokenizer_manager: Any, *arguments: Any, **named: Any) -> None:
    """Before ``_setup_and_run_http_server``: all ranks are ready, and SGLang has not added its key check yet."""
    from sglang.srt.entrypoints.http_server import app

    check_settings(server_args)
    settings = resolved(server_args)
    executor = SwitchExecutor(ranks_of(server_args), os.environ[FOLDER])
    hooks = SglangHooks(tokenizer_manager)
    several = settings.dp_size > 1
    facts = engine_facts(
        executor,
        notes=[f"{settings.dp_size} data-parallel engines, updated together"] if several else (),
        engine=f"sglang {SGLANG.version()}",
        model=settings.served_model_name or settings.model_path,
        transports=transports_of(executor.hellos),
        no_pause=_no_pause(server_args),
        hazards=(keeps_draft("SGLang"),) if has_draft(server_args) and not updates_draft(server_args) else (),
    )
    keys = keys_of(settings)
    server = EngineServer("SGLang", keys=keys)
    sessions = server.start(executor, hooks, facts, metrics=bool(settings.enable_metrics))
    guard_sleep(tokenizer_manager, sessions, hooks, loses=loses_weights(settings))
    warn_if_open(keys, host=settings.host, port=settings.port, option="--admin-api-key or --api-key")
    add_routes(app, server)
    close_other_updates(app, tokenizer_manager)
    check_levels(app)


def _no_pause(server_args: Any) -> dict[PauseMode, str]:
    """Pause modes that SGLang as it was started cannot have, each with the reason."""
    settings = resolved(server_args)
    if (getattr(settings, "pp_size", None) or 1) > 1:
        why = "with pipeline parallelism it would leave requests of another stage with their old KV cache"
        return dict.fromkeys(("abort", "retract", "wait"), f'{why}; use pause="in_place"')
    if not has_draft(server_args) or settings.disable_overlap_schedule:
        return {}
    return {
        "in_place": "a step with a draft model makes several tokens, and with its overlap loop SGLang would stamp some "
        "with the wrong version; start SGLang with --disable-overlap-schedule, or use another pause mode"
    }


def keys_of(settings: Any) -> list[str]:
    """The key that SGLang's own update routes need: the admin key if there is one, else the API key, if any."""
    key = settings.admin_api_key or settings.api_key
    return [key] if key else []


def add_routes(app: FastAPI, server: EngineServer) -> None:
    """Adds our routes, with the rules for keys that SGLang's own update routes have.

    The routes themselves, not their routers: since FastAPI 0.137 an included router is one entry without an endpoint,
    in which SGLang finds no level of access.
    """
    for route in (route for router in server.routers for route in router.routes):
        assert isinstance(route, APIRoute)
        app.router.routes.append(_for_admins(route))


def _for_admins(route: APIRoute) -> APIRoute:
    """Marks a route for SGLang's own check of keys, which is before ours."""
    from sglang.srt.utils.auth import AuthLevel

    route.endpoint._auth_level = AuthLevel.ADMIN_OPTIONAL  # type: ignore[attr-defined]
    return route


def check_levels(app: FastAPI) -> None:
    """Raises ``ConfigError`` unless SGLang asks for the admin key where weights are at stake."""
    from sglang.srt.utils.auth import AuthLevel, _get_auth_level_from_app_and_scope

    wrong: list[str] = []
    routes = [route for route in app.router.routes if isinstance(route, APIRoute)]
    for route in routes:
        if not route.path.startswith(_OURS) and route.path not in ROUTES:
            continue
        for method in sorted(route.methods or ()):
            scope = {"type": "http", "method": method, "path": route.path, "root_path": "", "headers": []}
            level = _get_auth_level_from_app_and_scope(app, scope)
            if level is not AuthLevel.ADMIN_OPTIONAL:
                wrong.append(f"{method} {route.path} has SGLang's level of access {level!r}")
    found = {route.path for route in routes}
    wrong += [f"the server has no route {path}" for path in (f"{_OURS}apply", *ROUTES) if path not in found]
    if wrong:
        raise SGLANG.other_version(wrong)


def close_other_updates(app: FastAPI, manager: Any) -> None:
    """Closes ways to other weights than those that our sessions have proven and stamped.

    SGLang's update routes, and the part of its weight checker that overwrites weights, answer 409.
    """

    async def refuse() -> None:
        raise HTTPException(409, _INSTEAD)

    for path in ROUTES:
        route = APIRoute(path, refuse, methods=["GET", "POST"], include_in_schema=False)
        app.router.routes.insert(0, _for_admins(route))  # in front: the first route that matches answers
    check = manager.check_weights

    async def check_weights(obj: Any, *arguments: Any, **named: Any) -> Any:
        if obj.action not in _READS:
            raise HTTPException(409, f"{obj.action} would overwrite weights: {_INSTEAD}")
        return await check(obj, *arguments, **named)

    manager.check_weights = check_weights


def guard_sleep(manager: Any, engine: SessionHandler, hooks: SglangHooks, *, loses: bool) -> None:
    """Wraps a manager's ``release_memory_occupation`` and ``resume_memory_occupation``.

    They are refused, with 400, while an update is under way, while requests run, and for memory that sleeps already or
    is awake.

    Args:
        loses: True if weights that sleep come back with other contents.
    """
    release, resume = manager.release_memory_occupation, manager.resume_memory_occupation
    guard = SleepGuard(engine, hooks, ValueError)

    async def guarded_release(obj: Any, request: Any = None) -> None:
        tags = tags_of(obj)
        discards = _DISCARDED if loses and WEIGHTS in tags else ""
        await guard.sleep(lambda: hooks.run(release(obj, request)), tags=tags, awake=tags, discards=discards)

    async def guarded_resume(obj: Any, request: Any = None) -> None:
        def do() -> None:
            tags = tags_of(obj) if obj.tags else hooks.asleep
            refuse(tags - hooks.asleep, "is awake")
            obj.tags = sorted(tags)
            if tags:
                hooks.run(resume(obj, request))
            hooks.woke(tags)

        await guard.wake(do)

    manager.release_memory_occupation, manager.resume_memory_occupation = guarded_release, guarded_resume
