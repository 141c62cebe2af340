"""Parts that the Prometheus listeners of both halves share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TypeVar

from prometheus_client import CollectorRegistry

from weightcast.errors import ConfigError

# From a small model on one host (milliseconds) to a large one over a slow link (minutes).
SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
UNKNOWN = math.nan
# One process at a time sets a gauge of ours.  Other modes would add a label with the process id.
GAUGE_MODE = "mostrecent"
_Made = TypeVar("_Made")


def several_processes() -> bool:
    """True in the multiprocess mode of prometheus_client, in which series cannot be removed."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ or "prometheus_multiproc_dir" in os.environ


def registered(make: Callable[[CollectorRegistry], _Made], registry: CollectorRegistry) -> _Made:
    """Makes instruments in a registry.

    Raises:
        ConfigError: The registry has metrics of these names already.
    """
    try:
        return make(registry)
    except ValueError as error:
        raise ConfigError(
            f"these metrics cannot be registered: {error}",
            hint="give each updater of this process a registry of its own",
        ) from error
