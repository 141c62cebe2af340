"""Our receiver inside vLLM: the entry points of vLLM's two plug-in groups, which import vLLM only when called.

``register`` (group ``vllm.general_plugins``) runs in every process of vLLM.  It registers the backend of
``--weight-transfer-config '{"backend": "weightcast"}'`` and adds our methods to the engine core.  ``endpoints`` (group
``vllm.endpoint_plugins``) runs in the API server and adds the routes under ``/weightcast``.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false, reportPrivateUsage=false
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightcast.plugins.vllm.endpoints import Endpoints

BACKEND = "weightcast"


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
        from weightcast.plugins.vllm.route_patch import add_routes

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
