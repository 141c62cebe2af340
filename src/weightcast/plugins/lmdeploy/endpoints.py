"""The routes under ``/weightcast`` in LMDeploy's API server, and the session that they drive."""

from __future__ import annotations

import functools
import logging
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from fastapi import APIRouter, HTTPException

from weightcast.plugins.drafts import draft_setting, keeps_draft
from weightcast.plugins.engine_server import EngineServer, SleepGuard
from weightcast.plugins.hook_points import LMDEPLOY
from weightcast.plugins.lmdeploy.engine_hooks import LmdeployExecutor, LmdeployHooks
from weightcast.plugins.lmdeploy.folder import failure_words
from weightcast.plugins.lmdeploy.own_routes import admit_own_updates, guard_sleep
from weightcast.plugins.rank_sockets import engine_facts
from weightcast.receiver.session import SessionHandler

log = logging.getLogger("weightcast.plugins.lmdeploy")

# With prefix caching.
_NO_IN_PLACE = (
    "requests that go on with pause in_place would leave prefixes of the old weights to others (use pause retract, or "
    "start LMDeploy without --enable-prefix-caching)"
)


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
    hooks = LmdeployHooks(async_engine)
    executor = LmdeployExecutor(int(config.tp), folder, hooks)
    facts = engine_facts(
        executor,
        engine=f"lmdeploy {LMDEPLOY.version()}",
        model=str(async_engine.model_name),
        # No ``direct``: LMDeploy keeps a float32 checkpoint's head in float32 and the rest in float16, and shares are
        # only read in the dtype that the trainer has.
        transports=("ipc", "broadcast"),
        no_pause={"in_place": _NO_IN_PLACE} if config.enable_prefix_caching else {},
        hazards=(keeps_draft("LMDeploy"),) if async_engine.speculative_config and not draft_setting() else (),
    )
    server = EngineServer("LMDeploy", keys=keys)
    sessions = server.start(executor, hooks, facts, metrics=bool(config.enable_metrics))
    guard = SleepGuard(sessions, hooks, functools.partial(HTTPException, 409))
    guard_sleep(router, async_engine, guard, hooks, server.guard)
    admit_own_updates(router, sessions, guard, hooks, folder, server.guard)

    process = getattr(async_engine.engine, "proc", None)
    if process is not None:
        threading.Thread(
            target=_watch_engine, args=(process, folder, executor, sessions), name="weightcast-engine", daemon=True
        ).start()

    for routes in server.routers:
        router.include_router(routes)


def _watch_engine(process: Any, folder: str, executor: LmdeployExecutor, engine: SessionHandler) -> None:
    """Quarantines the engine when LMDeploy's engine process ends, unless LMDeploy has asked for it."""
    wait([process.sentinel])
    process.join()
    words, code = failure_words(folder), process.exitcode
    if not words and code in (0, -signal.SIGTERM):
        return
    engine.ranks_lost(executor.engine_lost(words or f"the engine process (pid {process.pid}) ended with {code}"))
