"""Looks for the functions, classes and attributes that our code needs of an engine."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any


def unmet(needed: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Returns the functions and classes, as ``module:path``, that are missing or have other parameters, in words."""
    return [words for place, parameters in needed.items() if (words := _why_not(place, parameters))]


def unmet_attributes(found: object, names: Iterable[str]) -> list[str]:
    """The attributes that one of the engine's objects lacks, each in words."""
    return [f"{type(found).__name__} has no {name}" for name in names if not hasattr(found, name)]


def dotted(place: str) -> str:
    """A ``module:path`` with dots only."""
    return place.replace(":", ".")


def _why_not(place: str, parameters: tuple[str, ...]) -> str:
    """The reason why our code cannot use a function or class; empty if it can."""
    module, _, path = place.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
        known = inspect.signature(found).parameters
    except (ImportError, AttributeError) as error:
        return f"{dotted(place)} is missing ({error})"
    except ValueError:
        return ""  # written in C: nothing to compare
    lacking = [name for name in parameters if name not in known]
    return f"{dotted(place)} has no parameter {', '.join(lacking)}" if lacking else ""
