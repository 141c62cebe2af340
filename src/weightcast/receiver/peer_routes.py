"""HTTP routes for what engine ranks keep: chunks of live weights for another engine, and boxes for trainer ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Depends, Request, Response

from weightcast.errors import WireError
from weightcast.receiver.api_keys import Guard
from weightcast.receiver.server import NOT_FOR_YOU, carried_out, json_content, read_body, refusal
from weightcast.receiver.session import SessionHandler
from weightcast.wire.codec import decode
from weightcast.wire.messages import BOXES, CHUNK, ReadChunk

_MAX_REQUEST_BYTES = 4096


def peer_routes(engine: Callable[[], SessionHandler], *, guard: Guard | None = None) -> APIRouter:
    """Returns the routes.

    Args:
        engine: Function that returns the session handler of the engine whose weights are read.
        guard: As for ``weight_routes``.
    """
    router = APIRouter(tags=["peers"], dependencies=[Depends((guard or Guard()).check)], responses=NOT_FOR_YOU)

    @router.post(
        CHUNK,
        summary="One chunk of a rank's live weights, in the engine's layout, for another engine",
        response_class=Response,
        responses={200: _BYTES, **{code: _REFUSED for code in (400, 409, 413, 500)}},
        openapi_extra={"requestBody": {"required": True, **json_content("The chunk")}},
    )
    async def chunk(request: Request) -> Response:
        body = await read_body(request, _MAX_REQUEST_BYTES)
        if isinstance(body, Response):
            return body
        try:
            message = decode(body)
        except WireError as error:
            return refusal(400, str(error))
        if not isinstance(message, ReadChunk):
            return refusal(400, "this route takes only ReadChunk; other messages go to /weightcast/apply")
        return await carried_out(lambda: Response(engine().read_chunk(message), media_type="application/octet-stream"))

    @router.get(
        BOXES,
        summary="The boxes of the source tensors that ranks want, so that trainer ranks can pack them",
        response_class=Response,
        responses={200: json_content("The boxes"), 409: _REFUSED, 500: _REFUSED},
    )
    async def boxes() -> Response:
        return await carried_out(lambda: engine().boxes())

    return router


_REFUSED: dict[str, Any] = json_content("Refused; nothing changed")
_BYTES: dict[str, Any] = {
    "description": "The bytes of the chunk",
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}
