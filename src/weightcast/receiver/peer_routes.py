"""HTTP routes for what engine ranks keep: chunks of live weights for another engine, and boxes for trainer ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from fastapi import APIRouter, Depends, Request, Response
from starlette.concurrency import run_in_threadpool

from weightcast.errors import Refused, WeightcastError, WireError, error_words
from weightcast.receiver.schemas import json_content
from weightcast.receiver.server import NOT_FOR_YOU, Refusal, no_browsers, read_body, refusal, reply
from weightcast.wire.codec import decode
from weightcast.wire.messages import ReadChunk
from weightcast.wire.peer_routes import BOXES, CHUNK
from weightcast.wire.pieces import WantedBoxes

_MAX_REQUEST_BYTES = 4096


class GivesChunks(Protocol):
    """The part of ``SessionHandler`` that the routes need."""

    def read_chunk(self, message: ReadChunk) -> bytes:
        """As ``SessionHandler.read_chunk``."""
        ...

    def boxes(self) -> WantedBoxes:
        """As ``SessionHandler.boxes``."""
        ...


def peer_routes(engine: Callable[[], GivesChunks]) -> APIRouter:
    """Returns the routes; ``engine`` returns the session handler of the engine whose weights are read."""
    router = APIRouter(tags=["peers"], dependencies=[Depends(no_browsers)], responses=NOT_FOR_YOU)

    @router.post(
        CHUNK,
        summary="One chunk of a rank's live weights, in the engine's layout, for another engine",
        response_class=Response,
        responses={200: _BYTES, **{code: _REFUSED for code in (400, 409, 413, 500)}},
        openapi_extra={"requestBody": {"required": True, **json_content("The chunk", ReadChunk)}},
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
        try:
            data = await run_in_threadpool(engine().read_chunk, message)
        except Refused as error:
            return refusal(409, error_words(error))
        except WeightcastError as error:
            return refusal(500, error_words(error))
        return Response(data, media_type="application/octet-stream")

    @router.get(
        BOXES,
        summary="The boxes of the source tensors that ranks want, so that trainer ranks can pack them",
        response_class=Response,
        responses={200: json_content("The boxes", WantedBoxes), 409: _REFUSED, 500: _REFUSED},
    )
    async def boxes() -> Response:
        try:
            return reply(await run_in_threadpool(engine().boxes))
        except Refused as error:
            return refusal(409, error_words(error))
        except WeightcastError as error:
            return refusal(500, error_words(error))

    return router


_REFUSED: dict[str, Any] = json_content("Refused; nothing changed", Refusal)
_BYTES: dict[str, Any] = {
    "description": "The bytes of the chunk",
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}
