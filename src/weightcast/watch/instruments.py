"""Parts that the Prometheus listeners of both halves share."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from weightcast.errors import ConfigError
from weightcast.watch.listeners import ByKind

# From a small model on one host (milliseconds) to a large one over a slow link (minutes).
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
UNKNOWN = math.nan
# One process at a time sets a gauge of ours.  Other modes would add a label with the process id.
GAUGE_MODE = "mostrecent"

# Instruments that no registry reads yet; see ``CountsLater.register``.
seconds_by = functools.partial(Histogram, buckets=SECONDS, registry=None)
counted = functools.partial(Counter, registry=None)
shown_now = functools.partial(Gauge, multiprocess_mode=GAUGE_MODE, registry=None)


def several_processes() -> bool:
    """True in the multiprocess mode of prometheus_client, in which series cannot be removed."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ or "prometheus_multiproc_dir" in os.environ


def unix_time(at: float) -> float:
    """The seconds since 1970 of a monotonic time."""
    return time.time() - (time.monotonic() - at)


class CountsLater(ByKind):
    """Base of listeners that count events in metrics when somebody reads these, or soon after the update."""

    def __init__(self, handlers: Mapping[type[Any], Callable[[Any], None]]) -> None:
        """``handlers`` has the function that counts, for each kind of events."""
        # Another process may read the values of several processes, and it does not ask this one.
        if several_processes():
            super().__init__(handlers)
        else:
            super().__init__({}, later=handlers)

    def register(self, instruments: object, registry: CollectorRegistry) -> None:
        """Makes a registry read an object's instruments; raises ``ConfigError`` if it has metrics of these names."""
        found = [value for value in vars(instruments).values() if isinstance(value, MetricWrapperBase)]
        try:
            registry.register(_UpToDate(found, lambda: self._settle()))
        except ValueError as error:
            raise ConfigError(
                f"these metrics cannot be registered: {error}",
                hint="give each updater of this process a registry of its own",
            ) from error


class _UpToDate(Collector):
    """Instruments that are read after what happened has been counted."""

    def __init__(self, instruments: list[MetricWrapperBase], settle: Callable[[], None]) -> None:
        self._instruments = instruments
        self._settle = settle

    def describe(self) -> Iterator[Metric]:
        """The metrics without values; the registry takes their names from here."""
        for instrument in self._instruments:
            yield from instrument.describe()

    def collect(self) -> Iterator[Metric]:
        self._settle()
        for instrument in self._instruments:
            yield from instrument.collect()
