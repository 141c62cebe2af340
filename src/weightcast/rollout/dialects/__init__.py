"""The reference engine's other languages: the weight routes of stock engines, so that their adapters run on a laptop.

A dialect is a module here, of the engine's name, with ``routes(engine) -> APIRouter``.  It takes buckets as that engine
does, with its schemas, status codes and habits, and writes them straight into the live weights, as that engine does.
Nothing here is an engine's own code.  Off unless asked for: the payloads of some are pickles.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Literal, get_args

from weightcast.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import APIRouter

    from weightcast.rollout.server import RolloutEngine

DialectName = Literal["none", "sglang", "lmdeploy"]


def dialect_routes(name: str, engine: RolloutEngine) -> APIRouter:
    """The routes of a dialect.

    Raises:
        ConfigError: There is none of this name.
    """
    if name not in get_args(DialectName):
        raise ConfigError(f"dialect={name!r}: choose one of {', '.join(get_args(DialectName))}")
    return importlib.import_module(f"weightcast.rollout.dialects.{name}").routes(engine)
