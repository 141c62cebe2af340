"""Finds what is installed here for some requirements."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import Distribution, distribution

from packaging.requirements import Requirement


def closure(requirements: Iterable[str], extras: frozenset[str]) -> dict[str, Distribution]:
    """Installed distributions that some requirements need, with those that these need in turn.

    Args:
        requirements: Requirements of the wheel.
        extras: The extras of the wheel that are asked for.
    """
    found: dict[str, Distribution] = {}
    waiting = [(text, extras) for text in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        text, asked = waiting.pop()
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in (asked or {""})):
            continue
        if (requirement.name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((requirement.name, frozenset(requirement.extras)))
        if requirement.name == "weightcast":
            waiting += [(own, frozenset(requirement.extras)) for own in _requires(distribution("weightcast"))]
            continue
        here = distribution(requirement.name)
        assert requirement.specifier.contains(here.version, prereleases=True), (
            f"{text}, and {here.version} is installed"
        )
        found[here.metadata["Name"]] = here
        waiting += [(own, frozenset(requirement.extras)) for own in _requires(here)]
    return found


def _requires(found: Distribution) -> list[str]:
    return list(found.requires or ())
