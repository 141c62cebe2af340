"""Checks an engine against what our code needs of it: version, functions, classes, attributes and settings."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weightcast.errors import ConfigError, WeightcastError, error_words


class RefusedSetting(NamedTuple):
    """A setting under which our receiver was not shown to be right.

    Attributes:
        name: Name in the engine's options.  Options that a version does not know are off.
        what: The setting in words, with its option in brackets if that is not called as ``name`` is.
        hint: Advice; empty to start the engine without it.
        off: Value that is taken beside those that count as false.
    """

    name: str
    what: str
    hint: str = ""
    off: object = None

    def is_on(self, options: Any) -> bool:
        """True if the engine's options have this setting."""
        value = getattr(options, self.name, None)
        return bool(value) and value != self.off

    def words(self) -> str:
        """The setting with its option."""
        return self.what if "(" in self.what else f"{self.what} (--{self.name.replace('_', '-')})"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeeds:
    """One kind of engine, as our code knows it.

    Attributes:
        name: Name of the engine in errors.
        package: Name of its module and of its distribution.
        run_versions: Versions in which our code was run.
        without: Advice on how to start the engine without our receiver.
        install: Advice on which version to install.
        refused: The reason why our code refuses to run in a version; empty if it does not.
        places: Functions and classes that our code needs, for each part of the engine that runs it.
        attributes: Attributes that only instances have, for each kind of object.
    """

    name: str
    package: str
    run_versions: tuple[str, ...]
    without: str
    install: str = ""
    refused: Callable[[str], str] = lambda version: ""
    places: Mapping[str, Sequence[str]]
    attributes: Mapping[str, str] = field(default_factory=dict[str, str])

    def version(self) -> str:
        """The version of the engine; empty if it is not known."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:  # an engine that is on the path only
            try:
                return str(importlib.import_module(self.package).__version__)
            except (ImportError, AttributeError):
                return ""

    def check(self, *parts: str, also: Iterable[str] = ()) -> None:
        """Looks at the version, and for the places that our code needs in some parts of the engine.

        Raises:
            ConfigError: The version is refused, or places are missing; all are named.
        """
        if why := self.refused(self.version()):
            raise ConfigError(why, hint=f"{self.install}, or {self.without}")
        needed = [*(place for part in parts for place in self.places[part]), *also]
        wrong = [words for place in needed if (words := _why_not(place))]
        if wrong:
            raise self.other_version(wrong)

    def check_attributes(self, found: object, kind: str) -> None:
        """Looks for attributes of one of the engine's objects; ``ConfigError`` names all that are missing."""
        names = self.attributes[kind].split()
        wrong = [f"{type(found).__name__} has no {name}" for name in names if not hasattr(found, name)]
        if wrong:
            raise self.other_version(wrong)

    def other_version(self, wrong: Sequence[str]) -> ConfigError:
        """The error for an engine that is not as we know it."""
        version = self.version()
        return ConfigError(
            f"{self.name} {version} is not as this plug-in expects: {'; '.join(wrong)}"
            if version
            else f"this {self.name} is not as this plug-in expects: {'; '.join(wrong)}",
            hint=f"use {self.name} {' or '.join(self.run_versions)}, or {self.without}",
        )

    def check_settings(
        self, options: Sequence[Any], refused: Sequence[RefusedSetting], *, more: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Refuses settings that are on in some of the options.

        Args:
            more: Name and remedy of settings that were found elsewhere; without a remedy: to start without it.

        Raises:
            ConfigError: There is such a setting; all are named.
        """
        found = [(one.words(), one.hint) for one in refused if any(map(one.is_on, options))] + list(more)
        if found:
            hints = dict.fromkeys(hint or f"start {self.name} without it" for _, hint in found)
            raise ConfigError(
                f"not shown to be right with weightcast's receiver: {', '.join(what for what, _ in found)}",
                hint=f"{'; '.join(hints)}; or {self.without}",
            )


@contextmanager
def reason_logged(log: logging.Logger, what: str) -> Generator[None]:
    """Logs why a rank cannot do ``what``, since an engine's own log of a failed start buries the reason."""
    try:
        yield
    except WeightcastError as error:
        log.error("weightcast cannot %s: %s", what, error_words(error))
        raise


def dotted(place: str) -> str:
    """A ``module:path`` with dots only."""
    return place.replace(":", ".")


def _why_not(needed: str) -> str:
    """The reason why our code cannot use a function or class; empty if it can."""
    place, _, parameters = needed.rstrip(")").partition("(")
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
    lacking = [name for name in parameters.split(", ") if name and name not in known]
    return f"{dotted(place)} has no parameter {', '.join(lacking)}" if lacking else ""
