"""LMDeploy's engine in a Ray actor (``mp_engine_backend="ray"``), with our hooks.

A server that is started from Python inside a Ray actor runs so, in the placement group of that actor.  Ray finds the
class by its name, so importing this module is our way into the engine's process.
"""

# LMDeploy and Ray are not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from lmdeploy.pytorch.engine.mp_engine import ray_engine

from weightcast.plugins.lmdeploy import engine_process
from weightcast.plugins.lmdeploy.folder import FOLDER

_Worker: Any = ray_engine.RayEngineWorker


class EngineWorker(_Worker):
    """LMDeploy's worker; our methods are its own."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        engine_process.prepare()
        super().__init__(*arguments, **named)


for _method in engine_process.METHODS:
    setattr(EngineWorker, _method.__name__, _method)


def use(folder: str) -> None:
    """Makes the API server's process start our worker.  Safe to call twice."""
    complete = ray_engine._update_runtime_envs

    def with_folder(runtime_env: dict[str, Any]) -> dict[str, Any]:
        environment = complete(runtime_env)
        environment["env_vars"][FOLDER] = folder  # Ray's processes do not inherit ours
        return environment

    if ray_engine.RayEngineWorker is not EngineWorker:
        ray_engine.RayEngineWorker = EngineWorker
        ray_engine._update_runtime_envs = with_folder
