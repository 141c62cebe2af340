"""Events of an engine's API server: log lines, spans, and metrics on the server's own ``/metrics``."""

from __future__ import annotations

from weightcast.watch.listeners import Events, Listener
from weightcast.watch.logs import UpdateLog
from weightcast.watch.spans import EngineSpans


def server_events(model_name: str, *, version: int | None, metrics: bool = True) -> Events:
    """Returns the events for a ``SessionHandler``.

    Args:
        version: Version of the weights that the server was started with; None if it is unknown.
        metrics: False for a server without ``/metrics``, or if something else of it has them already.
    """
    listeners: list[Listener] = [UpdateLog(), EngineSpans()]
    if metrics:
        # Imported here: prometheus_client chooses its multiprocess mode at the import, and servers set the variable
        # for it late.  In that mode they serve what the instruments of the default registry write to files.
        from prometheus_client import REGISTRY

        from weightcast.watch.engine_metrics import EngineMetrics

        listeners.append(EngineMetrics(REGISTRY, model_name=model_name, version=version))
    return Events(listeners)
