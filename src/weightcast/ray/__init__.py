"""Trainers, engines and engine ranks as Ray actors.

This package is optional: nothing outside it imports Ray, and it is imported only where Ray is asked for.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from weightcast.errors import ConfigError

if TYPE_CHECKING:
    from weightcast.ray.bundles import Bundles, colocated, disaggregated
    from weightcast.ray.engine_kinds import (
        EngineKind,
        lmdeploy_engine,
        reference_engine,
        sglang_engine,
        vllm_engine,
    )
    from weightcast.ray.engines import RolloutEngines
    from weightcast.ray.executor import RayExecutor
    from weightcast.ray.trainers import TrainWorkers

__all__ = [
    "Bundles",
    "EngineKind",
    "RayExecutor",
    "RolloutEngines",
    "TrainWorkers",
    "colocated",
    "disaggregated",
    "lmdeploy_engine",
    "reference_engine",
    "sglang_engine",
    "vllm_engine",
]

_HOMES = {
    "RayExecutor": "executor",
    "RolloutEngines": "engines",
    "TrainWorkers": "trainers",
    "Bundles": "bundles",
    "colocated": "bundles",
    "disaggregated": "bundles",
}

if find_spec("ray") is None:
    raise ConfigError("weightcast.ray needs Ray, which is not installed", hint='pip install "weightcast[ray]"')


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'weightcast.ray' has no attribute {name!r}")
    return getattr(import_module(f"weightcast.ray.{_HOMES.get(name, 'engine_kinds')}"), name)
