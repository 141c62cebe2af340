"""The routes under ``/weightcast`` in LMDeploy's API server, and the session that they drive."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from fastapi import APIRouter, Depends, HTTPException
from fastapi.routing import APIRoute

from weightcast.comm.ipc import host_id
from weightcast.errors import Refused
from weightcast.plugins.lmdeploy.engine_calls import EngineCalls
from weightcast.plugins.lmdeploy.engine_hooks import LmdeployHooks
from weightcast.plugins.lmdeploy.executor import LmdeployExecutor
from weightcast.plugins.lmdeploy.hook_points import other_version, version
from weightcast.plugins.rank_sockets import notes_of, tables_of
from weightcast.plugins.server_events import server_events
from weightcast.receiver.engine_state import EngineFacts
from weightcast.receiver.server import weight_routes
from weightcast.receiver.session import SessionHandler

log = logging.getLogger("weightcast.plugins.lmdeploy")

_FIRST_VERSION = 0  # of the weights that LMDeploy was started with
_SLEEP_S = 600.0
# LMDeploy's own updates would change weights that our sessions have proven and numbered.
_REPLACED = (
    "/update_weights",
    "/update_weights_from_ipc",
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/destroy_weights_update_group",
)


def add_routes(router: APIRouter, async_engine: Any, folder: str) -> None:
    """Connects to the ranks and adds our routes; LMDeploy's key check covers every route of its server.

    Args:
        router: LMDeploy's own.
        async_engine: LMDeploy's ``AsyncEngine``, ready.
        folder: Folder of the ranks' sockets.

    Raises:
        ConfigError: Our hooks in the engine process did not take.
        EngineFailure: A rank does not listen.
    """
    config = async_engine.backend_config
    try:
        ready = async_engine.engine._collective_rpc("weightcast_ready")
    except Exception as error:  # LMDeploy's errors have no common class
        raise other_version([f"our methods in the engine process cannot be called ({error})"]) from error
    if not ready:
        raise other_version(["the hook on EngineLoop did not take"])
    calls = EngineCalls(async_engine.engine)
    hooks = LmdeployHooks(async_engine, calls)
    executor = LmdeployExecutor(int(config.tp), folder, calls, prefix_caching=bool(config.enable_prefix_caching))
    specs, optional = tables_of(executor.hellos)
    notes = notes_of(executor.hellos, optional)
    for note in notes:
        log.info("%s", note)
    facts = EngineFacts(
        engine=f"lmdeploy {version()}",
        model=str(async_engine.model_name),
        host_id=host_id(),
        ranks=executor.rank_infos(),
        staging=executor.staging(),
        staging_bytes=max(hello.staging_bytes for hello in executor.hellos),
        transports=("ipc", "broadcast"),
        specs=specs,
        optional=optional,
        note="; ".join(notes),
    )
    events = server_events(facts.model, version=_FIRST_VERSION, metrics=bool(config.enable_metrics))
    engine = SessionHandler(executor, hooks, facts, version=_FIRST_VERSION, events=events)
    _guard_sleep(async_engine, engine, calls)

    async def note_loop() -> None:
        calls.set_loop(asyncio.get_running_loop())

    router.include_router(weight_routes(engine), dependencies=[Depends(note_loop)])

    async def refuse() -> None:
        raise HTTPException(409, "this server is updated through /weightcast (it was started by weightcast's launcher)")

    for path in _REPLACED:
        # In front: the first route that matches answers.
        router.routes.insert(0, APIRoute(path, refuse, methods=["GET", "POST"], include_in_schema=False))


def _guard_sleep(async_engine: Any, engine: SessionHandler, calls: EngineCalls) -> None:
    """Keeps sleep and updates apart, and refuses the level of sleep that drops the model."""
    fall_asleep = async_engine.sleep

    async def sleep(level: int = 1) -> None:
        if level != 1:
            raise HTTPException(
                409, "sleep level 2 makes a new model, which weightcast's receiver does not know: use level 1"
            )
        calls.set_loop(asyncio.get_running_loop())

        def alone() -> None:
            with engine.between_updates():
                calls.result(fall_asleep(level), _SLEEP_S)

        try:
            await asyncio.to_thread(alone)
        except Refused as error:
            raise HTTPException(409, f"{error} ({error.hint})" if error.hint else str(error)) from error

    async_engine.sleep = sleep
