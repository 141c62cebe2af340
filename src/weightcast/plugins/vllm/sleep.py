"""Wraps vLLM's sleep, wake-up and resume in its engine client, since vLLM has no plug-in point for them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from fastapi import HTTPException

from weightcast.plugins.engine_server import SleepGuard
from weightcast.plugins.pause_state import WEIGHTS, PauseState
from weightcast.plugins.vllm.engine_hooks import VllmHooks
from weightcast.plugins.vllm.lora_server import Adapters
from weightcast.plugins.vllm.worker_hooks import RESTORE
from weightcast.receiver.session import SessionHandler

_CACHE = "kv_cache"
_RESTORE_S = 600.0
_DISCARDED = "sleep level 2 discarded the weights: wake them (/wake_up?tags=weights), then make a full update"


def guard_sleep(client: Any, engine: SessionHandler, hooks: VllmHooks, adapters: Adapters) -> None:
    """Wraps a client's ``sleep``, ``wake_up``, ``resume_generation`` and, where it exists, ``release_kv_cache_memory``.

    They answer 409 while an update is under way; resuming does so only where it would end the pause of an update or of
    a quarantine.  An engine whose weights were discarded is quarantined until a full update.  If it wakes before that,
    it stays paused.

    Level 2 drops the adapters that weightcast updates.
    """
    sleep, wake_up, resume = client.sleep, client.wake_up, client.resume_generation
    guard = SleepGuard(engine, hooks, functools.partial(HTTPException, 409), also=adapters.between_updates)

    async def guarded_sleep(level: int = 1, mode: str = "abort") -> Any:
        def do() -> Any:
            answer = hooks.run(sleep(level, mode))
            if level >= 2:
                adapters.discarded()
            return answer

        return await guard.sleep(
            do, tags=(WEIGHTS, _CACHE) if level >= 1 else (), discards=_DISCARDED if level >= 2 else ""
        )

    async def guarded_wake_up(tags: Sequence[str] | None = None) -> Any:
        def do() -> Any:
            # Not in the call below: vLLM takes the answers of other ranks to a call that failed for those to the next.
            failures = hooks.rpc(RESTORE, _RESTORE_S, tags=tags) if hooks.asleep else []
            if any(failures):
                raise HTTPException(503, "; ".join(filter(None, failures)))
            woken = hooks.woken_by(tags)
            if engine.state == "quarantined" and woken == hooks.asleep:
                return hooks.wake_paused(lambda: hooks.run(wake_up(tags)))
            answer = hooks.run(wake_up(tags))
            hooks.woke(woken)
            return answer

        return await guard.wake(do)

    async def guarded_resume() -> None:
        if engine.state == "quarantined":
            raise HTTPException(409, "this engine is quarantined and stays paused: send it a full update")
        if hooks.state not in (PauseState.RUNNING, PauseState.ASLEEP):
            raise HTTPException(409, "this engine is paused for an update, which resumes it")
        await resume()

    client.sleep, client.wake_up, client.resume_generation = guarded_sleep, guarded_wake_up, guarded_resume
    if hasattr(client, "release_kv_cache_memory"):
        release = client.release_kv_cache_memory

        async def guarded_release() -> Any:
            return await guard.sleep(lambda: hooks.run(release()), tags=(_CACHE,))

        client.release_kv_cache_memory = guarded_release
