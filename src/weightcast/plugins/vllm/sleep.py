"""Keeps vLLM's sleep, wake-up and resume apart from updates, and an engine without proven weights from serving.

vLLM has no plug-in point here, so this module wraps methods of its engine client in the API server.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import HTTPException

from weightcast.plugins.api_server import between_updates
from weightcast.plugins.vllm.engine_hooks import SLEEP_TAGS, VllmHooks
from weightcast.plugins.vllm.lora_server import Adapters
from weightcast.plugins.vllm.worker_hooks import RESTORE
from weightcast.receiver.session import SessionHandler

_RESTORE_S = 600.0
_DISCARDED = "sleep level 2 discarded the weights: wake them (/wake_up?tags=weights), then make a full update"


def guard_sleep(
    client: Any, loop: asyncio.AbstractEventLoop, engine: SessionHandler, hooks: VllmHooks, adapters: Adapters
) -> None:
    """Wraps a client's ``sleep``, ``wake_up``, ``resume_generation`` and, where it exists, ``release_kv_cache_memory``.

    They answer 409 while an update is under way; resuming does so only where it would end the pause of an update or of
    a quarantine.  An engine whose weights were discarded is quarantined until a full update.  If it wakes before that,
    it stays paused.

    Level 2 drops the adapters that weightcast updates.
    """
    sleep, wake_up = client.sleep, client.wake_up
    release = getattr(client, "release_kv_cache_memory", None)

    def call(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    async def alone(do: Callable[[], Any]) -> Any:
        def locked() -> Any:
            with adapters.between_updates():
                return do()

        return await between_updates(engine, locked, functools.partial(HTTPException, 409))

    async def guarded_sleep(level: int = 1, mode: str = "abort") -> Any:
        def do() -> Any:
            if level >= 2 and "weights" not in hooks.asleep:
                engine.discarded(_DISCARDED)  # before the call, which may fail half way
            answer = call(sleep(level, mode))
            if level >= 1:
                hooks.fell_asleep()
            if level >= 2:
                adapters.discarded()
            return answer

        return await alone(do)

    async def guarded_wake_up(tags: Sequence[str] | None = None) -> Any:
        def do() -> Any:
            # Not in the call below: vLLM takes the answers of other ranks to a call that failed for those to the next.
            failures = hooks.rpc(RESTORE, _RESTORE_S, tags=tags) if hooks.asleep else []
            if any(failures):
                raise HTTPException(503, "; ".join(filter(None, failures)))
            if engine.state == "quarantined" and not hooks.still_asleep(tags):
                return hooks.wake_paused(tags, lambda: call(wake_up(tags)))
            answer = call(wake_up(tags))
            hooks.woke(tags)
            return answer

        return await alone(do)

    resume = client.resume_generation

    async def guarded_resume() -> None:
        if engine.state == "quarantined":
            raise HTTPException(409, "this engine is quarantined and stays paused: send it a full update")
        if hooks.paused and not hooks.asleep:
            raise HTTPException(409, "this engine is paused for an update, which resumes it")
        await resume()

    client.sleep, client.wake_up, client.resume_generation = guarded_sleep, guarded_wake_up, guarded_resume
    if release is None:
        return

    async def guarded_release() -> Any:
        def do() -> Any:
            answer = call(release())
            hooks.fell_asleep(SLEEP_TAGS[1:])
            return answer

        return await alone(do)

    client.release_kv_cache_memory = guarded_release
