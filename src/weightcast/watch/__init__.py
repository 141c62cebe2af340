"""Metrics, traces, log lines and callbacks of updates, for operators.

The listeners are arguments of ``WeightUpdater.connect(on_event=...)``.  ``weightcast.watch.events`` has the events.
Importing this package imports none of the packages that the listeners need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightcast.watch.callbacks import to_mlflow, to_tensorboard, to_wandb
    from weightcast.watch.events import Event
    from weightcast.watch.listeners import Listener
    from weightcast.watch.trainer_metrics import PrometheusMetrics

__all__ = ["Event", "Listener", "PrometheusMetrics", "to_mlflow", "to_tensorboard", "to_wandb"]

_HOMES = {
    "Event": "events",
    "Listener": "listeners",
    "PrometheusMetrics": "trainer_metrics",
    "to_mlflow": "callbacks",
    "to_tensorboard": "callbacks",
    "to_wandb": "callbacks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weightcast.watch' has no attribute {name!r}")
    try:
        return getattr(import_module(f"weightcast.watch.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        raise ImportError(f'{name} needs prometheus_client: pip install "weightcast[metrics]"') from error
