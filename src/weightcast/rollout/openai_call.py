"""OpenAI's routes, and one HTTP request with the generations that it asks for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from weightcast.errors import EngineFailure, WeightcastError
from weightcast.rollout.engine import RolloutEngine
from weightcast.rollout.openai_answers import CompletionFormat
from weightcast.rollout.openai_requests import CompletionRequest
from weightcast.rollout.requests import Generation, GenerationRequest
from weightcast.rollout.responses import REFUSALS, REFUSED, error_body, json_response
from weightcast.rollout.text import TextStream

_WHOLE_OR_STREAM: dict[str, Any] = {
    "description": "The answer: one body, or events if stream is true",
    "content": {"text/event-stream": {"schema": {"title": "Events"}}},
}


class Call:
    """All generations of one HTTP request; they end when the client disconnects."""

    def __init__(self, engine: RolloutEngine, body: CompletionRequest) -> None:
        """Submits the generations; if one is refused, the whole call fails."""
        if body.model is not None and body.model != engine.model:
            raise HTTPException(404, f"this engine does not serve {body.model!r}; it serves {engine.model!r}")
        self._engine = engine
        self._body = body
        prompts = [engine.text.encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts]
        self._format = CompletionFormat(body, engine.text, model=engine.model, prompt_tokens=sum(map(len, prompts)))
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[int | None] = asyncio.Queue()  # index of a generation; None if the client has gone
        self._generations: list[Generation] = []
        try:
            for index in range(len(prompts) * body.n):
                stops = TextStream(engine.text, body.stops)
                self._generations.append(
                    engine.scheduler.submit(
                        self._request(index, prompts[index // body.n]),
                        stops_text=stops.ends_at if body.stops else None,
                        on_change=self._tell(index),
                    )
                )
        except WeightcastError:
            self._abort()
            raise

    def _request(self, index: int, prompt: list[int]) -> GenerationRequest:
        body = self._body
        max_tokens = body.max_tokens
        if "max_tokens" not in body.model_fields_set and max_tokens is not None:  # the default is cut to fit
            max_tokens = max(1, min(max_tokens, self._engine.scheduler.limits.max_len - len(prompt)))
        return GenerationRequest(
            request_id=f"{self._format.id}-{index}",
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=max(body.top_k, 0),
            min_p=body.min_p,
            seed=None if body.seed is None else body.seed + index % body.n,
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            ignore_eos=body.ignore_eos,
            top_logprobs=body.logprobs or 0,
        )

    def _tell(self, index: int) -> Callable[[bool], None]:
        """Tells this call's event loop of a generation's tokens, if the answer is streamed, and of its end."""

        def tell(finished: bool) -> None:
            if finished or self._body.stream:
                with contextlib.suppress(RuntimeError):  # the loop has ended, and the reader with it
                    self._loop.call_soon_threadsafe(self._news.put_nowait, index)

        return tell

    async def answer(self, request: Request) -> Response:
        """The response, whole or as a stream."""
        if self._body.stream:
            return StreamingResponse(self._events(), media_type="text/event-stream")
        watching = asyncio.create_task(self._watch(request))
        try:
            for _ in self._generations:
                index = await self._news.get()
                if index is None:
                    return Response(status_code=499)  # nobody reads it
                answer = self._generations[index].answer
                if answer.finish_reason == "error":
                    raise EngineFailure(answer.error or "the engine failed")
            return json_response(self._format.whole([generation.answer for generation in self._generations]))
        finally:
            watching.cancel()
            self._abort()

    async def _watch(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._news.put_nowait(None)

    async def _events(self) -> AsyncIterator[bytes]:
        streams = [TextStream(self._engine.text, self._body.stops) for _ in self._generations]
        growing = set(range(len(streams)))
        try:
            while growing:
                index = await self._news.get()
                if index not in growing:
                    continue
                piece, stream = self._generations[index].news(), streams[index]
                if piece.finish_reason == "error":
                    yield _event(error_body(piece.error or "the engine failed", kind="engine_error"))
                elif piece.tokens or piece.finish_reason is not None:
                    offset = stream.num_characters
                    text = stream.feed(piece.tokens) + (stream.end() if piece.finish_reason is not None else "")
                    yield _event(self._format.event(index, piece, text, offset=offset))
                if piece.finish_reason is not None:
                    growing.remove(index)
            yield b"data: [DONE]\n\n"
        finally:
            self._abort()

    def _abort(self) -> None:
        for generation in self._generations:
            if generation.answer.finish_reason is None:
                self._engine.scheduler.abort(generation.request.request_id)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def openai_routes(app: FastAPI, engine: RolloutEngine) -> None:
    """Adds the routes under /v1."""
    created = int(time.time())

    async def models() -> Response:
        entry = {
            "id": engine.model,
            "object": "model",
            "created": created,
            "owned_by": "weightcast",
            "max_model_len": engine.scheduler.limits.max_len,
            "weight_version": engine.scheduler.version,
        }
        return json_response({"object": "list", "data": [entry]})

    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await Call(engine, body).answer(request)

    async def chat() -> Response:
        raise HTTPException(
            404,
            "this engine has no chat templates; apply the model's own with its tokenizer, and send the token ids to "
            "/v1/completions",
        )

    app.get("/v1/models", summary="The model that is served")(models)
    answers: dict[int | str, dict[str, Any]] = {200: _WHOLE_OR_STREAM, 404: REFUSED, **REFUSALS}
    app.post("/v1/completions", summary="Continue prompts", responses=answers)(completions)
    app.post("/v1/chat/completions", include_in_schema=False)(chat)
