"""The reference engine's other languages: the weight routes of stock engines, so that their adapters run on a laptop.

A dialect is a module here, of the engine's name, with ``mount(app, engine)``.  It takes buckets as that engine
does, with its schemas, status codes and habits, and writes them straight into the live weights, as that engine does.
Nothing here is an engine's own code.  Off unless asked for: the payloads of some are pickles.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Literal, get_args

from weightcast.errors import ConfigError
from weightcast.rollout.dialects.faults import Faults, WithFaults, fault_routes

if TYPE_CHECKING:
    from fastapi import FastAPI

    from weightcast.rollout.server import RolloutEngine

DialectName = Literal["none", "sglang", "lmdeploy"]


def mount(app: FastAPI, name: str, engine: RolloutEngine, faults: str = "") -> None:
    """Put a dialect's routes, and faults on request, into an app that has no others yet: theirs come first.

    Raises:
        ConfigError: There is no dialect of this name, it is not for this engine, or the faults are no list of faults.
    """
    if name not in get_args(DialectName):
        raise ConfigError(f"dialect={name!r}: choose one of {', '.join(get_args(DialectName))}")
    if name == "none":
        if faults:
            raise ConfigError("faults are for dialects", hint="choose one: --dialect")
        return
    asked = Faults(faults)
    importlib.import_module(f"weightcast.rollout.dialects.{name}").mount(app, engine)
    app.include_router(fault_routes(asked))
    app.add_middleware(WithFaults, faults=asked)
