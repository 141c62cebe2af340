"""JSON responses, and errors as responses in OpenAI's shape."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from weightcast.errors import ConfigError, DeadlineExceeded, EngineFailure, Refused, WeightcastError, error_words

REFUSED: dict[str, Any] = {"description": "Refused; the body is an error in OpenAI's shape"}
# OpenAI answers 400 where FastAPI would answer 422.
REFUSALS: dict[int | str, dict[str, Any]] = {code: REFUSED for code in (400, 409, 413, 422, 503, 504)}
_MEANINGS: dict[type[WeightcastError], tuple[int, str]] = {
    ConfigError: (400, "invalid_request_error"),
    Refused: (409, "conflict"),
    DeadlineExceeded: (504, "timeout"),
    EngineFailure: (503, "engine_error"),
}


def json_response(body: dict[str, Any], status: int = 200) -> Response:
    """A response with a JSON body."""
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


def error_body(message: str, *, kind: str = "invalid_request_error", param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def answer_errors(app: FastAPI, parameters: Iterable[str]) -> None:
    """Adds handlers that answer every error in OpenAI's shape; ``parameters`` serve hints at misspelt ones."""
    known = tuple(parameters)

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        errors = error.errors()
        first = next((entry for entry in errors if entry["type"] == "extra_forbidden"), errors[0])
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        words = str(first["msg"]).removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(place, known, n=1)
            words = "this engine has no such parameter; " + (f"did you mean {near[0]}?" if near else "leave it out")
        return json_response(
            error_body(f"{place}: {words}" if place else words, param=place.split(".")[0] or None), 400
        )

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return json_response(error_body(str(error.detail)), error.status_code)

    async def ours(_: Request, error: Exception) -> Response:
        assert isinstance(error, WeightcastError)
        meanings = (meaning for kind, meaning in _MEANINGS.items() if isinstance(error, kind))
        status, kind = next(meanings, (500, "internal_error"))
        return json_response(error_body(error_words(error), kind=kind), status)

    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        RequestValidationError: invalid,
        HTTPException: http,
        WeightcastError: ours,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
