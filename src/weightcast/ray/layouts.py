"""Layouts of trainers and engines on a cluster: in the same bundles, or in separate ones."""

from __future__ import annotations

from dataclasses import replace

from weightcast.ray.bundles import PLACE_S, Bundles, Resource

_HALF = 0.5


def colocated(
    num_trainers: int, num_engines: int, *, tp: int = 1, resource: Resource = "CPU", timeout_s: float = PLACE_S
) -> tuple[Bundles, tuple[Bundles, ...]]:
    """Places trainers and engines in the same bundles; a trainer rank and an engine rank take half of each.

    Returns:
        Bundles of the trainers, and of each engine.  Closing the first removes the whole group.

    Raises:
        ConfigError: The cluster has too few resources.
    """
    count = max(num_trainers, num_engines * tp)
    both = replace(Bundles.create(count, resource=resource, timeout_s=timeout_s), share=_HALF)
    engines = tuple(both.part(number * tp, (number + 1) * tp) for number in range(num_engines))
    return replace(both, indices=both.indices[:num_trainers]), engines


def disaggregated(
    num_trainers: int, num_engines: int, *, tp: int = 1, resource: Resource = "CPU", timeout_s: float = PLACE_S
) -> tuple[Bundles, tuple[Bundles, ...]]:
    """Places trainers and engines in separate bundles; otherwise as ``colocated``."""
    count = num_trainers + num_engines * tp
    every = Bundles.create(count, resource=resource, timeout_s=timeout_s)
    engines = tuple(
        every.part(num_trainers + number * tp, num_trainers + (number + 1) * tp) for number in range(num_engines)
    )
    return replace(every, indices=every.indices[:num_trainers]), engines
