"""The connection of this process to a Ray cluster, and the placement groups that others have named there."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

import ray
from ray.util.placement_group import PlacementGroup, get_placement_group

from weightcast.errors import ConfigError


def require_cluster() -> None:
    """Raises ``ConfigError`` unless this process is connected to a Ray cluster."""
    if not ray.is_initialized():
        raise ConfigError("this process is not connected to a Ray cluster", hint="call ray.init() first")


@contextmanager
def cluster(address: str, *, namespace: str | None = None, cpus: int = 1) -> Generator[None]:
    """Connects to a cluster inside the block.

    Args:
        address: Address for ``ray.init``; ``"local"`` starts a cluster that ends with this process.
        cpus: Number of ranks that a cluster started here must hold.

    Raises:
        ConfigError: No cluster runs at that address.
    """
    if ray.is_initialized():
        yield
        return
    try:
        if address == "local":  # claim enough CPUs: ranks may share the CPUs of a small machine
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
            f"no Ray cluster runs at {address}: {error}", hint="run `ray start --head`, or use --ray-address local"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def named_group(name: str) -> PlacementGroup:
    """Finds a placement group by its name in this connection's namespace; raises ``ConfigError`` if there is none."""
    try:
        return get_placement_group(name)
    except ValueError as error:
        raise ConfigError(
            f"no placement group {name!r}: {error}", hint="make it with a name and lifetime='detached'"
        ) from error
