"""SGLang's own ways to other weights, closed: they would change weights that our sessions have proven and stamped."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.routing import APIRoute

from weightcast.plugins.sglang.hook_points import SGLANG

ROUTES = (
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
    "/begin_weight_update",
    "/end_weight_update",
    "/update_weight_version",
)
_INSTEAD = "this server is updated through /weightcast (SGLANG_PLUGINS names weightcast)"
_READS = ("checksum", "snapshot", "compare")


def close_other_updates(app: FastAPI, manager: Any, level: Any) -> None:
    """Makes SGLang's update routes, and the part of its weight checker that overwrites weights, answer 409.

    Args:
        app: SGLang's app.
        manager: SGLang's ``TokenizerManager``.
        level: SGLang's rule for the key of these routes.

    Raises:
        ConfigError: This version's manager is not as we know it.
    """
    SGLANG.check_attributes(manager, ("check_weights",))

    async def refuse() -> None:
        raise HTTPException(409, _INSTEAD)

    refuse._auth_level = level  # type: ignore[attr-defined]
    for path in ROUTES:
        # In front: the first route that matches answers.
        app.router.routes.insert(0, APIRoute(path, refuse, methods=["GET", "POST"], include_in_schema=False))
    check = manager.check_weights

    async def check_weights(obj: Any, *arguments: Any, **named: Any) -> Any:
        if obj.action not in _READS:
            raise HTTPException(409, f"{obj.action} would overwrite weights: {_INSTEAD}")
        return await check(obj, *arguments, **named)

    manager.check_weights = check_weights
