"""Ray options of ``weightcast serve --executor ray``: the bundles of the engine's ranks."""

from __future__ import annotations

from dataclasses import dataclass

from weightcast.errors import ConfigError
from weightcast.ray.bundles import Bundles, Resource
from weightcast.ray.cluster import named_group
from weightcast.ray.executor import RayExecutor
from weightcast.receiver.executor import Executor
from weightcast.rollout.worker import WorkerSettings, make_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """The placement of one engine's ranks.

    Attributes:
        group: Name of the caller's placement group in ``namespace``; None makes a group.
        namespace: Ray namespace of that name; Ray finds names only in the namespace of the connection.
        indices: Bundle of each rank in that group; None takes bundles with enough resources, sorted by address.
    """

    group: str | None = None
    namespace: str | None = None
    indices: tuple[int, ...] | None = None

    def make_executor(self, settings: WorkerSettings, tp_size: int) -> Executor:
        """Starts the ranks.

        Raises:
            ConfigError: The cluster, the group or its bundles do not fit the request.
            EngineFailure: A rank could not start.
        """
        resource: Resource = "GPU" if settings.device.startswith("cuda") else "CPU"
        bundles = None
        if self.group is not None:
            bundles = Bundles.of(named_group(self.group), tp_size, indices=self.indices, resource=resource)
        return RayExecutor(make_worker, tp_size, {"settings": settings}, bundles=bundles, resource=resource)


def parse_place(group: str | None, indices: str | None) -> EnginePlace:
    """Parses ``NAMESPACE/NAME`` of a group and comma-separated numbers of its bundles.

    Raises:
        ConfigError: Bundles come without a group, a name without a namespace, or indices are not numbers.
    """
    if group is None and indices is None:
        return EnginePlace()
    if group is None:
        raise ConfigError(
            f"bundles {indices} need the placement group that they belong to",
            hint="add --placement-group NAMESPACE/NAME",
        )
    namespace, _, name = group.partition("/")
    if not namespace or not name:
        raise ConfigError(
            f"placement group {group!r} has no namespace, and Ray finds a name only in its namespace",
            hint="write --placement-group NAMESPACE/NAME",
        )
    try:
        chosen = None if indices is None else tuple(int(part) for part in indices.split(","))
    except ValueError:
        raise ConfigError(f"bundles {indices!r} are not numbers", hint="write --bundles 1,0") from None
    return EnginePlace(group=name, namespace=namespace, indices=chosen)
