"""The OpenAI-compatible server: all routes of one engine, and what refuses requests before a route sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from weightcast.receiver.api_keys import Guard, Keys
from weightcast.receiver.peer_routes import peer_routes
from weightcast.receiver.server import weight_routes
from weightcast.rollout.engine import RolloutEngine
from weightcast.rollout.openai_call import openai_routes
from weightcast.rollout.openai_requests import CompletionRequest
from weightcast.rollout.operator_routes import PauseRequest, operator_routes
from weightcast.rollout.responses import answer_errors, error_body, json_response

ExtraRoutes = Callable[[FastAPI, RolloutEngine], None]
MAX_BODY_BYTES = 16 << 20
_OPEN_ROUTES = frozenset({"/health"})


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
    keys = [] if api_key is None else [api_key]
    if keys:
        app.add_middleware(ApiKeyGuard, keys=Keys(keys))
    guard = Guard(keys)
    answer_errors(app, (*CompletionRequest.model_fields, *PauseRequest.model_fields))
    openai_routes(app, engine)
    operator_routes(app, engine, guard)
    if engine.receiver is not None:
        receiver = engine.receiver
        app.include_router(weight_routes(receiver, engine.score, guard=guard))
        app.include_router(peer_routes(lambda: receiver, guard=guard))
    return app


class ApiKeyGuard:
    """Refuses requests without the key."""

    def __init__(self, app: ASGIApp, *, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers 401."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in _OPEN_ROUTES):
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # no route is a websocket
        elif self._keys.admit(dict(scope["headers"]).get(b"authorization", b"")):
            await self._app(scope, receive, send)
        else:
            body = error_body("wrong or missing API key", kind="authentication_error")
            await json_response(body, 401)(scope, receive, send)


class BodyLimit:
    """Refuses bodies over ``MAX_BODY_BYTES``; the weight routes have a limit of their own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers 413 as soon as its body is too large."""
        if scope["type"] != "http" or scope["path"].startswith("/weightcast/"):
            await self._app(scope, receive, send)
            return
        seen = 0

        async def limited() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > MAX_BODY_BYTES:
                raise HTTPException(413, f"the request is larger than {MAX_BODY_BYTES} bytes")
            return message

        await self._app(scope, limited, send)
