"""The reference engine with Ray actors for ranks: what ``weightcast serve --executor ray`` adds to ``serve``."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, get_placement_group

from weightcast.errors import ConfigError
from weightcast.ray.executor import RayExecutor
from weightcast.ray.placement import Bundles, Resource
from weightcast.receiver.executor import Executor
from weightcast.rollout.worker import WorkerSettings, make_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """Where the ranks of one engine go.

    Attributes:
        group: Name of the caller's placement group in ``namespace``; None makes one.
        namespace: Of that name: Ray finds named things in the caller's namespace only.
        indices: Bundle of each rank in that group; None takes those that fit, sorted by address.
    """

    group: str | None = None
    namespace: str | None = None
    indices: tuple[int, ...] | None = None

    def make_executor(self, settings: WorkerSettings, tp_size: int) -> Executor:
        """Start the ranks.

        Raises:
            ConfigError: The cluster, the group or its bundles are not what was asked for.
            EngineFailure: A rank could not start.
        """
        resource: Resource = "GPU" if settings.device.startswith("cuda") else "CPU"
        bundles = None
        if self.group is not None:
            bundles = Bundles.of(named_group(self.group), tp_size, indices=self.indices, resource=resource)
        return RayExecutor(make_worker, tp_size, {"settings": settings}, bundles=bundles, resource=resource)


def parse_place(group: str | None, indices: str | None) -> EnginePlace:
    """From the command line.

    Args:
        group: ``NAMESPACE/NAME``.
        indices: Comma-separated numbers.

    Raises:
        ConfigError: Bundles without a group, a name without a namespace, or no numbers.
    """
    if group is None and indices is None:
        return EnginePlace()
    if group is None:
        raise ConfigError(
            f"bundles {indices} are bundles of a placement group of yours",
            hint="name it: --placement-group NAMESPACE/NAME",
        )
    namespace, _, name = group.partition("/")
    if not namespace or not name:
        raise ConfigError(
            f"placement group {group!r}: Ray finds a name in a namespace only",
            hint="write --placement-group NAMESPACE/NAME",
        )
    try:
        chosen = None if indices is None else tuple(int(part) for part in indices.split(","))
    except ValueError:
        raise ConfigError(f"bundles {indices!r} are no numbers", hint="write --bundles 1,0") from None
    return EnginePlace(group=name, namespace=namespace, indices=chosen)


@contextmanager
def cluster(address: str, *, namespace: str | None = None, cpus: int = 1) -> Generator[None]:
    """Be connected to a cluster.

    Args:
        address: As ``ray.init`` has it; ``"local"`` starts one here, which ends with this process.
        namespace: Where names are looked for.
        cpus: How many ranks a cluster that is started here must hold.

    Raises:
        ConfigError: There is none at that address.
    """
    if ray.is_initialized():
        yield
        return
    try:
        if address == "local":  # CPUs are only counted here: a rank on a small machine is slow, not impossible
            ray.init(
                address="local",
                namespace=namespace,
                log_to_driver=False,
                include_dashboard=False,
                num_cpus=max(cpus, os.cpu_count() or 1),
            )
        else:
            ray.init(address=address, namespace=namespace, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"no Ray cluster at {address}: {error}", hint="`ray start --head`, or --ray-address local"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def named_group(name: str) -> PlacementGroup:
    """The placement group with this name in this connection's namespace.

    Raises:
        ConfigError: There is none.
    """
    try:
        return get_placement_group(name)
    except ValueError as error:
        raise ConfigError(
            f"no placement group {name!r}: {error}", hint="make it with a name and lifetime='detached'"
        ) from error
