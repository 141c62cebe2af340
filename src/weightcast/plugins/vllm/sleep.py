"""Keeps vLLM's sleep and wake-up apart from updates, and keeps an engine with discarded weights from serving.

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
from weightcast.receiver.session import SessionHandler

_PAUSE_S = 30.0
_LOOK_S = 0.005
_DISCARDED = "sleep level 2 discarded the weights: wake them (/wake_up?tags=weights), then make a full update"


class RequestGate:
    """Holds requests back in the API server while it is closed.  Its methods run on the server's event loop."""

    def __init__(self, client: Any) -> None:
        """Wraps the client's ``add_request``, which sends a request to the engine core."""
        self._add_request = client.add_request
        self._opened = asyncio.Event()
        self._opened.set()
        self._entering = 0
        client.add_request = self._enter

    async def close(self) -> None:
        """Lets no request in from now on; returns when those that are on their way have been sent."""
        self._opened.clear()
        while self._entering:
            await asyncio.sleep(_LOOK_S)

    def open(self) -> None:
        """Lets the requests in that wait."""
        self._opened.set()

    async def _enter(self, *arguments: Any, **named: Any) -> Any:
        await self._opened.wait()
        self._entering += 1
        try:
            return await self._add_request(*arguments, **named)
        finally:
            self._entering -= 1


def guard_sleep(
    client: Any, loop: asyncio.AbstractEventLoop, engine: SessionHandler, hooks: VllmHooks, adapters: Adapters
) -> None:
    """Wraps a client's ``sleep``, ``wake_up`` and, where it exists, ``release_kv_cache_memory``.

    They answer 409 while an update is under way.  An engine whose weights were discarded is quarantined until a full
    update.  If it wakes before that, it is paused.

    Level 2 drops the adapters that weightcast updates.
    """
    gate = RequestGate(client)
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
            # vLLM resumes by itself when the last of its memory is back.
            unproven = engine.state == "quarantined" and not hooks.still_asleep(tags)
            if not unproven:
                answer = call(wake_up(tags))
                hooks.woke(tags)
                return answer
            # Without weights vLLM would answer requests that wait, and those that come before it is paused again.
            call(gate.close())
            try:
                hooks.pause_anyway("abort", _PAUSE_S)
                answer = call(wake_up(tags))
                hooks.woke(tags)
                hooks.pause_anyway("abort", _PAUSE_S)
            finally:
                loop.call_soon_threadsafe(gate.open)
            return answer

        return await alone(do)

    client.sleep, client.wake_up = guarded_sleep, guarded_wake_up
    if release is None:
        return

    async def guarded_release() -> Any:
        def do() -> Any:
            answer = call(release())
            hooks.fell_asleep(SLEEP_TAGS[1:])
            return answer

        return await alone(do)

    client.release_kv_cache_memory = guarded_release
