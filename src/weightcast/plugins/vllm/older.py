"""For versions of vLLM without plug-ins for routes (before 0.29 or so): ours are added as the API server starts.

``build_app`` and ``init_app_state`` of the server's module are wrapped; each calls the original first.  Only where
``VLLM_PLUGINS`` names weightcast, as the later versions ask for it.
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
    """Wrap the server's functions in this process, if it is the server's; again and again does no harm."""
    if "weightcast" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    # Started with -m, the server's module has another name.
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
