"""Parts that the Prometheus metrics of both halves share."""

from __future__ import annotations

import functools
import math
import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from weightcast.errors import ConfigError

# From a small model on one host (milliseconds) to a large one over a slow link (minutes).
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
UNKNOWN = math.nan
# One process at a time sets a gauge of ours.  Other modes would add a label with the process id.
GAUGE_MODE = "mostrecent"

# Instruments that no registry reads yet; see ``register``.
seconds_by = functools.partial(Histogram, buckets=SECONDS, registry=None)
counted = functools.partial(Counter, registry=None)
shown_now = functools.partial(Gauge, multiprocess_mode=GAUGE_MODE, registry=None)


def several_processes() -> bool:
    """True in the multiprocess mode of prometheus_client, in which series cannot be removed."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ or "prometheus_multiproc_dir" in os.environ


def register(instruments: object, registry: CollectorRegistry) -> None:
    """Makes a registry read an object's instruments; raises ``ConfigError`` if it has metrics of these names."""
    try:
        for instrument in vars(instruments).values():
            if isinstance(instrument, MetricWrapperBase):
                registry.register(instrument)
    except ValueError as error:
        raise ConfigError(
            f"these metrics cannot be registered: {error}",
            hint="give each updater of this process a registry of its own",
        ) from error
