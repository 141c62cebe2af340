"""The OpenAI-compatible server: parses requests, submits them to the scheduler and renders answers.

`build_app` mounts the weight endpoints, which are the receiver's own router.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from weightcast.errors import ConfigError, DeadlineExceeded, EngineFailure, Refused, WeightcastError
from weightcast.receiver.api_keys import Keys
from weightcast.receiver.server import NOT_FOR_YOU, no_browsers, weight_routes
from weightcast.rollout.engine import RolloutEngine
from weightcast.rollout.metrics import CONTENT_TYPE, Metrics
from weightcast.rollout.neutral import refusal
from weightcast.rollout.openai import (
    ChatRequest,
    Choice,
    CompletionRequest,
    PauseRequest,
    Sampled,
    chat_logprobs,
    completion_logprobs,
    error_body,
    usage,
    versions,
)
from weightcast.rollout.requests import Answer, Generation, GenerationRequest
from weightcast.rollout.text import TextStream

MAX_BODY_BYTES = 16 << 20
_OPEN_ROUTES = frozenset({"/health"})
_Result = TypeVar("_Result")
_REFUSED: dict[str, Any] = {"description": "Refused; the body is an error in OpenAI's shape"}
_WHOLE_OR_STREAM: dict[str, Any] = {
    "description": "The answer: one body, or events if stream is true",
    "content": {"text/event-stream": {"schema": {"title": "Events"}}},
}
# OpenAI answers 400 where FastAPI would answer 422.
_REFUSALS: dict[int | str, dict[str, Any]] = {code: _REFUSED for code in (400, 409, 413, 422, 503, 504)}
_PARAMETERS = [*CompletionRequest.model_fields, *ChatRequest.model_fields, *PauseRequest.model_fields]

ExtraRoutes = Callable[[FastAPI, RolloutEngine], None]


def build_app(engine: RolloutEngine, *, api_key: str | None = None, extra_routes: ExtraRoutes | None = None) -> FastAPI:
    """Builds the app with all routes of one engine.

    Args:
        engine: The engine that answers requests.
        api_key: Key required as ``Authorization: Bearer`` on every route but /health; None requires none.
        extra_routes: Function that adds the caller's own routes and middleware first, so that they take precedence.
    """
    app = FastAPI(title="weightcast reference engine", openapi_url="/openapi.json", docs_url=None, redoc_url=None)
    if extra_routes is not None:
        extra_routes(app, engine)
    # Starlette wraps in reverse: the key is checked before a byte of the body is read.
    app.add_middleware(_BodyLimit)
    if api_key is not None:
        app.add_middleware(_ApiKey, keys=Keys([api_key]))
    _error_handlers(app)
    _openai_routes(app, engine)
    _control_routes(app, engine)
    if engine.receiver is not None:
        app.include_router(weight_routes(engine.receiver, engine.score))
    return app


# -- routes


def _openai_routes(app: FastAPI, engine: RolloutEngine) -> None:
    created = int(time.time())

    def entry() -> dict[str, Any]:
        return {
            "id": engine.model,
            "object": "model",
            "created": created,
            "owned_by": "weightcast",
            "max_model_len": engine.scheduler.limits.max_len,
            "weight_version": engine.scheduler.version,
        }

    async def models() -> Response:
        return _json({"object": "list", "data": [entry()]})

    async def model(name: str) -> Response:
        _check_model(engine, name)
        return _json(entry())

    async def completions(body: CompletionRequest, request: Request) -> Response:
        prompts = [_prompt_ids(engine, prompt) for prompt in body.prompts]
        asked = "max_tokens" in body.model_fields_set
        call = _Call(
            engine, body, prompts, top_logprobs=body.logprobs or 0, max_tokens=body.max_tokens, cut_to_fit=not asked
        )
        return await call.answer(request, _CompletionShape(engine, body))

    async def chat(body: ChatRequest, request: Request) -> Response:
        if engine.text is None:
            raise ConfigError("this model has no tokenizer", hint="send token ids to /v1/completions")
        try:
            messages = [message.plain() for message in body.messages]
        except ValueError as error:
            raise ConfigError(f"messages: {error}") from None
        prompt = engine.text.chat(messages, **(body.chat_template_kwargs or {}))
        top = (body.top_logprobs or 0) if body.logprobs else 0
        call = _Call(engine, body, [prompt], top_logprobs=top, max_tokens=body.max_completion_tokens or body.max_tokens)
        return await call.answer(request, _ChatShape(engine, body))

    app.get("/v1/models", summary="The model that is served")(models)
    app.get("/v1/models/{name:path}", summary="The model of this name", responses={404: _REFUSED})(model)
    answers: dict[int | str, dict[str, Any]] = {200: _WHOLE_OR_STREAM, 404: _REFUSED, **_REFUSALS}
    app.post("/v1/completions", summary="Continue prompts", responses=answers)(completions)
    app.post("/v1/chat/completions", summary="Answer a conversation", responses=answers)(chat)


def _control_routes(app: FastAPI, engine: RolloutEngine) -> None:
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
        return _json({"status": "ok" if healthy else "unhealthy", **body}, 200 if healthy else 503)

    async def prometheus() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    async def pause(body: PauseRequest | None = None) -> Response:
        body = body or PauseRequest()
        await run_in_threadpool(scheduler.pause, body.mode, body.timeout_s, holder="operator")
        return _json(status())

    async def resume() -> Response:
        scheduler.resume(holder="operator")
        return _json(status())

    async def sleep(body: PauseRequest | None = None) -> Response:
        await run_in_threadpool(fall_asleep, body or PauseRequest())
        return _json(status())

    def fall_asleep(body: PauseRequest) -> None:
        # Sleep and a commit both move the weights, so only one may run.  This is checked twice: now, before any request
        # is ended for it, and when nothing runs, because messages to the receiver do not wait until then.
        alone = engine.receiver.between_updates if engine.receiver is not None else contextlib.nullcontext
        with alone():
            pass
        scheduler.sleep(body.mode, timeout_s=body.timeout_s, alone=alone)

    async def wake() -> Response:
        await run_in_threadpool(scheduler.wake)
        return _json(status())

    unwell: dict[int | str, dict[str, Any]] = {503: {"description": "The engine cannot serve; the body says why"}}
    app.get("/health", summary="200 while the engine can serve, with state and version", responses=unwell)(health)
    metrics_type: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
    app.get("/metrics", summary="Counters for Prometheus", response_class=Response, responses=metrics_type)(prometheus)
    ours = APIRouter(dependencies=[Depends(no_browsers)], responses=NOT_FOR_YOU | _REFUSALS)
    ours.post("/pause", summary="Pause: abort, retract, in_place or wait")(pause)
    ours.post("/continue", summary="Undo /pause")(resume)
    ours.post("/sleep", summary="Pause, free the cache and move the weights off the accelerator")(sleep)
    ours.post("/wake", summary="Undo /sleep")(wake)
    app.include_router(ours)


def _check_model(engine: RolloutEngine, name: str) -> None:
    if name != engine.model:
        raise HTTPException(404, f"this engine does not serve the model {name!r}; it serves {engine.model!r}")


def _prompt_ids(engine: RolloutEngine, prompt: str | list[int]) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    if engine.text is None:
        raise ConfigError("this model has no tokenizer", hint="send the prompt as token ids")
    return engine.text.encode(prompt)


# -- one call, several generations


class _Call:
    """All generations of one HTTP request; they end when the client disconnects."""

    def __init__(
        self,
        engine: RolloutEngine,
        body: Sampled,
        prompts: Sequence[list[int]],
        *,
        top_logprobs: int,
        max_tokens: int | None,
        cut_to_fit: bool = False,
    ) -> None:
        if body.model is not None:
            _check_model(engine, body.model)
        if body.stops and engine.text is None:
            raise ConfigError("stop strings need a tokenizer, and this model has none", hint="use stop_token_ids")
        self._engine = engine
        self._body = body
        self.prompt_tokens = sum(map(len, prompts))
        self.id = uuid.uuid4().hex
        self._generations: list[Generation] = []
        allowed = None if body.allowed_token_ids is None else frozenset(body.allowed_token_ids)
        try:
            for index in range(len(prompts) * body.n):
                prompt = prompts[index // body.n]
                room = engine.scheduler.limits.max_len - len(prompt)
                request = GenerationRequest(
                    request_id=f"{self.id}-{index}",
                    prompt=tuple(prompt),
                    max_tokens=max(1, min(max_tokens, room)) if max_tokens and cut_to_fit else max_tokens,
                    temperature=body.temperature,
                    top_p=body.top_p,
                    top_k=max(body.top_k, 0),
                    min_p=body.min_p,
                    frequency_penalty=body.frequency_penalty,
                    presence_penalty=body.presence_penalty,
                    repetition_penalty=body.repetition_penalty,
                    logit_bias=body.logit_bias or {},
                    allowed_token_ids=allowed,
                    seed=None if body.seed is None else body.seed + index % body.n,
                    stop_token_ids=frozenset(body.stop_token_ids or ()),
                    ignore_eos=body.ignore_eos,
                    top_logprobs=top_logprobs,
                )
                self._generations.append(engine.scheduler.submit(request, stops_text=self._stops_text()))
        except WeightcastError:
            self._abort()  # one was refused, so the whole call fails
            raise

    def _stops_text(self) -> Callable[[int], bool]:
        """Tells the scheduler where stop strings end one answer, so that it generates nothing beyond them."""
        if not self._body.stops or self._engine.text is None:
            return lambda _: False
        stream = TextStream(self._engine.text, self._body.stops)

        def stops(token: int) -> bool:
            stream.feed([token])
            return stream.stopped

        return stops

    async def answer(self, request: Request, shape: _Shape) -> Response:
        """The response, whole or as a stream."""
        if self._body.stream:
            return StreamingResponse(self._events(shape), media_type="text/event-stream")
        try:
            choices = await _unless_gone(request, self._choices())
        finally:
            self._abort()
        if choices is None:
            return Response(status_code=499)  # the client has disconnected
        body = shape.whole(self.id, choices, usage(self.prompt_tokens, [choice.answer for choice in choices]))
        return _json(body)

    async def _choices(self) -> list[Choice]:
        return list(await asyncio.gather(*map(self._choice, range(len(self._generations)))))

    async def _choice(self, index: int) -> Choice:
        generation, text = self._generations[index], self._engine.text
        if not self._body.stops or text is None:
            answer = await generation.finished()
            plain = text.decode(answer.tokens) if text is not None else None
            return Choice(index=index, text=plain, answer=answer, finish_reason=answer.finish_reason)
        stream, written = TextStream(text, self._body.stops), ""
        async for gained in generation.progress():
            written += stream.feed(gained.tokens)
            if stream.stopped:
                break
        else:
            written += stream.end()
        if not stream.stopped:
            answer = await generation.finished()
            return Choice(index=index, text=written, answer=answer, finish_reason=answer.finish_reason)
        self._engine.scheduler.abort(generation.request.request_id)
        answer = _first(generation.answer, stream.num_tokens)
        return Choice(index=index, text=written, answer=answer, finish_reason="stop")

    async def _events(self, shape: _Shape) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        readers = [asyncio.create_task(self._read(index, shape, queue)) for index in range(len(self._generations))]
        try:
            left = len(readers)
            while left:
                event = await queue.get()
                if event is None:
                    left -= 1
                else:
                    yield _event(event)
            if self._body.include_usage:
                answers = [generation.answer for generation in self._generations]
                yield _event(shape.last(self.id, usage(self.prompt_tokens, answers)))
            yield b"data: [DONE]\n\n"
        finally:
            self._abort()
            for reader in readers:
                reader.cancel()

    async def _read(self, index: int, shape: _Shape, queue: asyncio.Queue[dict[str, Any] | None]) -> None:
        """Turns one generation into events; always puts None at its end."""
        generation, text = self._generations[index], self._engine.text
        stream = TextStream(text, self._body.stops) if text is not None else None
        offset = start = 0
        try:
            async for gained in generation.progress():
                if gained.finish_reason == "error":
                    queue.put_nowait(error_body(gained.error or "the engine failed", kind="engine_error"))
                    return
                written = stream.feed(gained.tokens) if stream is not None else ""
                used = stream.num_tokens - start if stream is not None else len(gained.tokens)
                stopped = stream is not None and stream.stopped
                finish = "stop" if stopped else gained.finish_reason
                if finish is not None and stream is not None:
                    written += stream.end()
                piece = _Piece(
                    index=index,
                    text=written,
                    tokens=gained.tokens[:used],
                    logprobs=gained.logprobs[:used],
                    top=gained.top[:used],
                    offset=offset,
                    finish_reason=finish,
                    answer=_first(generation.answer, start + used),
                )
                start += used
                offset += len(written)
                queue.put_nowait(shape.piece(self.id, piece))
                if stopped:
                    self._engine.scheduler.abort(generation.request.request_id)
                    return
        finally:
            queue.put_nowait(None)

    def _abort(self) -> None:
        for generation in self._generations:
            if generation.answer.finish_reason is None:
                self._engine.scheduler.abort(generation.request.request_id)


def _first(answer: Answer, count: int) -> Answer:
    """An answer cut after `count` tokens."""
    spans: list[tuple[int, int]] = []
    left = count
    for version, tokens in list(answer.spans):
        if left > 0:
            spans.append((version, min(tokens, left)))
        left -= tokens
    return Answer(
        tokens=answer.tokens[:count],
        logprobs=answer.logprobs[:count],
        top=answer.top[:count],
        spans=spans,
        version=spans[-1][0] if spans else answer.version,
        finish_reason=answer.finish_reason,
    )


# -- shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Part of a streamed answer."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    offset: int
    finish_reason: str | None
    answer: Answer


class _Shape:
    """The response format of one of the two endpoints."""

    prefix = ""
    kind = ""
    chunk_kind = ""

    def __init__(self, engine: RolloutEngine, body: Sampled) -> None:
        self._engine = engine
        self._ids = body.return_token_ids
        self._created = int(time.time())

    def whole(self, call: str, choices: Sequence[Choice], counts: dict[str, int]) -> dict[str, Any]:
        """A response that is not streamed."""
        entries: list[dict[str, Any]] = []
        for choice in choices:
            entry = {"index": choice.index, **self.content(choice), "finish_reason": choice.finish_reason}
            if self._ids:
                entry["token_ids"] = choice.answer.tokens
            entries.append({**entry, **versions([choice.answer])})
        head = self._head(call, self.kind)
        return {**head, "choices": entries, "usage": counts, **versions([choice.answer for choice in choices])}

    def piece(self, call: str, piece: _Piece) -> dict[str, Any]:
        """One event of a stream; the last of a choice has the weight versions of its tokens."""
        entry = {"index": piece.index, **self.delta(piece), "finish_reason": piece.finish_reason}
        if self._ids:
            entry["token_ids"] = piece.tokens
        known = versions([piece.answer])
        if piece.finish_reason is not None:
            entry |= known
        return {
            **self._head(call, self.chunk_kind),
            "choices": [entry],
            "weight_version": known["weight_version"],
        }

    def last(self, call: str, counts: dict[str, int]) -> dict[str, Any]:
        """The event with the token counts."""
        return {**self._head(call, self.chunk_kind), "choices": [], "usage": counts}

    def content(self, choice: Choice) -> dict[str, Any]:
        """Text and log-probabilities of a whole choice."""
        raise AssertionError("each endpoint has its own")

    def delta(self, piece: _Piece) -> dict[str, Any]:
        """Text and log-probabilities of a part of a choice."""
        raise AssertionError("each endpoint has its own")

    def _head(self, call: str, kind: str) -> dict[str, Any]:
        return {"id": f"{self.prefix}-{call}", "object": kind, "created": self._created, "model": self._engine.model}


class _CompletionShape(_Shape):
    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, engine: RolloutEngine, body: CompletionRequest) -> None:
        super().__init__(engine, body)
        self._logprobs = body.logprobs is not None

    def content(self, choice: Choice) -> dict[str, Any]:
        """Text and log-probabilities."""
        answer = choice.answer
        return {
            "text": choice.text or "",
            "logprobs": self._numbers(answer.tokens, answer.logprobs, answer.top, 0),
        }

    def delta(self, piece: _Piece) -> dict[str, Any]:
        """New text and log-probabilities."""
        return {
            "text": piece.text,
            "logprobs": self._numbers(piece.tokens, piece.logprobs, piece.top, piece.offset),
        }

    def _numbers(
        self, tokens: list[int], logprobs: list[float], top: list[list[tuple[int, float]]], start: int
    ) -> dict[str, Any] | None:
        return completion_logprobs(self._engine.text, tokens, logprobs, top, start) if self._logprobs else None


class _ChatShape(_Shape):
    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, engine: RolloutEngine, body: ChatRequest) -> None:
        super().__init__(engine, body)
        self._logprobs = bool(body.logprobs)

    def content(self, choice: Choice) -> dict[str, Any]:
        """A message and log-probabilities."""
        answer = choice.answer
        return {
            "message": {"role": "assistant", "content": choice.text or ""},
            "logprobs": self._numbers(answer.tokens, answer.logprobs, answer.top),
        }

    def delta(self, piece: _Piece) -> dict[str, Any]:
        """New text and log-probabilities; the role with the first."""
        first = {"role": "assistant"} if len(piece.tokens) == len(piece.answer.tokens) else {}
        return {
            "delta": {**first, "content": piece.text},
            "logprobs": self._numbers(piece.tokens, piece.logprobs, piece.top),
        }

    def _numbers(
        self, tokens: list[int], logprobs: list[float], top: list[list[tuple[int, float]]]
    ) -> dict[str, Any] | None:
        return chat_logprobs(self._engine.text, tokens, logprobs, top) if self._logprobs else None


# -- HTTP


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def _unless_gone(request: Request, work: Awaitable[_Result]) -> _Result | None:
    """The result, or None if the client closes the connection first."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, WeightcastError):
                await task


class _ApiKey:
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
            await _json(body, 401)(scope, receive, send)


class _BodyLimit:
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


def _error_handlers(app: FastAPI) -> None:
    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        errors = error.errors()
        unknown = [_place(entry) for entry in errors if entry["type"] == "extra_forbidden"]
        place = unknown[0] if unknown else _place(errors[0])
        if unknown:
            message = refusal(unknown, _PARAMETERS)
        else:
            words = str(errors[0]["msg"]).removeprefix("Value error, ")
            message = f"{place}: {words}" if place else words
        return _json(error_body(message, param=place.split(".")[0] or None), 400)

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _json(error_body(str(error.detail)), error.status_code)

    async def ours(_: Request, error: Exception) -> Response:
        assert isinstance(error, WeightcastError)
        status, kind = _meaning(error)
        hint = f" ({error.hint})" if error.hint else ""
        return _json(error_body(f"{error}{hint}", kind=kind), status)

    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        RequestValidationError: invalid,
        HTTPException: http,
        WeightcastError: ours,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _place(entry: dict[str, Any]) -> str:
    return ".".join(str(part) for part in entry["loc"] if part != "body")


def _meaning(error: WeightcastError) -> tuple[int, str]:
    match error:
        case ConfigError():
            return 400, "invalid_request_error"
        case Refused():
            return 409, "conflict"
        case DeadlineExceeded():
            return 504, "timeout"
        case EngineFailure():
            return 503, "engine_error"
        case _:
            return 500, "internal_error"
