"""Bundles of a Ray placement group, one for each rank.

A rank takes one bundle, or a share of one, so that a trainer and an engine can use the same GPU.  If the caller names
bundles of its own group, their order is the order of ranks.  Otherwise ranks follow the nodes' addresses.  A layout has
trainers and engines in the same bundles, or in separate ones.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from weightcast.errors import ConfigError
from weightcast.ray.cluster import require_cluster

Resource = Literal["CPU", "GPU"]

_SLICE_S = 0.5
PLACE_S = 60.0  # a cluster with room answers at once; one that is growing needs time
_HALF = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundles:
    """Bundles of one placement group, one for each rank of a job or an engine, in order of rank."""

    group: PlacementGroup
    indices: tuple[int, ...]
    resource: Resource = "CPU"
    share: float = 1.0
    owned: bool = False

    @classmethod
    def create(
        cls, count: int, *, resource: Resource = "CPU", strategy: str = "PACK", timeout_s: float = PLACE_S
    ) -> Bundles:
        """Makes a placement group of ``count`` bundles of one CPU, or of one GPU and one CPU, sorted by address.

        Raises:
            ConfigError: The cluster does not provide them within ``timeout_s``.
        """
        require_cluster()
        if count < 1:
            raise ConfigError(f"{count} bundles were asked for, and at least one rank needs one")
        bundle = {"CPU": 1.0} if resource == "CPU" else {"CPU": 1.0, resource: 1.0}
        group = placement_group([dict(bundle) for _ in range(count)], strategy=strategy)
        deadline = time.monotonic() + timeout_s
        # Wait in slices, because a signal does not interrupt this wait.
        while not group.wait(min(_SLICE_S, max(deadline - time.monotonic(), 0.01))):
            if time.monotonic() < deadline:
                continue
            remove_placement_group(group)
            free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
            raise ConfigError(
                f"the Ray cluster has no {count} bundles of {bundle} after {timeout_s:g} s; free now: {free}",
                hint="start Ray with more resources, or ask for fewer ranks",
            )
        return cls(group=group, indices=_sorted(group), resource=resource, owned=True)

    @classmethod
    def of(
        cls,
        group: PlacementGroup,
        count: int,
        *,
        indices: Sequence[int] | None = None,
        resource: Resource = "CPU",
        share: float = 1.0,
    ) -> Bundles:
        """Chooses bundles of the caller's own group, which ``close`` does not remove.

        Args:
            indices: Bundle of rank 0, 1, ..., in this order; None takes bundles with enough of the resource, sorted by
                address.

        Raises:
            ConfigError: An index is out of range, appears twice or names a bundle that lacks the resource.
        """
        require_cluster()
        specs: list[dict[str, float]] = group.bundle_specs
        if not specs:
            raise ConfigError(
                f"placement group {group.id.hex()} does not exist", hint="check that it was not removed before"
            )
        order = range(len(specs)) if indices is not None else _sorted(group)
        chosen = choose_bundles(specs, count, indices=indices, order=order, resource=resource, share=share)
        return cls(group=group, indices=chosen, resource=resource, share=share)

    def part(self, start: int, stop: int) -> Bundles:
        """Returns some of these bundles; closing them does not remove the group."""
        return replace(self, indices=self.indices[start:stop], owned=False)

    def shared(self, share: float) -> Bundles:
        """Returns the same bundles for ranks that take only a share; closing them does not remove the group."""
        return replace(self, share=share, owned=False)

    def options(self, index: int) -> dict[str, Any]:
        """Returns the arguments of ``actor_class.options`` for a rank in bundle ``index``."""
        gpu = self.resource == "GPU"
        return {
            "num_cpus": 0 if gpu else self.share,
            "num_gpus": self.share if gpu else 0,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=index
            ),
        }

    def close(self) -> None:
        """Removes the group if it is owned; safe to call twice."""
        if self.owned and ray.is_initialized():
            remove_placement_group(self.group)


def _sorted(group: PlacementGroup) -> tuple[int, ...]:
    """Returns all bundles of a group, sorted by the address of their node."""
    table: dict[str, Any] = placement_group_table(group)
    node_of: dict[int, str] = {int(index): node for index, node in table["bundles_to_node_id"].items()}
    address_of = {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in ray.nodes()}
    return tuple(by_address([address_of.get(node_of.get(index, ""), "") for index in range(group.bundle_count)]))


def choose_bundles(
    specs: Sequence[Mapping[str, float]],
    count: int,
    *,
    indices: Sequence[int] | None,
    order: Sequence[int],
    resource: str,
    share: float = 1.0,
) -> tuple[int, ...]:
    """Returns the bundle of each rank: the caller's ``indices``, or else bundles with the resource, in ``order``.

    Raises:
        ConfigError: An index is wrong, or too few bundles have the resource; the message says which or how many.
    """
    if count < 1:
        raise ConfigError(f"{count} ranks were asked for, and at least one is needed")
    if indices is None:
        fit = [index for index in order if specs[index].get(resource, 0.0) >= share]
        if len(fit) < count:
            raise ConfigError(
                f"{count} ranks need a bundle with {share:g} {resource} each, and {len(fit)} of {len(specs)} have that"
            )
        return tuple(fit[:count])
    if len(indices) != count:
        raise ConfigError(f"{len(indices)} bundle indices for {count} ranks", hint="name one bundle for each rank")
    for place, index in enumerate(indices):
        if isinstance(index, bool) or not 0 <= index < len(specs):
            raise ConfigError(f"bundle index {index} for rank {place}: the group has bundles 0 to {len(specs) - 1}")
        if index in indices[:place]:
            raise ConfigError(f"bundle index {index} is given for rank {indices.index(index)} and for rank {place}")
        if specs[index].get(resource, 0.0) < share:
            raise ConfigError(
                f"bundle {index} for rank {place} holds {dict(specs[index])}, and a rank takes {share:g} {resource}"
            )
    return tuple(indices)


def by_address(addresses: Sequence[str]) -> list[int]:
    """Returns the order of these addresses, compared as numbers; bundles of one node keep their order."""
    return sorted(range(len(addresses)), key=lambda place: (_address_key(addresses[place]), place))


def _address_key(address: str) -> tuple[int, int, str]:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return (99, 0, address)  # a name; after all numbers
    return (parsed.version, int(parsed), "")


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
