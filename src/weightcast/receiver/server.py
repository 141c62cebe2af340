"""Routes: parse, hand on, render.  What a message means is decided further down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from weightcast.errors import WeightcastError, WireError
from weightcast.wire.messages import (
    GROUP_FAILED,
    MAX_MESSAGE_BYTES,
    Ack,
    EngineInfo,
    Message,
    Open,
    Readback,
    decode,
    encode,
)

HEARTBEAT_S = 1.0
MAX_SCORED_TOKENS = 4096
Score = Callable[[Sequence[int]], Sequence[float]]


class Answers(Protocol):
    """The part of ``ReceiverEngine`` that routes need."""

    def info(self) -> EngineInfo:
        """As ``ReceiverEngine.info``."""
        ...

    def apply(self, message: Message) -> Ack:
        """As ``ReceiverEngine.apply``."""
        ...

    def holds(self, session: str) -> bool:
        """As ``ReceiverEngine.holds``."""
        ...

    def lease_lost(self, session: str) -> None:
        """As ``ReceiverEngine.lease_lost``."""
        ...


def weight_routes(engine: Answers, score: Score | None = None) -> APIRouter:
    """The native session over HTTP.

    Args:
        engine: Whom to hand messages to.
        score: Log-probability of each token but the first given those before it, under the live weights.
    """
    router = APIRouter(prefix="/weightcast", tags=["weights"])

    @router.get("/info", summary="What this engine is and serves")
    async def info() -> Response:
        return _json(engine.info())

    @router.post("/apply", summary="One message of an update: Join, Announce, Close, Commit, Abort, Leave")
    async def apply(request: Request) -> Response:
        message = await _message(request)
        if isinstance(message, Response):
            return message
        if isinstance(message, Open):
            return _refusal(400, "Open goes to /weightcast/open, whose answer stays open as the session's lease")
        return _answer(await run_in_threadpool(engine.apply, message))

    @router.post("/open", summary="Start an update; the answer stays open, and closing it ends the session")
    async def open_(request: Request) -> Response:
        message = await _message(request)
        if isinstance(message, Response):
            return message
        if not isinstance(message, Open):
            return _refusal(400, "only Open is understood here; the rest goes to /weightcast/apply")
        ack = await run_in_threadpool(engine.apply, message)
        if not ack.ok:
            return _answer(ack)
        return _LeaseResponse(engine, message, ack)

    @router.get("/digests", summary="Digest of what is live, by tensor")
    async def digests() -> Response:
        return _answer(await run_in_threadpool(engine.apply, Readback()))

    @router.post("/score", summary="Log-probabilities of given tokens under the live weights")
    async def score_(request: Request) -> Response:
        if score is None:
            return _refusal(404, "this engine cannot score")
        try:
            body = msgspec.json.decode(await request.body(), type=dict[str, list[int]])
            tokens = body["token_ids"]
        except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
            return _refusal(400, f"expected {{'token_ids': [...]}}: {error}")
        if not 2 <= len(tokens) <= MAX_SCORED_TOKENS:
            return _refusal(400, f"token_ids has {len(tokens)} tokens; 2 to {MAX_SCORED_TOKENS} can be scored")
        try:
            values = await run_in_threadpool(score, tokens)
        except WeightcastError as error:
            return _refusal(409, str(error))
        return Response(msgspec.json.encode({"logprobs": list(values)}), media_type="application/json")

    return router


class _LeaseResponse(StreamingResponse):
    """The answer as one frame, then a heartbeat until the session is over or the trainer is gone.

    Ends the session when it ends itself, whether the trainer closed it, died (the kernel closes its sockets) or had
    gone before the first byte was sent.
    """

    def __init__(self, engine: Answers, message: Open, ack: Ack) -> None:
        super().__init__(self._frames(encode(ack)), media_type="application/octet-stream")
        self._engine = engine
        self._session = message.session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._engine.holds(self._session):
                asyncio.get_running_loop().run_in_executor(None, self._engine.lease_lost, self._session)

    async def _frames(self, body: bytes) -> AsyncIterator[bytes]:
        yield len(body).to_bytes(4, "big") + body
        while self._engine.holds(self._session):
            await asyncio.sleep(HEARTBEAT_S)
            yield b"\0\0\0\0"


async def _message(request: Request) -> Message | Response:
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > MAX_MESSAGE_BYTES:
                return _refusal(413, f"the message is larger than {MAX_MESSAGE_BYTES} bytes")
            chunks.append(chunk)
        return await run_in_threadpool(decode, b"".join(chunks))
    except ClientDisconnect:
        return _refusal(400, "the message ended early")
    except WireError as error:
        return _refusal(400, str(error))


def _json(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(encode(body), status_code=status, media_type="application/json")


def _answer(ack: Ack) -> Response:
    status = 200 if ack.ok else 500 if ack.failed_ranks else GROUP_FAILED if ack.group_failed else 409
    return _json(ack, status)


def _refusal(status: int, text: str) -> Response:
    return Response(
        msgspec.json.encode({"error": {"message": text}}), status_code=status, media_type="application/json"
    )
