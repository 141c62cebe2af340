"""Our receiver inside vLLM: the entry points of vLLM's two plug-in groups, which import vLLM only when called.

``register`` (group ``vllm.general_plugins``) runs in every process of vLLM.  It registers the backend of
``--weight-transfer-config '{"backend": "weightcast"}'`` and adds our methods to the engine core.  ``endpoints`` (group
``vllm.endpoint_plugins``) runs in the API server and adds the routes under ``/weightcast``.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false, reportPrivateUsage=false
from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightcast.plugins.vllm.endpoints import Endpoints

BACKEND = "weightcast"
_SERVER = "vllm.entrypoints.openai.api_server"
_DONE = "_weightcast_routes"


def register() -> None:
    """Registers the weight-transfer backend in this process, and what is ours in it.  Safe to call twice."""
    import importlib.util

    from weightcast.plugins.vllm.core_switch import install

    _share_log_handlers()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "weightcast.plugins.vllm.worker", "WeightcastEngine")
    install()
    if importlib.util.find_spec("vllm.plugins.endpoint_plugins") is None:
        add_routes(endpoints)


def _share_log_handlers() -> None:
    """Sends our log lines where vLLM sends its own, unless somebody has configured our logger or the root logger."""
    import logging

    ours, theirs = logging.getLogger("weightcast"), logging.getLogger("vllm")
    configured = (
        ours.handlers or ours.level != logging.NOTSET or (ours.hasHandlers() and ours.isEnabledFor(logging.INFO))
    )
    if configured or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate


def endpoints() -> Endpoints:
    """Makes vLLM's endpoint plug-in with our routes."""
    from weightcast.plugins.vllm.endpoints import Endpoints

    _share_log_handlers()
    return Endpoints()


def add_routes(endpoints: Callable[[], Endpoints]) -> None:
    """Adds our routes to versions of vLLM without endpoint plug-ins (before 0.29 or so), as the API server starts.

    Safe to call twice.  Like later versions of vLLM, it asks for weightcast in ``VLLM_PLUGINS``.
    """
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
