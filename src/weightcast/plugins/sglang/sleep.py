"""SGLang's sleep (``/release_memory_occupation``) and wake-up, kept apart from updates and from requests.

SGLang ends itself if it is put to sleep while requests run, or woken by a tag that is awake, and it would answer with
whatever is in memory that came back empty.  SGLang has no plug-in point in its API server for these, so this module
wraps methods of its tokenizer manager.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from weightcast.plugins.api_server import between_updates, fall_asleep, refuse, wake_up
from weightcast.plugins.sglang.engine_hooks import SglangHooks
from weightcast.receiver.session import SessionHandler

WEIGHTS = "weights"
TAGS = ("kv_cache", WEIGHTS, "cuda_graph")  # SGLang's own, all of which an empty list means
WAKE_FIRST = (
    "POST /resume_memory_occupation with tags [weights], then update; tags [kv_cache, cuda_graph] can come last"
)
_DISCARDED = (
    "sleep discarded the weights: wake them (/resume_memory_occupation with tags [weights]), then make a full update, "
    "or start SGLang with --enable-weights-cpu-backup"
)


def tags_of(request: Any) -> frozenset[str]:
    """The memory that a request to sleep or to wake up names; all of it if it names none."""
    return frozenset(request.tags or TAGS)


def loses_weights(server_args: Any) -> bool:
    """Returns whether weights that sleep come back with other contents."""
    saves, keeps = "enable_memory_saver", "enable_weights_cpu_backup"
    return bool(getattr(server_args, saves, False)) and not getattr(server_args, keeps, False)


def guard_sleep(manager: Any, engine: SessionHandler, hooks: SglangHooks, *, loses: bool) -> None:
    """Wraps a manager's ``release_memory_occupation`` and ``resume_memory_occupation``.

    They are refused, with 400, while an update is under way, while requests run, and for memory that sleeps already or
    is awake.  New requests wait until all memory is back and the weights are known.

    Args:
        loses: True if weights that sleep come back with other contents.
    """
    release, resume = manager.release_memory_occupation, manager.resume_memory_occupation

    async def alone(do: Callable[[Callable[[Awaitable[Any]], Any]], None]) -> None:
        loop = asyncio.get_running_loop()
        hooks.set_loop(loop)

        async def awaited(work: Awaitable[Any]) -> Any:
            return await work

        def call(work: Awaitable[Any]) -> Any:
            return asyncio.run_coroutine_threadsafe(awaited(work), loop).result()

        await between_updates(engine, lambda: do(call), ValueError)

    async def guarded_release(obj: Any, request: Any = None) -> None:
        def do(call: Callable[[Awaitable[Any]], Any]) -> None:
            tags = tags_of(obj)

            def sleep() -> None:
                call(release(obj, request))
                hooks.fell_asleep(tags)

            fall_asleep(engine, hooks, tags, sleep, discarded=_DISCARDED if loses and WEIGHTS in tags else "")

        await alone(do)

    async def guarded_resume(obj: Any, request: Any = None) -> None:
        def do(call: Callable[[Awaitable[Any]], Any]) -> None:
            tags = tags_of(obj) if obj.tags else hooks.asleep
            refuse(tags - hooks.asleep, "is awake")
            obj.tags = sorted(tags)

            def wake() -> None:
                if tags:
                    call(resume(obj, request))
                hooks.woke(tags)

            wake_up(engine, hooks, wake)

        await alone(do)

    manager.release_memory_occupation, manager.resume_memory_occupation = guarded_release, guarded_resume
