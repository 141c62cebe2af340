"""Weight routes of stock engines on the reference engine, so that their adapters can be tested on a laptop.

A dialect is a module with the engine's name and a function ``mount(app, engine)``.  It imitates that engine's schemas,
status codes and behaviour, and writes buckets straight into the live weights.  No engine's own code is used.
Dialects are off by default, since some payloads are pickles.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

from weightcast.errors import ConfigError
from weightcast.lab.dialects.faults import Faults, WithFaults, fault_routes

if TYPE_CHECKING:
    from fastapi import FastAPI

    from weightcast.rollout.engine import RolloutEngine

DialectName = Literal["none", "sglang", "lmdeploy"]


def routes_of(name: str, faults: str = "") -> Callable[[FastAPI, RolloutEngine], None] | None:
    """Returns the argument for ``serve(extra_routes=...)``: a stock engine's weight routes, and faults on request.

    Args:
        name: ``"sglang"``, ``"lmdeploy"``, or ``"none"`` for no dialect.
        faults: List of faults in the format of ``faults.parse_faults``.

    Raises:
        ConfigError: No dialect has this name, or the list of faults is malformed.
    """
    if name not in get_args(DialectName):
        raise ConfigError(f"dialect={name!r}: choose one of {', '.join(get_args(DialectName))}")
    if name == "none":
        if faults:
            raise ConfigError("faults need a dialect", hint="choose one with --dialect")
        return None
    asked = Faults(faults)

    def add(app: FastAPI, engine: RolloutEngine) -> None:
        importlib.import_module(f"weightcast.lab.dialects.{name}").mount(app, engine)
        app.include_router(fault_routes(asked))
        app.add_middleware(WithFaults, faults=asked)

    return add
