"""Middleware that refuses requests before a route sees them: without the key, or with too large a body."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from weightcast.receiver.api_keys import Keys
from weightcast.rollout.responses import error_body, json_response

MAX_BODY_BYTES = 16 << 20
_OPEN_ROUTES = frozenset({"/health"})


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
