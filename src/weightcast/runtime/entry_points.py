"""Finds and imports the entry points by which other packages add engines and exporters to weightcast.

Nothing of another package is imported before it is needed, and a package that cannot be used is left out: a warning
names it once, and ``weightcast doctor`` names it again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Final, Generic, TypeVar

ENGINES: Final = "weightcast.engines"
EXPORTERS: Final = "weightcast.exporters"
_Made = TypeVar("_Made")
log = logging.getLogger("weightcast.entry_points")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension(Generic[_Made]):
    """One entry point of another package.

    Attributes:
        name: Name of the entry point.
        package: The package that has it, with its version.
        made: What was made of it; None if it cannot be used.
        error: Why it cannot be used; empty if it can.
    """

    name: str
    package: str
    made: _Made | None
    error: str = ""


def names_in(group: str) -> tuple[str, ...]:
    """Names of the entry points in a group, in order.  Imports none of them."""
    return tuple(dict.fromkeys(point.name for point in _found(group)))


class EntryPoints(Generic[_Made]):
    """The entry points of one group.  They are looked up and imported once.  Safe to call from any thread."""

    def __init__(self, group: str, make: Callable[[str, object], _Made], *, taken: Collection[str] = ()) -> None:
        """Imports nothing yet.

        Args:
            group: Name of the group.
            make: Makes the result from an entry point's name and object; raises TypeError for a wrong object.
            taken: Names that belong to weightcast.
        """
        self._group = group
        self._make = make
        self._taken = taken
        self._lock = threading.Lock()
        self._loaded: tuple[Extension[_Made], ...] | None = None

    def load(self) -> tuple[Extension[_Made], ...]:
        """Imports all entry points; returns each, in the order of their names, also those that cannot be used."""
        with self._lock:
            if self._loaded is None:
                points = _found(self._group)
                self._loaded = tuple(self._extension(point, points) for point in points)
            return self._loaded

    def made(self) -> tuple[_Made, ...]:
        """Returns what was made of the entry points that can be used."""
        return tuple(found.made for found in self.load() if found.made is not None)

    def _extension(self, point: EntryPoint, points: Collection[EntryPoint]) -> Extension[_Made]:
        made, package = None, _package(point)
        others = [_package(other) for other in points if other.name == point.name and other is not point]
        if point.name in self._taken:
            error = f"the name {point.name!r} is weightcast's own"
        elif others:
            error = f"the name {point.name!r} is also that of {', '.join(others)}"
        else:
            made, error = self._tried(point)
        if error:
            log.warning("%s: %s of %s is left out: %s", self._group, point.name, package, error)
        return Extension(name=point.name, package=package, made=made, error=error)

    def _tried(self, point: EntryPoint) -> tuple[_Made | None, str]:
        try:
            return self._make(point.name, point.load()), ""
        except Exception as error:  # noqa: BLE001  the other package's own code, which may raise anything
            return None, f"{type(error).__name__}: {error}"


def _found(group: str) -> tuple[EntryPoint, ...]:
    return tuple(sorted(entry_points(group=group), key=lambda point: (point.name, _package(point))))


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
