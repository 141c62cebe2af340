"""Our receiver inside vLLM: what vLLM's two plug-in groups load.  vLLM is imported when they are called, not here.

``register`` (group ``vllm.general_plugins``) runs in every process of vLLM and makes ``--weight-transfer-config
'{"backend": "weightcast"}'`` known; ``endpoints`` (group ``vllm.endpoint_plugins``) runs in the API server and adds
the routes under ``/weightcast``.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false, reportPrivateUsage=false
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightcast.plugins.vllm.endpoints import Endpoints

BACKEND = "weightcast"


def register() -> None:
    """Make the weight-transfer backend known to this process; again and again does no harm."""
    import importlib.util

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "weightcast.plugins.vllm.worker", "WeightcastEngine")
    if importlib.util.find_spec("vllm.plugins.endpoint_plugins") is None:
        from weightcast.plugins.vllm.older import add_routes

        add_routes(endpoints)


def endpoints() -> Endpoints:
    """The routes, as vLLM wants them."""
    from weightcast.plugins.vllm.endpoints import Endpoints

    return Endpoints()
