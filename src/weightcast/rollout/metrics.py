"""Exposes the engine's counters to Prometheus; each scrape reads them anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weightcast.rollout.scheduler import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics(Collector):
    """The metrics of one engine, in a registry of their own, so that several engines can share a process."""

    def __init__(self, stats: Callable[[], Stats], *, model: str, updates: CollectorRegistry) -> None:
        self._stats = stats
        self._model = model
        self._updates = updates
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # start time, memory and CPU time of the process

    def render(self) -> bytes:
        """Renders Prometheus' text format."""
        return generate_latest(self._registry) + generate_latest(self._updates)

    def describe(self) -> Iterator[Metric]:
        """Yields nothing, so that the registry does not collect to learn the names."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics with their present values."""
        stats = self._stats()
        gauges = {
            "requests_running": ("Requests that generate", stats.running),
            "requests_waiting": ("Requests that wait for a slot", stats.waiting),
            "paused": ("1 while the engine is paused or asleep", int(stats.state in ("paused", "asleep"))),
            "healthy": ("0 once the engine has failed", int(stats.state != "failed")),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"weightcast_{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        counters = {
            "steps": ("Prefill and decode steps", stats.steps),
            "prompt_tokens": ("Prompt tokens computed", stats.prompt_tokens),
            "generated_tokens": ("Tokens generated", stats.generated_tokens),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(f"weightcast_{name}", text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        finished = CounterMetricFamily(
            "weightcast_requests", "Requests that ended", labels=["model_name", "finish_reason"]
        )
        for reason, count in sorted(stats.finished.items()):
            finished.add_metric([self._model, reason], count)
        yield finished
