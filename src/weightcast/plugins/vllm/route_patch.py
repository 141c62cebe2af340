"""Adds our routes to versions of vLLM without endpoint plug-ins (before 0.29 or so), as the API server starts.

It wraps ``build_app`` and ``init_app_state`` of the server's module; each wrapper calls the original first.  Like later
versions of vLLM, it asks for weightcast in ``VLLM_PLUGINS``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightcast.plugins.vllm.endpoints import Endpoints

_SERVER = "vllm.entrypoints.openai.api_server"
_DONE = "_weightcast_routes"


def add_routes(endpoints: Callable[[], Endpoints]) -> None:
    """Wraps the server's functions if this process is the API server.  Safe to call twice."""
    if "weightcast" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    # A server that was started with -m has its module under another name.
    for module in (sys.modules.get(_SERVER), sys.modules.get("__main__")):
        if module is not None and hasattr(module, "build_app") and hasattr(module, "init_app_state"):
            _wrap(module, endpoints)


def _wrap(server: ModuleType, endpoints: Callable[[], Endpoints]) -> None:
    if hasattr(server, _DONE):
        return
    build, init = server.build_app, server.init_app_state

    def build_app(*arguments: Any, **named: Any) -> Any:
        app = build(*arguments, **named)
        app.state.weightcast = endpoints()
        app.state.weightcast.attach_router(app)
        return app

    async def init_app_state(client: Any, state: Any, args: Any, *more: Any, **named: Any) -> None:
        await init(client, state, args, *more, **named)
        await state.weightcast.init_state(client, state, args)

    server.__dict__.update({"build_app": build_app, "init_app_state": init_app_state, _DONE: True})
