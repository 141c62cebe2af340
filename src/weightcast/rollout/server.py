"""The OpenAI-compatible server: all routes and middleware of one engine."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI

from weightcast.receiver.api_keys import Keys
from weightcast.receiver.peer_routes import peer_routes
from weightcast.receiver.server import weight_routes
from weightcast.rollout.engine import RolloutEngine
from weightcast.rollout.guards import ApiKeyGuard, BodyLimit
from weightcast.rollout.openai_requests import ChatRequest, CompletionRequest
from weightcast.rollout.openai_routes import openai_routes
from weightcast.rollout.operator_routes import PauseRequest, operator_routes
from weightcast.rollout.responses import answer_errors

_PARAMETERS = (*CompletionRequest.model_fields, *ChatRequest.model_fields, *PauseRequest.model_fields)

ExtraRoutes = Callable[[FastAPI, RolloutEngine], None]


def build_app(engine: RolloutEngine, *, api_key: str | None = None, extra_routes: ExtraRoutes | None = None) -> FastAPI:
    """Builds the app with all routes of one engine.

    Args:
        api_key: Key required as ``Authorization: Bearer`` on every route but /health; None requires none.
        extra_routes: Function that adds the caller's own routes and middleware first, so that they take precedence.
    """
    app = FastAPI(title="weightcast reference engine", openapi_url="/openapi.json", docs_url=None, redoc_url=None)
    if extra_routes is not None:
        extra_routes(app, engine)
    # Starlette wraps in reverse: the key is checked before a byte of the body is read.
    app.add_middleware(BodyLimit)
    if api_key is not None:
        app.add_middleware(ApiKeyGuard, keys=Keys([api_key]))
    answer_errors(app, _PARAMETERS)
    openai_routes(app, engine)
    operator_routes(app, engine)
    if engine.receiver is not None:
        receiver = engine.receiver
        app.include_router(weight_routes(receiver, engine.score))
        app.include_router(peer_routes(lambda: receiver))
    return app
