"""Requests to an engine, and what its answers hold, for every adapter."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import msgspec

from weightcast.comm.run_steps import EngineRequest
from weightcast.errors import TargetRejected

NO_ROUTE = (404, 405)  # HTTP statuses of a server that lacks the route
_NO_KEY = (401, 403)
JsonObject = dict[str, Any]


def post(path: str, body: Mapping[str, Any] | None = None) -> EngineRequest:
    """A POST with a JSON body, or without a body."""
    return EngineRequest(path=path, body=b"" if body is None else msgspec.json.encode(body))


def if_there(request: EngineRequest) -> Generator[EngineRequest, bytes, bytes | None]:
    """Sends a request; None if this version has no such route."""
    try:
        return (yield request)
    except TargetRejected as error:
        if error.status in NO_ROUTE:
            return None
        raise


def succeeds(request: EngineRequest) -> Generator[EngineRequest, bytes, bool]:
    """Sends a request; False if the engine refuses it."""
    try:
        yield request
    except TargetRejected:
        return False
    return True


def object_at(path: str, *, timeout_s: float | None = None) -> Generator[EngineRequest, bytes, JsonObject | None]:
    """The JSON object behind a route; None if there is none.  Raises TargetRejected if the server wants a key."""
    try:
        body = yield EngineRequest(method="GET", path=path, timeout_s=timeout_s)
    except TargetRejected as error:
        if error.status in _NO_KEY:
            raise
        return None
    return json_object(body)


def json_object(body: bytes) -> JsonObject | None:
    """Decodes a JSON object, also one in a JSON string, as LMDeploy has them; None for anything else."""
    try:
        answer = msgspec.json.decode(body)
        if isinstance(answer, str):
            answer = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        return None
    return answer if isinstance(answer, dict) else None
