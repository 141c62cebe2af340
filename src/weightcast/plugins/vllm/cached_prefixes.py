"""vLLM's prefix cache after a switch that keeps the KV cache: nobody finds there what other weights computed.

vLLM names a block of its KV cache by a hash of its tokens, of all tokens before it, and of the request's cache salt.
A switch in place begins a new *generation* of the cache, and a request looks blocks up by a salt with the generation
in it.  So it finds blocks of the present generation alone, and these come only from requests that were computed from
their first token with the present weights:

- A request that runs keeps its blocks and their names, which no lookup asks for any more.
- A request that waits, or that vLLM preempts later, gets its new names when the scheduler looks for its prefix.

The user's own salt stays a part of the name.  The generation comes first in it, so no user's salt can look like ours.
Before the first such switch, requests without a salt have the names that vLLM itself gives them.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

# Name of the method for ``call_utility_async``.
NEXT_GENERATION = "weightcast_next_generation"

_MANAGER = ("vllm.v1.core.kv_cache_manager", "KVCacheManager")
_GENERATION = "weightcast_generation"  # of a KV cache manager
_SALT = "weightcast_salt"  # of a request: the generation of its names, and the user's own salt
_WRAPPED = "_weightcast_generations"  # of our ``get_computed_blocks``; a class with another one has no such mark


def install(core_class: Any) -> None:
    """Adds generations to the engine core's class and its KV cache manager's; does nothing if one is not as we know it.

    Safe to call twice.
    """
    try:
        manager_class: Any = getattr(importlib.import_module(_MANAGER[0]), _MANAGER[1], None)
    except ImportError:
        manager_class = None
    add = getattr(core_class, "preprocess_add_request", None)
    look_up = getattr(manager_class, "get_computed_blocks", None)
    if add is not None and look_up is not None and not hasattr(look_up, _WRAPPED):
        core_class.preprocess_add_request = _adding(add)
        manager_class.get_computed_blocks = _looking_up(look_up)
    setattr(core_class, NEXT_GENERATION, next_generation)


def next_generation(core: Any, begin: bool = True) -> bool:
    """Begins the next generation of an engine core's prefix cache; called between two steps.

    Args:
        begin: False asks only whether it can.

    Returns:
        False if this version of vLLM has another prefix cache, which then knows no generations.
    """
    manager = getattr(core.scheduler, "kv_cache_manager", None)
    if not _knows(manager):
        return False
    if begin:
        setattr(manager, _GENERATION, _generation(manager) + 1)
    return True


def _knows(manager: Any) -> bool:
    return hasattr(getattr(type(manager), "get_computed_blocks", None), _WRAPPED)


def _generation(manager: Any) -> int:
    return getattr(manager, _GENERATION, 0)


def _salted(salt: str | None, generation: int) -> str | None:
    return f"{generation}|{salt or ''}" if generation or salt else None


def _adding(add: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM hashes a request's tokens as it makes the request, on a thread beside the scheduler's."""

    def preprocess_add_request(core: Any, request: Any) -> Any:
        manager = getattr(core.scheduler, "kv_cache_manager", None)
        if not _knows(manager):
            return add(core, request)
        generation, salt = _generation(manager), request.cache_salt
        request.cache_salt = _salted(salt, generation)
        made = add(core, request)
        setattr(made[0], _SALT, (generation, salt))
        return made

    return preprocess_add_request


def _looking_up(look_up: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM looks for the prefix of a request that has no blocks: a new one, or one that it has preempted."""

    def get_computed_blocks(manager: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        of, salt = getattr(request, _SALT, (0, request.cache_salt))
        generation = _generation(manager)
        if of != generation:
            request.cache_salt = _salted(salt, generation)
            request.block_hashes.clear()
            request.update_block_hashes()
            setattr(request, _SALT, (generation, salt))
        return look_up(manager, request, *arguments, **named)

    setattr(get_computed_blocks, _WRAPPED, True)
    return get_computed_blocks
