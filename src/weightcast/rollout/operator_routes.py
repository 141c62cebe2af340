"""The routes for operators: health, metrics, pause and sleep."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from weightcast.receiver.server import NOT_FOR_YOU, no_browsers
from weightcast.rollout.engine import RolloutEngine
from weightcast.rollout.metrics import CONTENT_TYPE, Metrics
from weightcast.rollout.responses import REFUSALS, json_response


class PauseRequest(BaseModel):
    """Body of POST /pause and /sleep."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["abort", "retract", "in_place", "wait"] = "abort"
    timeout_s: float = Field(default=60.0, gt=0, le=86400)


def operator_routes(app: FastAPI, engine: RolloutEngine) -> None:
    """Adds the routes of an engine."""
    scheduler = engine.scheduler
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
        await run_in_threadpool(fall_asleep, body or PauseRequest())
        return json_response(status())

    def fall_asleep(body: PauseRequest) -> None:
        # Sleep and a commit both move the weights, so only one may run.  This is checked twice: now, before any request
        # is ended for it, and when nothing runs, because messages to the receiver do not wait until then.
        alone = engine.receiver.between_updates if engine.receiver is not None else contextlib.nullcontext
        with alone():
            pass
        scheduler.sleep(body.mode, timeout_s=body.timeout_s, alone=alone)

    async def wake() -> Response:
        await run_in_threadpool(scheduler.wake)
        return json_response(status())

    unwell: dict[int | str, dict[str, Any]] = {503: {"description": "The engine cannot serve; the body says why"}}
    app.get("/health", summary="200 while the engine can serve, with state and version", responses=unwell)(health)
    metrics_type: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
    app.get("/metrics", summary="Counters for Prometheus", response_class=Response, responses=metrics_type)(prometheus)
    ours = APIRouter(dependencies=[Depends(no_browsers)], responses=NOT_FOR_YOU | REFUSALS)
    ours.post("/pause", summary="Pause: abort, retract, in_place or wait")(pause)
    ours.post("/continue", summary="Undo /pause")(resume)
    ours.post("/sleep", summary="Pause, free the cache and move the weights off the accelerator")(sleep)
    ours.post("/wake", summary="Undo /sleep")(wake)
    app.include_router(ours)
