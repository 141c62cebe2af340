"""The routes for operators: health, metrics, pause and sleep.  Each scrape reads the engine's counters anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Response
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from weightcast.receiver.api_keys import Guard
from weightcast.receiver.server import NOT_FOR_YOU
from weightcast.rollout.engine import RolloutEngine
from weightcast.rollout.responses import REFUSALS, json_response
from weightcast.rollout.scheduler import Stats
from weightcast.rollout.sleeping import Sleeper

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PauseRequest(BaseModel):
    """Body of POST /pause and /sleep."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["abort", "retract", "in_place", "wait"] = "abort"
    timeout_s: float = Field(default=60.0, gt=0, le=86400)


def operator_routes(app: FastAPI, engine: RolloutEngine, guard: Guard) -> None:
    """Adds the routes of an engine."""
    scheduler = engine.scheduler
    sleeper = Sleeper(scheduler, engine.receiver.between_updates if engine.receiver is not None else nullcontext)
    metrics = Metrics(scheduler.stats, model=engine.model, updates=engine.registry)

    def status() -> dict[str, Any]:
        stats = scheduler.stats()
        return {
            "state": engine.state,
            "version": stats.version,
            "running": stats.running,
            "waiting": stats.waiting,
        }

    async def health() -> Response:
        body = status()
        healthy = body["state"] not in ("failed", "quarantined")
        if scheduler.failure is not None:
            body["error"] = scheduler.failure
        elif not healthy and engine.receiver is not None:
            body["error"] = engine.receiver.info().message
        return json_response({"status": "ok" if healthy else "unhealthy", **body}, 200 if healthy else 503)

    async def prometheus() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    async def pause(body: PauseRequest | None = None) -> Response:
        body = body or PauseRequest()
        await run_in_threadpool(scheduler.pause, body.mode, body.timeout_s, holder="operator")
        return json_response(status())

    async def resume() -> Response:
        scheduler.resume(holder="operator")
        return json_response(status())

    async def sleep(body: PauseRequest | None = None) -> Response:
        body = body or PauseRequest()
        await run_in_threadpool(sleeper.sleep, body.mode, timeout_s=body.timeout_s)
        return json_response(status())

    async def wake() -> Response:
        await run_in_threadpool(sleeper.wake)
        return json_response(status())

    unwell: dict[int | str, dict[str, Any]] = {503: {"description": "The engine cannot serve; the body says why"}}
    app.get("/health", summary="200 while the engine can serve, with state and version", responses=unwell)(health)
    metrics_type: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
    app.get("/metrics", summary="Counters for Prometheus", response_class=Response, responses=metrics_type)(prometheus)
    ours = APIRouter(dependencies=[Depends(guard.check)], responses=NOT_FOR_YOU | REFUSALS)
    ours.post("/pause", summary="Pause: abort, retract, in_place or wait")(pause)
    ours.post("/continue", summary="Undo /pause")(resume)
    ours.post("/sleep", summary="Pause, free the cache and move the weights off the accelerator")(sleep)
    ours.post("/wake", summary="Undo /sleep")(wake)
    app.include_router(ours)


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
        stats, gauge, counter = self._stats(), GaugeMetricFamily, CounterMetricFamily
        for kind, name, text, value in (
            (gauge, "requests_running", "Requests that generate", stats.running),
            (gauge, "requests_waiting", "Requests that wait for a slot", stats.waiting),
            (gauge, "paused", "1 while the engine is paused or asleep", stats.state in ("paused", "asleep")),
            (gauge, "healthy", "0 once the engine has failed", stats.state != "failed"),
            (counter, "steps", "Prefill and decode steps", stats.steps),
            (counter, "prompt_tokens", "Prompt tokens computed", stats.prompt_tokens),
            (counter, "generated_tokens", "Tokens generated", stats.generated_tokens),
        ):
            metric = kind(f"weightcast_{name}", text, labels=["model_name"])
            metric.add_metric([self._model], value)
            yield metric
        finished = CounterMetricFamily(
            "weightcast_requests", "Requests that ended", labels=["model_name", "finish_reason"]
        )
        for reason, count in sorted(stats.finished.items()):
            finished.add_metric([self._model, reason], count)
        yield finished
