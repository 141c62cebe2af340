"""The engine's counters for Prometheus, read when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weightcast.rollout.scheduler import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics(Collector):
    """A registry of its own, so that an engine can live in a process that has another.

    Args:
        stats: Gives the numbers.
        model: The label of every metric.
    """

    def __init__(self, stats: Callable[[], Stats], *, model: str) -> None:
        self._stats = stats
        self._model = model
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """The text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        """Nothing: the registry need not collect to know the names."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """All metrics, now."""
        stats = self._stats()
        gauges = {
            "requests_running": ("Requests that generate", stats.running),
            "requests_waiting": ("Requests that wait for a slot", stats.waiting),
            "weight_version": ("Version of the weights that generate", stats.version),
            "paused": ("1 while the engine holds still", int(stats.state in ("paused", "asleep"))),
            "healthy": ("0 once the engine has failed", int(stats.state != "failed")),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"weightcast_{name}", text, labels=["model"])
            gauge.add_metric([self._model], value)
            yield gauge
        counters = {
            "steps": ("Prefill and decode steps", stats.steps),
            "prompt_tokens": ("Prompt tokens computed", stats.prompt_tokens),
            "generated_tokens": ("Tokens generated", stats.generated_tokens),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(f"weightcast_{name}", text, labels=["model"])
            counter.add_metric([self._model], value)
            yield counter
        finished = CounterMetricFamily("weightcast_requests", "Requests that ended", labels=["model", "finish_reason"])
        for reason, count in sorted(stats.finished.items()):
            finished.add_metric([self._model, reason], count)
        yield finished
