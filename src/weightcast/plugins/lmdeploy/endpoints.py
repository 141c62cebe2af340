"""The routes under ``/weightcast`` in LMDeploy's API server, and the session that they drive."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from fastapi import APIRouter

from weightcast.plugins.api_server import SleepingSessions, server_watchers
from weightcast.plugins.drafts import draft_setting, keeps_draft
from weightcast.plugins.lmdeploy.engine_hooks import NO_IN_PLACE, EngineCalls, LmdeployExecutor, LmdeployHooks
from weightcast.plugins.lmdeploy.folder import failure_words
from weightcast.plugins.lmdeploy.hook_points import LMDEPLOY, mp_executor
from weightcast.plugins.lmdeploy.mp_executor import NO_ANSWERS
from weightcast.plugins.lmdeploy.own_routes import admit_own_updates, guard_sleep
from weightcast.plugins.rank_sockets import engine_facts
from weightcast.receiver.api_keys import Guard
from weightcast.receiver.peer_routes import peer_routes
from weightcast.receiver.server import weight_routes

log = logging.getLogger("weightcast.plugins.lmdeploy")

_FIRST_VERSION = 0  # of the weights that LMDeploy was started with


def add_routes(router: APIRouter, async_engine: Any, folder: str, keys: Sequence[str]) -> None:
    """Connects to the ranks and adds our routes.

    Args:
        async_engine: LMDeploy's ``AsyncEngine``, ready.
        keys: LMDeploy's API keys.  Its own check of them is not enough (see ``Guard``).

    Raises:
        ConfigError: Our hooks in the engine process did not take.
        EngineFailure: A rank does not listen.
    """
    config = async_engine.backend_config
    try:
        ready = async_engine.engine._collective_rpc("weightcast_ready")
    except Exception as error:  # LMDeploy's errors have no common class
        raise LMDEPLOY.other_version([f"our methods in the engine process cannot be called ({error})"]) from error
    if not ready:
        raise LMDEPLOY.other_version(["the hook on EngineLoop did not take"])
    calls = EngineCalls(async_engine.engine)
    hooks = LmdeployHooks(async_engine, calls)
    executor = LmdeployExecutor(int(config.tp), folder, calls, prefix_caching=bool(config.enable_prefix_caching))
    facts = engine_facts(
        executor,
        engine=f"lmdeploy {LMDEPLOY.version()}",
        model=str(async_engine.model_name),
        # No ``direct``: LMDeploy keeps a float32 checkpoint's head in float32 and the rest in float16, and shares are
        # only read in the dtype that the trainer has.
        transports=("ipc", "broadcast"),
        no_pause={"in_place": NO_IN_PLACE} if config.enable_prefix_caching else {},
        hazards=(keeps_draft("LMDeploy"),) if async_engine.speculative_config and not draft_setting() else (),
    )
    watchers = server_watchers(facts.model, version=_FIRST_VERSION, metrics=bool(config.enable_metrics))
    engine = SleepingSessions(executor, hooks, facts, version=_FIRST_VERSION, watchers=watchers)
    cannot_wake = f"no sleep: {NO_ANSWERS}, so it could not wake up" if mp_executor(config) else ""

    def note_loop() -> None:
        calls.set_loop(asyncio.get_running_loop())

    guard = Guard(keys, admitted=note_loop)
    guard_sleep(router, async_engine, engine, hooks, calls, guard, never=cannot_wake)
    admit_own_updates(router, engine, hooks, calls, folder, guard)

    process = getattr(async_engine.engine, "proc", None)
    if process is not None:
        threading.Thread(
            target=_watch_engine, args=(process, folder, executor, engine), name="weightcast-engine", daemon=True
        ).start()

    for routes in (weight_routes(engine, guard=guard), peer_routes(lambda: engine, guard=guard)):
        router.include_router(routes)


def _watch_engine(process: Any, folder: str, executor: LmdeployExecutor, engine: SleepingSessions) -> None:
    """Quarantines the engine when LMDeploy's engine process ends, unless LMDeploy has asked for it."""
    wait([process.sentinel])
    process.join()
    words, code = failure_words(folder), process.exitcode
    if not words and code in (0, -signal.SIGTERM):
        return
    engine.ranks_lost(executor.engine_lost(words or f"the engine process (pid {process.pid}) ended with {code}"))
