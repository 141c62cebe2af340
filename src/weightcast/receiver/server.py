"""The HTTP routes of our receiver: they decode messages, pass them to the session handler and encode its answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any, Protocol

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse
from msgspec import Meta
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from weightcast.errors import ConfigError, Refused, WeightcastError, WireError, error_words
from weightcast.receiver.api_keys import Guard
from weightcast.wire.answers import GROUP_FAILED, MAPPING_FAILED, UNKNOWN_BLOB, Ack
from weightcast.wire.blobs import UnknownBlob
from weightcast.wire.codec import MAX_MESSAGE_BYTES, decode, encode
from weightcast.wire.engine_info import EngineInfo, EngineStatus
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Message, Open, Readback

HEARTBEAT_S = 1.0
MAX_SCORED_TOKENS = 4096
MAX_SCORE_BYTES = 1 << 20
_SPARE_BYTES = 8 << 20  # of a message, for everything but the tensors that it names, such as handles of trainer ranks
_TIMES_THE_TABLE = 4
_DECODED_AT_ONCE_BYTES = 64 << 10
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
ScorePrompt = Callable[[Sequence[int]], Sequence[float]]


class Scored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a request to /weightcast/score."""

    token_ids: Annotated[tuple[TokenId, ...], Meta(min_length=2, max_length=MAX_SCORED_TOKENS)]


class Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of /weightcast/score: one number for each token but the first."""

    logprobs: tuple[float, ...]


class Words(msgspec.Struct, frozen=True, kw_only=True):
    """The reason of a refusal."""

    message: str


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that is no ``Ack``."""

    error: Words


NOT_FOR_YOU: dict[int | str, dict[str, Any]] = {
    401: {"description": "The key is wrong or missing"},
    403: {"description": "The request came from a web page"},
}


class Answers(Protocol):
    """The part of ``SessionHandler`` that routes need."""

    def info(self) -> EngineInfo:
        """As ``SessionHandler.info``."""
        ...

    def status(self) -> EngineStatus:
        """As ``SessionHandler.status``."""
        ...

    def apply(self, message: Message) -> Ack:
        """As ``SessionHandler.apply``."""
        ...

    def holds(self, session: str) -> bool:
        """As ``SessionHandler.holds``."""
        ...

    def lease_lost(self, session: str) -> None:
        """As ``SessionHandler.lease_lost``."""
        ...


class Late:
    """``Answers`` of an engine that may not be there yet, or may be another one at the next request."""

    def __init__(self, now: Callable[[], Answers]) -> None:
        """``now`` returns the engine, or raises ``HTTPException``."""
        self._now = now

    def info(self) -> EngineInfo:
        """As ``Answers.info``."""
        return self._now().info()

    def status(self) -> EngineStatus:
        """As ``Answers.status``."""
        return self._now().status()

    def apply(self, message: Message) -> Ack:
        """As ``Answers.apply``."""
        return self._now().apply(message)

    def holds(self, session: str) -> bool:
        """As ``Answers.holds``."""
        return self._now().holds(session)

    def lease_lost(self, session: str) -> None:
        """As ``Answers.lease_lost``."""
        self._now().lease_lost(session)


def weight_routes(engine: Answers, score: ScorePrompt | None = None, *, guard: Guard | None = None) -> APIRouter:
    """Returns the routes of an update.

    Args:
        score: Function that returns the log-probability of each token but the first, given those before it, under the
            live weights; None if the engine cannot.
        guard: Says who may use the routes; None admits everybody but web pages.
    """
    checked = [Depends((guard or Guard()).check)]
    router = APIRouter(prefix="/weightcast", tags=["weights"], dependencies=checked, responses=NOT_FOR_YOU)
    limit = _MessageLimit(engine)

    @router.get("/info", summary="The engine's description and state", responses={200: _INFO}, response_class=Response)
    async def info(specs: str = "") -> Response:
        return Response(encode(engine.info(), known=(specs,)), media_type="application/json")

    @router.get(
        "/status", summary="State, version and last update, in short", responses={200: _STATUS}, response_class=Response
    )
    async def status() -> Response:
        return reply(engine.status())

    @router.post(
        "/apply",
        summary="One message of an update: Prepare, Join, Announce, Fetch, Close, Commit, Revert, Abort, Leave",
        response_class=Response,
        responses={200: _ACK, **_REFUSALS},
        openapi_extra={"requestBody": {"required": True, **_MESSAGES}},
    )
    async def apply(request: Request) -> Response:
        message = await _message(request, limit)
        if isinstance(message, Response):
            return message
        if isinstance(message, Open):
            return refusal(400, "Open goes to /weightcast/open, whose answer stays open as the session's lease")
        return _answer(await run_in_threadpool(engine.apply, message))

    @router.post(
        "/open",
        summary="Start an update; the answer stays open, and closing it ends the session",
        response_class=Response,
        responses={200: _LEASE, **_REFUSALS},
        openapi_extra={"requestBody": {"required": True, **_OPEN}},
    )
    async def open_(request: Request) -> Response:
        message = await _message(request, limit)
        if isinstance(message, Response):
            return message
        if not isinstance(message, Open):
            return refusal(400, "this route takes only Open; other messages go to /weightcast/apply")
        ack = await run_in_threadpool(engine.apply, message)
        if not ack.ok:
            return _answer(ack)
        return _LeaseResponse(engine, message, ack)

    @router.get(
        "/digests", summary="Digest of each live tensor", response_class=Response, responses={200: _ACK, **_FAILURES}
    )
    async def digests() -> Response:
        return _answer(await run_in_threadpool(engine.apply, Readback()))

    @router.post(
        "/score",
        summary="Log-probabilities of given tokens under the live weights",
        response_class=Response,
        responses={200: _LOGPROBS, **{code: _REFUSED for code in (400, 404, 409, 413)}},
        openapi_extra={"requestBody": {"required": True, **_SCORED}},
    )
    async def score_(request: Request) -> Response:
        if score is None:
            return refusal(404, "this engine cannot score")
        body = await read_body(request, MAX_SCORE_BYTES)
        if isinstance(body, Response):
            return body
        try:
            tokens = msgspec.json.decode(body, type=Scored).token_ids
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
            return refusal(400, f"expected {{'token_ids': [...]}} with 2 to {MAX_SCORED_TOKENS} tokens: {error}")
        try:
            values = await run_in_threadpool(score, tokens)
        except ConfigError as error:
            return refusal(400, str(error))
        except WeightcastError as error:
            return refusal(409, str(error))
        return reply(Logprobs(logprobs=tuple(values)))

    return router


class _LeaseResponse(StreamingResponse):
    """The answer to Open: an ``Ack`` as one frame, then heartbeats until the session is over or the trainer is gone.

    The end of this answer ends the session.  The trainer may have closed the connection, have died (the kernel closes
    its sockets), or have been gone before the first byte was sent.
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


class _MessageLimit:
    """Limit on the bytes of a message: a few times the engine's own table of tensors, less than the schema allows."""

    def __init__(self, engine: Answers) -> None:
        self._engine = engine
        self._specs: tuple[TensorSpec, ...] = ()
        self._limit_bytes = _SPARE_BYTES

    def __call__(self) -> int:
        specs = self._engine.info().specs
        if specs is not self._specs:
            table = len(msgspec.json.encode(specs))
            self._limit_bytes = min(MAX_MESSAGE_BYTES, _SPARE_BYTES + _TIMES_THE_TABLE * table)
            self._specs = specs
        return self._limit_bytes


async def _message(request: Request, limit: _MessageLimit) -> Message | Response:
    body = await read_body(request, limit())
    if isinstance(body, Response):
        return body
    try:
        if len(body) <= _DECODED_AT_ONCE_BYTES:  # a switch to another thread takes longer
            return decode(body)
        return await run_in_threadpool(decode, body)
    except UnknownBlob as error:
        return refusal(UNKNOWN_BLOB, str(error))
    except WireError as error:
        return refusal(400, str(error))


async def carried_out(do: Callable[[], Response | msgspec.Struct]) -> Response:
    """Calls a function on a thread, and answers with what it returns or the words of its error."""
    try:
        answer = await run_in_threadpool(do)
    except Refused as error:
        return refusal(409, error_words(error))
    except WeightcastError as error:
        return refusal(500, error_words(error))
    return answer if isinstance(answer, Response) else reply(answer)


async def read_body(request: Request, limit_bytes: int) -> bytes | Response:
    """Returns the body, or a refusal as soon as its header or the bytes so far show that it is too large."""
    too_large = refusal(413, f"the body has more than {limit_bytes} bytes, the limit for this engine")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit_bytes:
        return too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            if len(body) + len(chunk) > limit_bytes:
                return too_large
            body += chunk
    except ClientDisconnect:
        return refusal(400, "the message ended early")
    return bytes(body)


def reply(body: msgspec.Struct, status: int = 200) -> Response:
    """Returns a message as the body of an answer."""
    return Response(encode(body), status_code=status, media_type="application/json")


def _answer(ack: Ack) -> Response:
    status = 200 if ack.ok else 500 if ack.failed_ranks else _STATUSES[ack.cause]
    return reply(ack, status)


def refusal(status: int, text: str) -> Response:
    """Returns an answer that is no ``Ack``, with the reason."""
    return reply(Refusal(error=Words(message=text)), status)


def json_content(description: str) -> dict[str, Any]:
    """Returns an OpenAPI response or request body in JSON.  ``wire`` has the forms, and the document repeats none."""
    return {"description": description, "content": {"application/json": {}}}


_STATUSES = {"engine": 409, "group": GROUP_FAILED, "mapping": MAPPING_FAILED}
_INFO = json_content("The engine's description, with every tensor that an update must contain")
_STATUS = json_content("State, version and last update")
_ACK = json_content("Done")
_LOGPROBS = json_content("One log-probability for each token but the first")
_REFUSED = json_content("Refused; nothing changed")
_NOT_NOW = json_content("Refused or failed; the answer has the engine's state")
_LEASE = {
    "description": "A length (4 bytes, big endian) and an Ack, then heartbeats until the session is over",
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}
_MESSAGES = json_content("One message")
_OPEN = json_content("The first message of an update")
_SCORED = json_content("A text as tokens")
_FAILURES: dict[int | str, dict[str, Any]] = {code: _NOT_NOW for code in (*_STATUSES.values(), 500)}
_REFUSALS: dict[int | str, dict[str, Any]] = {400: _REFUSED, 413: _REFUSED, UNKNOWN_BLOB: _REFUSED, **_FAILURES}
