"""OpenAI's routes, and one HTTP request to generate with the generations that it asks for."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from weightcast.errors import ConfigError, WeightcastError
from weightcast.rollout.engine import RolloutEngine
from weightcast.rollout.openai_answers import AnswerChunk, AnswerShape, ChatShape, CompletionShape, usage
from weightcast.rollout.openai_requests import ChatRequest, CompletionRequest, Sampled
from weightcast.rollout.requests import GenerateAnswer, Generation, GenerationRequest
from weightcast.rollout.responses import REFUSALS, REFUSED, error_body, json_response
from weightcast.rollout.text import TextStream

_Result = TypeVar("_Result")
_WHOLE_OR_STREAM: dict[str, Any] = {
    "description": "The answer: one body, or events if stream is true",
    "content": {"text/event-stream": {"schema": {"title": "Events"}}},
}


def check_model(engine: RolloutEngine, name: str) -> None:
    """Refuses another model's name with 404."""
    if name != engine.model:
        raise HTTPException(404, f"this engine does not serve the model {name!r}; it serves {engine.model!r}")


class Call:
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
            check_model(engine, body.model)
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

    async def answer(self, request: Request, shape: AnswerShape) -> Response:
        """The response, whole or as a stream."""
        if self._body.stream:
            return StreamingResponse(self._events(shape), media_type="text/event-stream")
        work = asyncio.gather(*map(self._choice, range(len(self._generations))))
        try:
            choices = await _unless_gone(request, work)
        finally:
            self._abort()
        if choices is None:
            return Response(status_code=499)  # the client has disconnected
        body = shape.whole(self.id, choices, usage(self.prompt_tokens, [choice.answer for choice in choices]))
        return json_response(body)

    async def _choice(self, index: int) -> AnswerChunk:
        generation, text = self._generations[index], self._engine.text
        if not self._body.stops or text is None:
            answer = await generation.finished()
            plain = text.decode(answer.tokens) if text is not None else ""
            return AnswerChunk(index=index, text=plain, answer=answer, finish_reason=answer.finish_reason)
        stream, written = TextStream(text, self._body.stops), ""
        async for gained in generation.progress():
            written += stream.feed(gained.tokens)
            if stream.stopped:
                break
        else:
            written += stream.end()
        if not stream.stopped:
            answer = await generation.finished()
            return AnswerChunk(index=index, text=written, answer=answer, finish_reason=answer.finish_reason)
        self._engine.scheduler.abort(generation.request.request_id)
        answer = _first(generation.answer, stream.num_tokens)
        return AnswerChunk(index=index, text=written, answer=answer, finish_reason="stop")

    async def _events(self, shape: AnswerShape) -> AsyncIterator[bytes]:
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

    async def _read(self, index: int, shape: AnswerShape, queue: asyncio.Queue[dict[str, Any] | None]) -> None:
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
                piece = AnswerChunk(
                    index=index,
                    text=written,
                    answer=_first(generation.answer, start + used),
                    finish_reason=finish,
                    start=start,
                    offset=offset,
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


def _first(answer: GenerateAnswer, count: int) -> GenerateAnswer:
    spans: list[tuple[int, int]] = []
    left = count
    for version, tokens in list(answer.spans):
        if left > 0:
            spans.append((version, min(tokens, left)))
        left -= tokens
    return GenerateAnswer(
        tokens=answer.tokens[:count],
        logprobs=answer.logprobs[:count],
        top=answer.top[:count],
        spans=spans,
        version=spans[-1][0] if spans else answer.version,
        finish_reason=answer.finish_reason,
    )


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


def openai_routes(app: FastAPI, engine: RolloutEngine) -> None:
    """Adds the routes under /v1."""
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
        return json_response({"object": "list", "data": [entry()]})

    async def model(name: str) -> Response:
        check_model(engine, name)
        return json_response(entry())

    async def completions(body: CompletionRequest, request: Request) -> Response:
        prompts = [_prompt_ids(engine, prompt) for prompt in body.prompts]
        asked = "max_tokens" in body.model_fields_set
        call = Call(
            engine, body, prompts, top_logprobs=body.logprobs or 0, max_tokens=body.max_tokens, cut_to_fit=not asked
        )
        return await call.answer(request, CompletionShape(engine, body))

    async def chat(body: ChatRequest, request: Request) -> Response:
        if engine.text is None:
            raise ConfigError("this model has no tokenizer", hint="send token ids to /v1/completions")
        try:
            messages = [message.plain() for message in body.messages]
        except ValueError as error:
            raise ConfigError(f"messages: {error}") from None
        prompt = engine.text.chat(messages, **(body.chat_template_kwargs or {}))
        top = (body.top_logprobs or 0) if body.logprobs else 0
        call = Call(engine, body, [prompt], top_logprobs=top, max_tokens=body.max_completion_tokens or body.max_tokens)
        return await call.answer(request, ChatShape(engine, body))

    app.get("/v1/models", summary="The model that is served")(models)
    app.get("/v1/models/{name:path}", summary="The model of this name", responses={404: REFUSED})(model)
    answers: dict[int | str, dict[str, Any]] = {200: _WHOLE_OR_STREAM, 404: REFUSED, **REFUSALS}
    app.post("/v1/completions", summary="Continue prompts", responses=answers)(completions)
    app.post("/v1/chat/completions", summary="Answer a conversation", responses=answers)(chat)


def _prompt_ids(engine: RolloutEngine, prompt: str | list[int]) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    if engine.text is None:
        raise ConfigError("this model has no tokenizer", hint="send the prompt as token ids")
    return engine.text.encode(prompt)
